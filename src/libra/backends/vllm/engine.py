"""One rollout engine: vLLM in this process, stepped by Libra's own loop.

Invariant: between two iterations this loop controls the engine, so a weight update is a plain call at that point. It
neither drains nor loses running turns. A token has the version of the engine's weights in its iteration. (vLLM itself
reports the versions of tokens only at the end of a turn that it ended itself.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from libra.backends.transport.engine_messages import Fetched, Generate, LoadWeights, Save, Saved, StartEngine
from libra.backends.transport.messages import Tensor
from libra.backends.transport.shared_memory import WeightBuffer
from libra.backends.vllm.adapter import drained, engine_arguments
from libra.backends.vllm.executor import InProcessExecutor
from libra.backends.vllm.kv_connector import FrameConnector, request_arguments, transfer_config
from libra.backends.vllm.report import Sampled
from libra.backends.vllm.weights import CONFIG, WORKER_EXTENSION, TurnTaking, take_turns


class VllmEngine:
    """vLLM with a few methods: turns, steps, KV transfers and weights."""

    def __init__(self, start: StartEngine, buffer: WeightBuffer, scheduler: type[Any] | None = None) -> None:
        """`scheduler` replaces vLLM's own scheduler class."""
        self._refresh_kv = start.refresh_kv
        self._in_turns: TurnTaking = lambda weights: weights
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                **engine_arguments(start),
                distributed_executor_backend=InProcessExecutor if start.gpus == 1 else "mp",
                worker_extension_cls=WORKER_EXTENSION if start.gpus > 1 else "",
                weight_transfer_config=CONFIG,
                kv_transfer_config=transfer_config(start.kv) if start.kv is not None else None,
                scheduler_cls=scheduler,
                # On a GPU, only this allocator can unmap a part of its memory, as needed for memory that changes hands.
                enable_cumem_allocator=start.loan is not None
                and start.loan.kv_beside is not None
                and current_platform.is_cuda_alike(),
            )
        )
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        # The scheduler's connector, which is in this process like the engine. None: the engine transfers no KV.
        self._kv: FrameConnector | None = self._scheduler.get_kv_connector()
        self.expect(buffer, start.layout)
        self.version = 0
        self._turns: set[str] = set()  # in progress
        self._untouched: set[str] = set()  # turns without a token yet

    @property
    def most_tokens(self) -> int:
        """Most tokens that one step may compute."""
        most: int = self._scheduler.scheduler_config.max_num_batched_tokens
        return most

    @property
    def in_turns(self) -> TurnTaking:
        """Wraps weight loading in device grants."""
        return self._in_turns

    @in_turns.setter
    def in_turns(self, in_turns: TurnTaking) -> None:
        self._in_turns = in_turns
        self._engine.collective_rpc(take_turns, args=(in_turns,))

    @property
    def generating(self) -> bool:
        return self._engine.has_unfinished_requests()

    @property
    def busy(self) -> bool:
        return self.generating or (self._kv is not None and self._kv.giving)

    def add(self, request: Generate) -> None:
        salt = self._salt(request.salt)
        prompt: dict[str, object] = {"prompt_token_ids": request.tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        self._engine.add_request(
            request.id,
            prompt,
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stop_token_ids=[request.stop_token] if request.stop_token >= 0 else [],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=request_arguments(request.transfer) if request.transfer is not None else None,
            ),
            priority=request.priority,
        )
        self._turns.add(request.id)
        self._untouched.add(request.id)

    def warm_up(self) -> None:
        """Make two turns and drop them, so that a GPU compiles its kernels before the first real turn."""
        for temperature in (1.0, 0.5):  # at 0.5 logits are divided, which takes other kernels
            self.add(Generate("warm-up", [0, 0], 2, temperature, -1, 0, salt="warm-up"))
            while self.busy:
                self.step()

    def interrupt(self, turn: str) -> bool:
        """Stop a turn between two iterations; all its tokens have been reported. Returns False if it has ended
        already."""
        if turn not in self._turns:
            return False
        self._turns.remove(turn)
        self._untouched.discard(turn)
        self._engine.abort_request([turn])
        return True

    def put_out(self, request: str) -> str:
        """`interrupt` a turn by the name of its request in the scheduler; returns the turn's own name."""
        turn = self._engine.output_processor.request_states[request].external_req_id
        self.interrupt(turn)
        return turn

    def step(self) -> list[Sampled]:
        """Make one iteration; returns the result of each turn in it."""
        sampled = []
        for output in self._engine.step():
            turn, completion = output.request_id, output.outputs[0]
            prefilled = 0
            if turn in self._untouched:
                self._untouched.remove(turn)
                prefilled = len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)
            if output.finished:
                self._turns.remove(turn)
            tokens = list(completion.token_ids)
            assert completion.logprobs is not None
            logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
            sampled.append(Sampled(turn, tokens, logprobs, prefilled, output.finished))
        return sampled

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self._scheduler

    def give(self, order: Save) -> None:
        """Save KV of a context for another engine, some blocks in each of the next steps."""
        if self._kv is None:
            raise RuntimeError("this engine was started without frames for KV")
        self._kv.give(msgspec.structs.replace(order, salt=self._salt(order.salt)))

    def handed(self) -> list[Saved | Fetched]:
        """Transfers that were saved for other engines, or fetched from them, since the last call."""
        return self._kv.done() if self._kv is not None else []

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    def expect(self, buffer: WeightBuffer, layout: tuple[Tensor, ...]) -> None:
        """Find new versions in `buffer`, with this layout, from now on."""
        self._buffer = buffer
        places = [(each.name, each.shape, each.offset, each.dtype) for each in layout]
        place = {"pid": os.getpid(), "descriptor": buffer.descriptor, "size": buffer.size, "layout": places}
        self._engine.collective_rpc("init_weight_transfer_engine", args=(place,))

    def drained(self) -> Iterator[list[Sampled]]:
        """Finish the iterations in flight, and yield their results, before the next `load` changes the version."""
        return drained(self._engine.engine_core.engine_core, self.step)

    def sleep(self) -> None:
        """Release the memory of weights and KV. No turn may be in flight."""
        if self._turns or self.busy:
            raise RuntimeError("turns are in flight, which would be lost")
        self._engine.sleep(level=2)

    def wake(self) -> None:
        """Allocate the memory again. It has no content, so call `load` next."""
        self._engine.wake_up()
        self.version = -1

    def load(self, order: LoadWeights) -> None:
        """Load a new version between two iterations, with none in flight. `WeightUpdateError` leaves the old version in
        place, since the check precedes vLLM's reload, which first empties the layers."""
        if self._engine.engine_core.engine_core.batch_queue:
            raise RuntimeError("an iteration is in flight: its tokens would have two versions; call drained first")
        self._buffer.verify(order.buffer, order.checksum)
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"buffer": order.buffer, "checksum": order.checksum},))
        self._engine.collective_rpc("finish_weight_update")
        self.version = order.version
        if self._kv is not None:
            self._kv.version = order.version

    def _salt(self, asked: str | None) -> str | None:
        """Namespace in the prefix cache for a request that starts under the current version."""
        return f"v{self.version}" if asked is None and self._refresh_kv else asked
