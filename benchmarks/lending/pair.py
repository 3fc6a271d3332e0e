"""Two real vLLM engines on one core: what lending gives rollouts and costs users, rule by rule.

Invariant: every rule serves the same arrivals with the same two engines, and a miss is attributable where the same
request meets the SLO alone. The device's clock is this process's CPU time, so a busy machine does not count.

    python -m benchmarks.lending pair --traffic azure_2023_conv.csv [--rate 3] [--requests 120] [--json FILE]

Lengths of the trace are divided by 8, as the models are tiny. The first requests are for learning what steps take and
are not counted. Both engines are the product's own: vLLM with `LendingScheduler`, and the rollout engine of a run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.command import add_traffic, command_line
from benchmarks.lending._engines import (
    CpuDevice,
    ask,
    rollout_engine,
    serving_engine,
    start_rollout,
    turn,
    write_models,
)
from benchmarks.rows import Row, at_least, at_most, below, none, report
from libra.lend.backend.borrower import GatedBorrower
from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.borrowing_engine import SteppedVllm
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.record import LendingRecord
from libra.lend.backend.scheduler import DEVICE, SynchronousLending
from libra.lend.gate import SharingRule, Slo
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms, LentStep, read_lending, replay
from libra.lend.rules import ServeFirst
from libra.lend.step_cost import StepCost
from libra.lend.traffic.envelope import Envelope
from libra.sim.clock import seconds
from libra.sim.workload.request_file import read_requests

_SLO = Slo(ttft=0.5, tpot=0.1)
_USE = 0.8
_SHRINK = 8  # lengths of the trace
TURNS = 24  # of rollout, always under way
_FIRST = 2900  # request of the trace
LEARN = 100  # requests before those that count
TERMS = LendingTerms(
    model="serve",
    rollout="roll",
    pace=_SLO.pace(_USE),
    longest=0.025,
    shortest=0.004,
    envelope=Envelope(rate=100.0, queued=100_000, live=64, context=100_000, window=10.0),
    recall=RecallPolicy(quiet=5.0, most_quiet=300.0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = add_traffic(command_line("lending pair", __doc__), rate=3.0, requests=120)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(options.traffic, options.rate, options.requests, Path(directory))
    report(rows, options.json)
    return 0


@dataclass(slots=True)
class Asked:
    """One request of a user."""

    arrival: float  # seconds
    prompt: int
    output: int
    times: list[float] = field(default_factory=list)  # of its tokens

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    @property
    def missed(self) -> bool:
        return self.ttft > _SLO.ttft or self.tpot > _SLO.tpot


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one rule, with the requests that count."""

    requests: list[Asked]
    began: float  # on the device's clock
    seconds: float  # of the device
    serving: float  # of them, in serving steps
    lent: float
    rolled: int  # tokens that rollout generated
    steps: int  # of both engines
    admitting: float  # seconds in which requests were taken in
    learnt: tuple[StepCost, StepCost] | None  # what steps of serving and rollout took, where there was a borrower


class PairScheduler(SynchronousLending):
    """The lending scheduler on the clock of this process."""

    device = CpuDevice()


class Pair:
    """Both engines. Each rule gets a device's page of its own; the engines stay."""

    def __init__(self, directory: Path) -> None:
        write_models(directory)
        self.device, page = PairScheduler.device, directory / "device"
        os.environ[DEVICE] = str(page)
        self.serving = serving_engine(directory, PairScheduler)
        self.lender = LenderToken(page)
        self.lender.extend(float("inf"))
        self._page, self._directory, self._runs = page, directory, 0
        self.rollout = rollout_engine(start_rollout(directory, page, TERMS))
        self.steps = SteppedVllm(self.rollout)

    def serve(self, requests: list[Asked], rule: SharingRule | None, record: Path | None = None) -> Served:
        """`rule` None: serving alone. A record is written of a rule that is the one of `TERMS`."""
        self._runs += 1
        token = BorrowerToken(self._page, TERMS.pace)
        written = None if record is None else LendingRecord(record, TERMS, print)
        borrower = None
        if rule is not None:
            borrower = GatedBorrower(
                token, rule, self.device, shortest=TERMS.shortest, most_tokens=self.steps.most_tokens, record=written
            )
        try:
            return self._serve(requests, borrower)
        finally:
            if written is not None:
                written.close()
            token.close()
            for name in list(self._turns):
                self.rollout.interrupt(name)

    def _serve(self, requests: list[Asked], borrower: GatedBorrower | None) -> Served:
        clock, rng = self.device.clock, np.random.default_rng(0)
        begin, to_come, live = clock(), list(enumerate(requests)), dict[str, Asked]()
        self._turns, made = set[str](), 0
        serving = rolled = admitting = 0.0
        made_steps = 0
        since = begin, 0.0, 0.0, 0.0, 0, 0.0  # when those came that count, and what there was of the rest
        for request in requests:
            request.times.clear()
        while to_come or live:
            now = clock() - begin
            while to_come and to_come[0][1].arrival <= now:
                number, request = to_come.pop(0)
                if number == LEARN:
                    lent = borrower.tally.lent if borrower else 0.0
                    since = clock(), serving, lent, rolled, made_steps, admitting
                name = f"{self._runs}-{number}"
                began = clock()
                ask(self.serving, name, request.prompt, request.output, 10**6 * self._runs + number)
                admitting += clock() - began
                live[name] = request
            if borrower is not None:
                while len(self._turns) < TURNS:
                    made += 1
                    order = turn(self._runs * 10**6 + made, int(rng.integers(40, 500)), int(rng.integers(20, 200)))
                    self.rollout.add(order)
                    self._turns.add(order.id)
                step = borrower.step(self.steps)
                if step is not None:
                    made_steps += 1
                    for part in step:
                        rolled += len(part.tokens)
                        if part.ended:
                            self._turns.remove(part.turn)
                    continue
            if not live:
                self.device.skip(begin + to_come[0][1].arrival)
                continue
            began = clock()
            outputs = self.serving.step()
            now = clock()
            serving += now - began
            made_steps += 1
            for output in outputs:
                live[output.request_id].times += [now - begin] * len(output.outputs[0].token_ids)
                if output.finished:
                    del live[output.request_id]
        start, served_before, lent_before, rolled_before, steps_before, admitting_before = since
        lent = borrower.tally.lent if borrower else 0.0
        return Served(
            requests[LEARN:],
            start,
            clock() - start,
            serving - served_before,
            lent - lent_before,
            int(rolled - rolled_before),
            made_steps - steps_before,
            admitting - admitting_before,
            None if borrower is None else (borrower.serving_steps, borrower.own_steps),
        )


def measured(traffic: Path, rate: float, count: int, directory: Path) -> list[Row]:
    """Rows of all rules."""
    pair, record = Pair(directory), directory / "lending.jsonl"
    arrivals = arrivals_of(traffic, rate, count)
    rules: dict[str, tuple[Callable[[], SharingRule | None], Path | None]] = {
        "serving alone": (lambda: None, None),
        "serve first": (lambda: ServeFirst(TERMS.longest), None),
        "gate": (TERMS.rule, record),
    }
    pair.serve(arrivals()[: LEARN // 4], None)  # what is set up once is not counted
    served = {name: pair.serve(arrivals(), rule(), written) for name, (rule, written) in rules.items()}
    met = [not request.missed for request in served["serving alone"].requests]
    first = served["serve first"]
    rows = [row for name, outcome in served.items() for row in _rows(name, outcome, met, first)]
    return rows + _record_rows(record)


def arrivals_of(traffic: Path, rate: float, count: int) -> Callable[[], list[Asked]]:
    chosen = list(read_requests(traffic))[_FIRST : _FIRST + LEARN + count]
    start = chosen[0].arrival

    def fresh() -> list[Asked]:
        return [
            Asked(
                seconds(it.arrival - start) / rate,
                min(700, max(8, it.prompt_tokens // _SHRINK)),
                min(64, max(4, it.output_tokens // _SHRINK)),
            )
            for it in chosen
        ]

    return fresh


def _rows(name: str, it: Served, met: list[bool], first: Served) -> list[Row]:
    ours = name == "gate"
    tpot = [request.tpot for request in it.requests]
    ttft = [request.ttft for request in it.requests]
    attributable = sum(alone and request.missed for alone, request in zip(met, it.requests, strict=True))
    blamed, rate = (name, "attributable misses", attributable, f"of {sum(met)}"), it.rolled / it.seconds
    over_first = rate / (first.rolled / first.seconds)
    rows = [
        Row(name, "serving computes", it.serving / it.seconds, "of the time"),
        Row(name, "TTFT, largest", 1e3 * max(ttft), "ms"),
        at_most(name, "TPOT, largest", 1e3 * max(tpot), "ms", 1e3 * TERMS.pace if ours else None),
        none(*blamed) if ours else Row(*blamed),
    ]
    if it.rolled:
        rows += [
            at_least(name, "lent", it.lent / it.seconds, "of the time", 0.65 if ours else None),
            Row(name, "rollout", rate, "tokens/s"),
        ]
    if ours:
        # Where serving first leaves rollout a third of the device, nothing can be more than three times as fast.
        most = first.seconds / first.lent
        rows.append(at_least(name, "rollout over serve first", over_first, "x", 2.5))
        rows.append(Row(name, "that with all of the device", most, "x"))
        efficiency = (it.rolled / it.lent) / (first.rolled / first.lent)
        rows.append(Row(name, "tokens of a lent second over those of serve first", efficiency, "x"))
        rows.append(Row(name, "neither computes", 1 - (it.serving + it.lent) / it.seconds, "of the time"))
    return rows


def _record_rows(record: Path) -> list[Row]:
    steps = [line for line in read_lending(record) if isinstance(line, LentStep) and line.bound > 0]
    over = sum(step.seconds > step.bound for step in steps) / len(steps)
    worst = max(step.seconds / step.bound for step in steps)
    again = replay(record)
    return [
        Row("rollout steps", "bounded", len(steps), "steps"),
        at_most("rollout steps", "over their bound", over, "of them", 0.005),
        below("rollout steps", "longest over its bound", worst, "x", 2),
        Row("record", "answers", again.answers, ""),
        none("record", "that the rule does not give again", len(again.different)),
    ]


if __name__ == "__main__":
    sys.exit(main())
