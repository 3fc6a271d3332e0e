"""A server under recorded traffic, which stands for users and their server in demonstrations and tests of lending.

Invariant: requests arrive at their recorded times, independent of the engine's state. The engine is vLLM with
`LendingScheduler`, as in `vllm serve`, without HTTP and tokenisation. The process renews the lender's word, so the loan
ends with the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import StartServer
from libra.backends.transport.messages import Acknowledged, Ready, Stop
from libra.backends.vllm.executor import InProcessExecutor
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.lend.backend.device import Cores
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.scheduler import DEVICE, SynchronousLending
from libra.lend.records.served import ServedRequest
from libra.records.files import LineFile
from libra.sim.clock import seconds
from libra.sim.workload.request_file import read_requests

LEASE = 2.0  # seconds for which the device may be borrowed after this process last renewed the word
_TOKENS = range(4, 30)  # token ids of prompts; their meaning does not matter


@dataclass(frozen=True, slots=True)
class _Arrival:
    number: int
    at: float  # seconds since the traffic began
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    arrival: _Arrival
    first: float = 0.0  # time of the first token; 0: no token yet
    tokens: int = 0


def serve_traced(channel: WorkerChannel, start: StartServer) -> None:
    """Serve until the controller sends `Stop` or has ended."""
    began = time.monotonic()
    os.environ[DEVICE] = start.device
    os.sched_setaffinity(0, start.cores)

    class Paced(SynchronousLending):
        device = Cores(start.share)

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=start.model_directory,
            load_format="dummy" if start.random_weights else "auto",
            skip_tokenizer_init=True,
            max_model_len=start.max_model_len,
            max_num_seqs=start.max_num_seqs,
            max_num_batched_tokens=start.max_num_batched_tokens,
            kv_cache_memory_bytes=start.kv_cache_bytes,
            block_size=BLOCK_TOKENS,
            dtype=start.dtype,
            enforce_eager=True,
            disable_log_stats=True,
            async_scheduling=False,
            seed=start.seed,
            distributed_executor_backend=InProcessExecutor,
            scheduler_cls=Paced,
        )
    )
    lender, served = LenderToken(Path(start.device)), LineFile(Path(start.served))
    arrivals = _arrivals(start)
    channel.send(Ready(time.monotonic() - began))
    coming, live = next(arrivals), dict[str, _Live]()
    origin = time.monotonic() - (coming.at if start.first else 0.0)
    while True:
        now = time.monotonic()
        lender.extend(now + LEASE)
        while coming.at <= now - origin:
            _ask(engine, coming)
            live[str(coming.number)] = _Live(coming)
            coming = next(arrivals)
        idle = not engine.has_unfinished_requests()
        if channel.poll(max(0.0, min(coming.at - (now - origin), LEASE / 4)) if idle else 0.0):
            message = channel.receive()
            if not isinstance(message, Stop):
                raise TypeError(f"{type(message).__name__} is not a message for a server")
            lender.close()
            served.close()
            channel.send(Acknowledged())
            return
        if not idle:
            outputs = engine.step()
            now = time.monotonic() - origin
            for output in outputs:
                request = live[output.request_id]
                if not request.tokens:
                    request.first = now
                request.tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    served.append(_ended(live.pop(output.request_id), now, origin).to_line())


def _arrivals(start: StartServer) -> Iterator[_Arrival]:
    """Endless arrivals, from number `start.first` on. The log repeats a second after its last request."""
    requests, longest, numbers = read_requests(start.traffic), start.max_model_len, count()
    first = int(start.begins * len(requests))
    skipped, whole = seconds(requests[first].arrival), seconds(requests[-1].arrival) + 1.0
    for round_ in count():
        for it in requests[first if round_ == 0 else 0 :]:
            at = (seconds(it.arrival) - skipped + round_ * whole) / start.speed
            prompt = min(longest - 2, max(1, round(it.prompt_tokens / start.shorter)))
            output = min(longest - prompt - 1, max(2, round(it.output_tokens / start.shorter)))
            if (number := next(numbers)) >= start.first:
                yield _Arrival(number, at, prompt, output)


def _ask(engine: LLMEngine, it: _Arrival) -> None:
    prompt = [_TOKENS[(it.number * 31 + 7 * index + index * index) % len(_TOKENS)] for index in range(it.prompt_tokens)]
    engine.add_request(
        str(it.number),
        {"prompt_token_ids": prompt},
        SamplingParams(
            max_tokens=it.output_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        ),
    )


def _ended(request: _Live, now: float, origin: float) -> ServedRequest:
    it = request.arrival
    return ServedRequest(
        number=it.number,
        arrival=it.at,
        prompt_tokens=it.prompt_tokens,
        output_tokens=request.tokens,
        ttft=request.first - it.at,
        tpot=(now - request.first) / max(1, request.tokens - 1),
        came=origin + it.at,
    )
