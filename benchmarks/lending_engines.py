"""Two vLLM engines in two processes on one device: one serves random traffic, the other rolls out, phase by phase.

Invariant: each phase has the same requests as every other of its rate. Between two phases both engines are empty.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from libra.lend.gate import Gate, Grant, Refusal, ServingCost, ServingView, SharingRule
from libra.lend.rules import NoLending, ServeFirst

Mode = Literal["alone", "no gate", "serve first", "gate"]
_DRAIN = 15.0  # seconds after a phase in which what is under way may end
_START = 300.0  # seconds in which an engine has to start


@dataclass(frozen=True, slots=True)
class Setting:
    """Both engines, in vLLM's arguments, and what they are asked for. Seconds and tokens."""

    serving: Mapping[str, Any]
    rollout: Mapping[str, Any]
    device: str  # file of its token
    pace: float  # tau
    longest: float  # of a grant
    shortest: float
    turns: int  # always under way
    prompt: tuple[int, int]  # median and longest, of requests
    output: tuple[int, int]
    turn_prompt: tuple[int, int]  # least and most
    turn_output: tuple[int, int]
    core: int | None = None  # that is the device


class Phase(NamedTuple):
    mode: Mode
    rate: float  # requests a second
    seconds: float


def run(setting: Setting, phases: Sequence[Phase]) -> list[dict[str, dict[str, Any]]]:
    """Run both engines, each in its own process; return their measurements of each phase."""
    from libra.lend.backend.lender_token import LenderToken

    context, pipes = multiprocessing.get_context("spawn"), dict[str, Connection]()
    processes = []
    try:
        # The serving engine makes the device's file, and compiles what the other then finds in a cache.
        for name, role in {"serving": _serve, "rollout": _roll}.items():
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=role, args=(theirs, setting), daemon=True))
            processes[-1].start()
            theirs.close()
            try:
                if not pipes[name].poll(_START):
                    raise EOFError
                pipes[name].recv_bytes()
            except EOFError:
                raise SystemExit(f"the {name} engine did not start; what it printed says why") from None
        lender = LenderToken(Path(setting.device))
        lender.extend(float("inf"))
        said = []
        for phase in phases:
            begin = time.monotonic() + 0.1
            for pipe in pipes.values():
                pipe.send_bytes(json.dumps([*phase, begin]).encode())
            said.append({name: json.loads(pipe.recv_bytes()) for name, pipe in pipes.items()})
        lender.close()
        for pipe in pipes.values():
            pipe.send_bytes(b"null")
        for process in processes:
            process.join(20)
        return said
    finally:
        for process in processes:
            process.kill()


@dataclass(slots=True)
class _Asked:
    arrival: float
    prompt: list[int]
    output: int
    times: list[float] = field(default_factory=list)  # of its tokens, from the beginning of the phase


def _serve(pipe: Connection, setting: Setting) -> None:
    """Told a phase, answers what became of its requests and steps; ends with the pipe."""
    from libra.lend.backend.scheduler import DEVICE, AsynchronousLending, SynchronousLending

    os.environ[DEVICE] = setting.device
    engine = _started(
        setting, setting.serving, AsynchronousLending if setting.serving["async_scheduling"] else SynchronousLending
    )
    waits = _watched(engine.engine_core.engine_core.scheduler._token)
    for number, (phase, begin) in enumerate(_phases(pipe)):
        asked, live, steps = _draw(setting, phase), dict[str, _Asked](), []
        to_come = list(enumerate(asked))
        waits.clear()
        while (to_come or live) and time.monotonic() - begin < phase.seconds + _DRAIN:
            now = time.monotonic() - begin
            while to_come and to_come[0][1].arrival <= now:
                index, it = to_come.pop(0)
                live[f"{number}-{index}"] = it
                _ask(engine, f"{number}-{index}", it.prompt, it.output)
            if not live:
                time.sleep(max(0.0, min(0.0003, to_come[0][1].arrival - now)))
                continue
            began, waited, decoding = time.monotonic(), len(waits), all(it.times for it in live.values())
            outputs = engine.step()
            ended = time.monotonic()
            seconds, lent = zip(*waits[waited:], strict=True) if len(waits) > waited else ((), ())
            if outputs:
                steps.append((ended - began - sum(seconds), any(lent), decoding))
            for output in outputs:
                live[output.request_id].times += [ended - begin] * len(output.outputs[0].token_ids)
                if output.finished:
                    del live[output.request_id]
        engine.abort_request(list(live))
        while engine.has_unfinished_requests():
            engine.step()
        requests = [(it.arrival, it.output, it.times) for it in asked]
        pipe.send_bytes(json.dumps({"requests": requests, "steps": steps, "waits": [it for it, _ in waits]}).encode())


def _roll(pipe: Connection, setting: Setting) -> None:
    """Told a phase, answers what it made in it; ends with the pipe."""
    from libra.lend.backend.borrower import GatedBorrower
    from libra.lend.backend.borrower_token import BorrowerToken
    from libra.lend.backend.device import device_here
    from libra.lend.backend.scheduler import BorrowingScheduler

    most, ids = setting.rollout["max_num_batched_tokens"], _vocabulary(setting.rollout)
    engine = _Stepped(_started(setting, setting.rollout, BorrowingScheduler))
    token, device, rule = BorrowerToken(Path(setting.device), setting.pace), device_here(), _ChangingRule()
    # One for all phases: what it learns of steps in one is not lost for the next.
    borrower = GatedBorrower(token, rule, device, shortest=setting.shortest, most_tokens=most)
    rules: dict[str, SharingRule] = {
        "serve first": ServeFirst(setting.longest),
        "gate": Gate(setting.longest, setting.shortest),
    }
    for number, (phase, begin) in enumerate(_phases(pipe)):
        random, made, tokens, spent = np.random.default_rng(number), 0, 0, list[float]()
        rule.rule, before = rules.get(phase.mode, NoLending()), borrower.tally
        bounded, over = borrower.own_steps.bounded, borrower.own_steps.over
        while time.monotonic() - begin < phase.seconds:
            if phase.mode == "alone":
                borrower.watch()
                time.sleep(0.005)
                continue
            while len(engine.turns) < setting.turns:
                made += 1
                prompt, output = (int(random.integers(*it)) for it in (setting.turn_prompt, setting.turn_output))
                engine.add(f"{number}-{made}", random.integers(4, ids, prompt).tolist(), output)
            began = time.monotonic()
            if phase.mode == "no gate":
                new: int | None = engine.bounded_step(most)
                device.end()
            else:
                new = borrower.step(engine)
            if new is not None:
                spent.append(time.monotonic() - began)
                tokens += new
        borrower.rest()
        if phase.mode == "no gate":
            token.steps()  # of serving disturbed: nothing to learn from
        engine.abort()
        said = {
            "tokens": tokens,
            "steps": spent,
            "lent": borrower.tally.lent - before.lent,
            "overstayed": borrower.tally.overstayed - before.overstayed,
            "bounded": borrower.own_steps.bounded - bounded,
            "over": borrower.own_steps.over - over,
        }
        pipe.send_bytes(json.dumps(said).encode())


class _ChangingRule:
    """The rule of the phase."""

    rule: SharingRule = NoLending()

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        return self.rule.decide(view, now, cost)


class _Stepped:
    """vLLM as `SteppedEngine`."""

    def __init__(self, llm: Any) -> None:
        self.llm, self._scheduler = llm, llm.engine_core.engine_core.scheduler
        self.turns: set[str] = set()

    @property
    def queue(self) -> Any:
        return self._scheduler.queue

    @property
    def shape(self) -> Any:
        return self._scheduler.shape

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        _ask(self.llm, name, prompt, tokens)
        self.turns.add(name)

    def bounded_step(self, tokens: int) -> int:
        """One step; tokens that it generated."""
        self._scheduler.max_num_scheduled_tokens = tokens
        outputs = self.llm.step()
        self.turns.difference_update(it.request_id for it in outputs if it.finished)
        return sum(len(it.outputs[0].token_ids) for it in outputs)

    def abort(self) -> None:
        self.llm.abort_request(list(self.turns))
        self.turns.clear()


def _started(setting: Setting, options: Mapping[str, Any], scheduler: Any) -> Any:
    """vLLM's `LLMEngine` in this process, after its first steps, which set things up."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if setting.core is not None:
        os.sched_setaffinity(0, {setting.core})
    arguments = EngineArgs(
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        scheduler_cls=scheduler,
        load_format="dummy",
        gpu_memory_utilization=0.3,  # of which only that it is free is asked: the options say how much KV has
        **{"async_scheduling": False, **options},
    )
    engine, vocabulary = LLMEngine.from_engine_args(arguments), _vocabulary(options)
    for number, tokens in enumerate((300, 5, 60)):
        _ask(engine, f"warm-{number}", [4 + index % (vocabulary - 4) for index in range(tokens)], 8)
    while engine.has_unfinished_requests():
        engine.step()
    return engine


def _vocabulary(options: Mapping[str, Any]) -> int:
    return int(json.loads((Path(options["model"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _ask(engine: Any, name: str, prompt: list[int], tokens: int) -> None:
    """Ask for this number of tokens after the prompt, told as they come."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


def _phases(pipe: Connection) -> Iterator[tuple[Phase, float]]:
    """Phases and when they begin, as they are received."""
    pipe.send_bytes(b"ready")
    while told := json.loads(pipe.recv_bytes()):
        yield Phase(*told[:3]), told[3]


def _draw(setting: Setting, phase: Phase) -> list[_Asked]:
    """Poisson arrivals, lognormal lengths: each is at its median or below for half of the requests."""
    random, now, asked = np.random.default_rng(17), 0.0, list[_Asked]()
    while (now := now + random.exponential(1 / phase.rate)) < phase.seconds:
        lengths = [
            max(2, min(longest, round(median * random.lognormal(0.0, 0.8))))
            for median, longest in (setting.prompt, setting.output)
        ]
        asked.append(_Asked(now, random.integers(4, _vocabulary(setting.serving), lengths[0]).tolist(), lengths[1]))
    return asked


def _watched(token: Any) -> list[tuple[float, bool]]:
    """Record from now on the seconds that serving waits for the token, and whether it was lent."""
    waits, acquire = list[tuple[float, bool]](), token.acquire

    def watched() -> bool:
        began = time.monotonic()
        have: bool = acquire()
        waits.append((time.monotonic() - began, token.lent))
        return have

    token.acquire = watched
    return waits
