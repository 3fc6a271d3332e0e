"""vLLM in this process and one thread, on its own clock: CPU time of its steps, plus the time it had nothing to do.

Invariant: the clock counts what the engine does and nothing else: not the making of prompts, not the recording of
steps, not the other engines of this process, and not what other processes do with the machine's cores.
"""

from __future__ import annotations

import gc
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.fidelity.step import Step
from benchmarks.fidelity.texts import Texts
from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.backends.tiny_model import kv_bytes_per_token
from libra.sim.clock import TICKS, seconds
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.requests import Workload

_NANOSECOND = TICKS // 10**9


class _RecordingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's own, which keeps what it decided last."""

    decided: SchedulerOutput | None = None

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        self.decided = super().schedule(*args, **kwargs)
        return self.decided


class RealEngine:
    """One engine: requests are `put`, and `step` takes them in and runs an iteration. Generates greedily, to length.

    It lives as long as the process: vLLM ends what its engines share with the first of them that is freed.
    """

    def __init__(self, number: int, model: Path, config: EngineConfig) -> None:
        """Raises ValueError where the process is not set up for one thread."""
        wrong = [name for name, value in WORKER_ENVIRONMENT.items() if os.environ.get(name) != value]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: start this process with libra.backends.launch.fork_server.WORKER_ENVIRONMENT"
            )
        torch.set_num_threads(1)
        self.number = number
        self.clock = 0  # ticks
        self.steps: list[Step] = []
        self._texts_of: dict[str, tuple[Request, list[int]]] = {}  # running or waiting in vLLM, and their prompts
        self._inbox: list[tuple[Request, list[int]]] = []
        self._engine = LLMEngine.from_engine_args(_arguments(model, config))
        self._prefilling: set[str] = set()  # vLLM's names of those that have not computed their context since admission
        self._changing = True  # the last step leaves a batch that its engine has to set up anew
        self._scheduler: _RecordingScheduler = self._engine.engine_core.engine_core.scheduler

    @property
    def busy(self) -> bool:
        return bool(self._inbox or self._texts_of)

    def put(self, request: Request, prompt: list[int]) -> None:
        """Give it `request` for the next step. An engine without work waits for it: its clock goes to the arrival."""
        if not self.busy:
            self.clock = max(self.clock, request.arrival)
        request.engine = self.number
        self._inbox.append((request, prompt))

    def step(self) -> list[tuple[Request, list[int]]]:
        """Take in what was put, run one iteration; the requests that it finished, and the tokens they generated."""
        inbox, self._inbox = self._inbox, []
        begin = time.process_time_ns()
        for request, prompt in inbox:
            self._add(request, prompt)
        added = time.process_time_ns()
        outputs = self._engine.step()
        end = time.process_time_ns()
        decided = self._scheduler.decided
        assert decided is not None
        self._record(decided, inbox, (added - begin) * _NANOSECOND, (end - added) * _NANOSECOND, len(outputs))
        done = []
        for output in outputs:
            request, _ = self._texts_of.pop(output.request_id)
            request.finish = self.clock
            request.cached_tokens = output.num_cached_tokens
            request.status = "finished"
            done.append((request, list(output.outputs[0].token_ids)))
        return done

    def forget(self) -> None:
        """Start anew, with an empty prefix cache and a clock at 0. Raises ValueError while there is work."""
        if self.busy:
            raise ValueError(f"engine {self.number} has work; step it until it is not busy")
        if not self._engine.reset_prefix_cache():
            raise ValueError(f"engine {self.number} still holds blocks of finished requests")
        self.clock = 0
        self.steps = []

    def _add(self, request: Request, prompt: list[int]) -> None:
        name = f"{request.number:08d}"  # vLLM orders equal arrivals by name
        self._engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            SamplingParams(
                max_tokens=request.output_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
            arrival_time=seconds(request.arrival),
            priority=request.priority,
        )
        self._texts_of[name] = (request, prompt)

    def _record(
        self,
        decided: SchedulerOutput,
        inbox: list[tuple[Request, list[int]]],
        adding: int,
        duration: int,
        finished: int,
    ) -> None:
        begin, self.clock = self.clock, self.clock + adding + duration
        # A context can miss one token only: what a sequence computes does not tell whether that is its decoding.
        resumed = decided.scheduled_cached_reqs.resumed_req_ids
        self._prefilling.update(resumed, (new.req_id for new in decided.scheduled_new_reqs))
        decodes, attended, chunks = 0, 0, []
        for name, new, before, generated in _scheduled(decided):
            request, _ = self._texts_of[_external(name)]
            if request.scheduled is None:
                request.scheduled = begin
            known = request.prompt_tokens + generated
            if name in self._prefilling:
                chunks.append((new, before))
            else:
                decodes += 1
                attended += known
            if before + new == known:
                self._prefilling.discard(name)
                request.generated = generated + 1
                if request.first_token is None:
                    request.prefill_end = request.first_token = self.clock
        for name in decided.preempted_req_ids or ():
            self._texts_of[_external(name)][0].preemptions += 1
        preempted = len(decided.preempted_req_ids or ())
        changed, self._changing = self._changing, bool(chunks or finished or preempted)
        self.steps.append(
            Step(
                engine=self.number,
                begin=begin,
                adding=adding,
                duration=duration,
                decodes=decodes,
                attended=attended,
                chunks=tuple(chunks),
                added=len(inbox),
                added_tokens=sum(len(prompt) for _, prompt in inbox),
                admitted=len(decided.scheduled_new_reqs) + len(resumed),
                finished=finished,
                preempted=preempted,
                changed=changed,
            )
        )


def run(
    engines: Sequence[RealEngine], workload: Workload, route: Callable[[Request], int], texts: Texts
) -> list[Request]:
    """Serve all of a workload, each request on the engine whose index `route` gives; the requests as they came.

    The engine whose clock is behind steps first, so an arrival is routed before any step that begins at its instant or
    later; other engines may be up to one iteration ahead of it.
    """
    coming = [(request.arrival, request.number, request) for request in workload.start()]
    heapq.heapify(coming)
    requests = []
    with undisturbed():
        while True:
            behind = min((engine for engine in engines if engine.busy), key=lambda engine: engine.clock, default=None)
            if coming and (behind is None or coming[0][0] <= behind.clock):
                request = heapq.heappop(coming)[2]
                requests.append(request)
                engines[route(request)].put(request, texts.prompt(chain_of(request), request.prompt_tokens))
            elif behind is not None:
                for request, tokens in behind.step():
                    texts.generated(chain_of(request), request.prompt_tokens, tokens)
                    following = workload.finished(request, behind.clock)
                    if following is not None:
                        heapq.heappush(coming, (following.arrival, following.number, following))
            else:
                return requests


def round_robin(engines: int) -> Callable[[Request], int]:
    """Requests in turn to each of the engines."""
    routed = 0

    def route(request: Request) -> int:
        nonlocal routed
        routed += 1
        return (routed - 1) % engines

    return route


def chain_of(request: Request) -> Chain:
    if request.chain is None:
        raise ValueError(f"request {request.number} has no chain to take its tokens from; give it one of its own")
    return request.chain


def _arguments(model: Path, config: EngineConfig) -> EngineArgs:
    blocks = config.kv_blocks + 1  # vLLM keeps one for itself
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=2 * blocks * config.block_size * kv_bytes_per_token(model, "bfloat16"),
        block_size=config.block_size,
        watermark=config.watermark,
        scheduler_reserve_full_isl=config.reserve_full_prompt,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.policy,
        scheduler_cls=_RecordingScheduler,
        dtype="bfloat16",
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
    )


def _scheduled(decided: SchedulerOutput) -> Iterator[tuple[str, int, int, int]]:
    """(vLLM's name, new tokens, tokens before them, tokens generated so far) of each sequence of an iteration, in the
    scheduler's order."""
    known = decided.scheduled_cached_reqs
    computed = dict(
        zip(known.req_ids, zip(known.num_computed_tokens, known.num_output_tokens, strict=True), strict=True)
    )
    computed.update((new.req_id, (new.num_computed_tokens, 0)) for new in decided.scheduled_new_reqs)
    for name, new_tokens in decided.num_scheduled_tokens.items():
        before, generated = computed[name]
        yield name, new_tokens, before, generated


def _external(name: str) -> str:
    """vLLM appends random characters to the names it is given."""
    return name.rpartition("-")[0]


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage meanwhile: it would fall on an iteration that did not cause it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
