"""One rollout engine: vLLM in this process, stepped by our own loop.

Invariant: between two iterations the engine belongs to us, so a weight update is a plain call there: running turns are
neither drained nor lost, and a token is of the version that the engine held in the iteration that made it. (vLLM says
which tokens are of which version only with the end of a turn that it ended itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import EngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from libra.backends.transport.engine_messages import Fetched, Generate, LoadWeights, Save, Saved, StartEngine
from libra.backends.transport.messages import Tensor
from libra.backends.transport.shared_memory import WeightBuffer
from libra.backends.vllm.executor import InProcessExecutor
from libra.backends.vllm.kv_connector import FrameConnector, request_arguments, transfer_config
from libra.backends.vllm.report import Sampled
from libra.cost.engine_memory import BLOCK_TOKENS

if TYPE_CHECKING:
    import torch

    Weight = tuple[str, torch.Tensor]

_BACKEND = "libra_shm"


class VllmEngine:
    """vLLM behind a handful of verbs: add, interrupt, step, give, load."""

    def __init__(self, start: StartEngine, buffer: WeightBuffer, scheduler: type[Any] | None = None) -> None:
        """`scheduler` is used instead of vLLM's own."""
        self._refresh_kv = start.refresh_kv
        # Wraps weight loading in device grants.
        self.in_turns: Callable[[Iterator[Weight]], Iterator[Weight]] = lambda weights: weights
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=start.model_directory,
                skip_tokenizer_init=True,
                max_model_len=start.max_model_len,
                max_num_seqs=start.max_num_seqs,
                kv_cache_memory_bytes=start.kv_cache_bytes,
                block_size=BLOCK_TOKENS,
                enable_prefix_caching=True,
                scheduling_policy="priority",
                logprobs_mode="processed_logprobs",  # of what is sampled from: logits divided by the temperature
                dtype=start.dtype,
                enforce_eager=True,
                disable_log_stats=True,
                async_scheduling=False,
                seed=start.seed,
                distributed_executor_backend=InProcessExecutor,
                weight_transfer_config=WeightTransferConfig(backend=_BACKEND),
                kv_transfer_config=transfer_config(start.kv) if start.kv is not None else None,
                scheduler_cls=scheduler,
                # Memory that changes hands: on a GPU only this allocator unmaps a part of what it has.
                enable_cumem_allocator=start.loan is not None
                and start.loan.kv_beside is not None
                and current_platform.is_cuda_alike(),
            )
        )
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        # The scheduler's connector, which is in this process as the engine is. None: it hands no KV over.
        self._kv: FrameConnector | None = self._scheduler.get_kv_connector()
        self.expect(buffer, start.layout)
        self.version = 0
        self._turns: set[str] = set()  # that it has to make
        self._untouched: set[str] = set()  # those of them without a token yet

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

    def interrupt(self, turn: str) -> bool:
        """Stop a turn between two iterations; all that it generated was in the steps so far. False: it had ended."""
        if turn not in self._turns:
            return False
        self._turns.remove(turn)
        self._untouched.discard(turn)
        self._engine.abort_request([turn])
        return True

    def put_out(self, request: str) -> str:
        """`interrupt` a turn that is named as the scheduler names requests; returns its own name."""
        turn = self._engine.output_processor.request_states[request].external_req_id
        self.interrupt(turn)
        return turn

    def step(self) -> list[Sampled]:
        """Make one iteration; returns the result of each turn that it served."""
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
        """Save KV of a context for another engine, a little in each of the next steps."""
        if self._kv is None:
            raise RuntimeError("this engine was started without frames for KV")
        self._kv.give(msgspec.structs.replace(order, salt=self._salt(order.salt)))

    def handed(self) -> list[Saved | Fetched]:
        """KV that was saved for others, or that others had saved, since the last call."""
        return self._kv.done() if self._kv is not None else []

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    def expect(self, buffer: WeightBuffer, layout: tuple[Tensor, ...]) -> None:
        """Expect new versions in this buffer, laid out like this, from now on."""
        self._buffer = buffer
        self._engine.collective_rpc(
            "init_weight_transfer_engine", args=({"buffer": buffer, "layout": layout, "engine": self},)
        )

    def load(self, order: LoadWeights) -> None:
        """Take a new version between two iterations. On `WeightUpdateError` the old one stays: the check comes before
        vLLM's reload, which empties the layers as its first act."""
        self._buffer.verify(order.buffer, order.checksum)
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"buffer": order.buffer, "checksum": order.checksum},))
        self._engine.collective_rpc("finish_weight_update")
        self.version = order.version
        if self._kv is not None:
            self._kv.version = order.version

    def _salt(self, asked: str | None) -> str | None:
        """The namespace in the prefix cache of a request that asked for this one."""
        return f"v{self.version}" if asked is None and self._refresh_kv else asked


# vLLM's own extension point for weight updates, filled with our shared-memory buffers


@dataclass
class BufferInfo(WeightTransferInitInfo):
    buffer: WeightBuffer
    layout: tuple[Tensor, ...]
    engine: VllmEngine


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    buffer: int
    checksum: int


class SharedMemoryTransfer(WeightTransferEngine[BufferInfo, VersionInfo]):
    """vLLM sees a complete layerwise reload or none: the checksum is tested before the first tensor is touched."""

    init_info_cls = BufferInfo
    update_info_cls = VersionInfo

    def init_transfer_engine(self, init_info: BufferInfo) -> None:
        self._buffer, self._layout, self._engine = init_info.buffer, init_info.layout, init_info.engine

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, int]) -> None:
        # The base class synchronises an accelerator afterwards; there is none behind shared memory.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: VersionInfo) -> None:
        weights = self._buffer.read(update_info.buffer, self._layout, update_info.checksum)
        self.model.load_weights(self._engine.in_turns(weights))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(_BACKEND, SharedMemoryTransfer)
