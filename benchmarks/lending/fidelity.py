"""A run that lends, with two real vLLM engines, against its simulation.

Invariant: what steps take is learnt in one run and held against another one, of the same requests and turns; two runs
that differ by more than the simulation does say no more than that.

    python -m benchmarks.lending fidelity --traffic azure_2023_conv.csv [--rate 3] [--requests 120] [--json FILE]

Engines, requests and clock are those of `pair`. The simulation has costs fitted to the first run's steps of both
engines, and in sum as long as these, the bounds that its borrower kept to, what it takes to take a request in, and for
every step the mean of the time that was neither.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.command import add_traffic, command_line
from benchmarks.lending._engines import CHUNK, LONGEST
from benchmarks.lending.pair import LEARN, TERMS, TURNS, Asked, Pair, Served, arrivals_of
from benchmarks.rows import Row, report
from libra.lend.gate import Gate, Grant, Refusal, ServingCost, ServingView
from libra.lend.records.lending import LendingAnswer, LentStep, ServedStep, read_lending, replay
from libra.lend.sim.shared_device import RolloutBorrower, SharedDevice
from libra.lend.step_cost import StepCost, StepShape
from libra.sim.clock import seconds, ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.workload.requests import RecordedRequest, recorded_requests

_GOAL = 0.06
_BLOCK = 16  # tokens
_PLENTY = 64 * LONGEST // _BLOCK  # blocks: neither engine runs out


def main(arguments: Sequence[str] | None = None) -> int:
    options = add_traffic(command_line("lending fidelity", __doc__), rate=3.0, requests=120).parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(options.traffic, options.rate, options.requests, Path(directory))
    report(rows, options.json)
    return 0


@dataclass(frozen=True, slots=True)
class Observed:
    """Values of a run that are compared."""

    rollout: float  # tokens/s
    lent: float  # share of the time
    ttft: float  # mean, ms
    tpot: float

    @classmethod
    def of(cls, run: Served) -> Observed:
        ttft = float(np.mean([it.ttft for it in run.requests]))
        tpot = float(np.mean([it.tpot for it in run.requests]))
        return cls(run.rolled / run.seconds, run.lent / run.seconds, 1e3 * ttft, 1e3 * tpot)


def measured(traffic: Path, rate: float, count: int, directory: Path) -> list[Row]:
    pair, arrivals = Pair(directory), arrivals_of(traffic, rate, count)
    pair.serve(arrivals()[: LEARN // 4], None)  # what is set up once is not counted
    records = [directory / f"lending-{number}.jsonl" for number in range(3)]
    runs = [pair.serve(arrivals(), TERMS.rule(), record) for record in records]
    real = [Observed.of(run) for run in runs]
    simulated = _simulated(arrivals(), runs[0], records[0], pair.steps.most_tokens)
    rows = []
    for name, unit in (("rollout", "tokens/s"), ("lent", "of the time"), ("ttft", "ms"), ("tpot", "ms")):
        values = [float(getattr(it, name)) for it in real]
        found, mean = getattr(simulated, name), float(np.mean(values[1:]))
        repeat = max(abs(one / other - 1) for one, other in pairwise(values))
        error, goal = abs(found / mean - 1), max(_GOAL, repeat)
        rows += [
            Row(name, "runs", mean, unit),
            Row(name, "simulated", found, unit),
            Row(name, "run against run", 100 * repeat, "%"),
            Row(name, "simulated against runs", 100 * error, "%", f"<= {100 * goal:.1f}", error <= goal),
        ]
    again = [replay(record) for record in records]
    answers, different = sum(it.answers for it in again), sum(len(it.different) for it in again)
    rows.append(Row("gate", "answers given again", answers - different, f"of {answers}", "all", not different))
    return rows


def _simulated(asked: list[Asked], run: Served, record: Path, most_tokens: int) -> Observed:
    """Simulate the same requests and turns, from the arrival of the first request that counts."""
    assert run.learnt is not None
    serving, rollout = run.learnt
    for cost in (serving, rollout):
        cost.learn()  # from those, too, that came after the borrower fitted it last
    steps = [it for it in read_lending(record) if isinstance(it, LentStep | ServedStep) and it.at >= run.began]
    # Of a step: turns that come and go, requests that go, and what the gate is asked.
    besides = (run.seconds - run.admitting - sum(it.seconds for it in steps)) / run.steps
    admission = run.admitting / sum(-(-it.prompt // CHUNK) for it in run.requests)  # of a chunk of a prompt
    records = [RecordedRequest(ticks(it.arrival), it.prompt, it.output) for it in asked]
    since = records[LEARN].arrival
    borrower = _Borrower(_spec("rollout", rollout, most_tokens, besides), _factor(rollout), since)
    spec = _spec("serving", serving, CHUNK, besides, admission)
    gate = _AsBounded(Gate(ticks(TERMS.longest), ticks(TERMS.shortest)), serving, record, run.began)
    device = SharedDevice(spec, gate, borrower, pace=ticks(TERMS.pace), prompt=max(it.prompt for it in asked))
    outcome = device.run(recorded_requests(records).start())
    spent = seconds(outcome.end - since)
    counted = outcome.requests[LEARN:]
    ttft = [seconds(it.first_token - it.arrival) for it in counted if it.first_token is not None]
    tpot = [
        seconds(it.finish - it.first_token) / max(1, it.output_tokens - 1)
        for it in counted
        if it.first_token is not None and it.finish is not None
    ]
    lent = (seconds(borrower.lent) - besides * borrower.steps) / spent
    return Observed(borrower.made / spent, lent, 1e3 * float(np.mean(ttft)), 1e3 * float(np.mean(tpot)))


class _AsBounded:
    """A gate whose bound of the longest step is what the fit predicts, times what a run's bound was over it."""

    def __init__(self, gate: Gate, serving: StepCost, record: Path, began: float) -> None:
        self._gate, self._serving = gate, serving
        asked = [it for it in read_lending(record) if isinstance(it, LendingAnswer) and it.at >= began]
        self._factor = float(np.median([it.longest_step / self._predicted(it.view) for it in asked if it.longest_step]))

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        return self._gate.decide(view, now, self)

    def longest_step(self, view: ServingView) -> float:
        return ticks(self._factor * self._predicted(view))

    def catch_up(self, view: ServingView) -> float:
        raise ValueError("a gate does not ask how long serving takes to catch up")

    def _predicted(self, view: ServingView) -> float:
        chunk = max(0, min(CHUNK - view.live - 1, LONGEST))
        seconds = self._serving.predicted(StepShape(view.live + 1, chunk, view.context + view.live + chunk))
        assert seconds is not None
        return seconds


class _Borrower(RolloutBorrower):
    """Steps are bounded by what they take times `factor`, as in a run. Counted from tick `since` on."""

    def __init__(self, spec: EngineSpec, factor: float, since: int) -> None:
        rng = np.random.default_rng(0)

        def turn(number: int, now: int) -> Request:
            return Request(10**6 + number, now, int(rng.integers(40, 500)), int(rng.integers(20, 200)))

        super().__init__(spec, TURNS, turn)
        self._factor, self._since = factor, since
        self.lent = self.made = self.steps = 0

    def spend(self, now: int, grant: int) -> int:
        before = self.generated
        spent = super().spend(now, int(grant / self._factor))
        if now >= self._since and spent:
            self.lent, self.made, self.steps = self.lent + spent, self.made + self.generated - before, self.steps + 1
        return spent


def _spec(name: str, learnt: StepCost, batched_tokens: int, besides: float, admission: float = 0.0) -> EngineSpec:
    def predicted(shape: StepShape) -> float:
        value = learnt.predicted(shape)
        assert value is not None
        return learnt.understatement * value

    base = predicted(StepShape(0, 0, 0))
    sequence, token, context = (
        ticks(predicted(shape) - base) for shape in (StepShape(1, 0, 0), StepShape(0, 1, 0), StepShape(0, 0, 1))
    )
    chunk = max(0, sequence - token) + ticks(admission)
    cost = AffineCost(ticks(base + besides), sequence, context, token, per_chunk=chunk)
    return EngineSpec(name, EngineConfig(LONGEST, _PLENTY, _BLOCK, 64, batched_tokens), cost)


def _factor(learnt: StepCost) -> float:
    """Bound of a step over what it is predicted to take."""
    shape = StepShape(1, 0, 0)
    bound, predicted = learnt.bound(shape), learnt.predicted(shape)
    assert bound is not None and predicted is not None
    return max(1.0, bound / (learnt.understatement * predicted))


if __name__ == "__main__":
    sys.exit(main())
