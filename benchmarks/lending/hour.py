"""CPU time to simulate an hour of one lender, with its steps one by one and advanced together.

Invariant: both give the same outcome of every request and the same tokens of rollout, or there is no verdict.

    python -m benchmarks.lending hour --traffic azure_2023_conv.csv [--rate 0.5] [--json FILE]

Serving engine, rollout engine and gate are those of `rules`. CPU seconds are of this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lending._options import traffic_options
from benchmarks.lending.rules import LONGEST, ROLLOUT, SERVING, SLO, TURNS, USE, make_turns
from benchmarks.rows import Row, report
from libra.lend.gate import Gate
from libra.sim.certify import LendingCase
from libra.sim.clock import seconds, ticks
from libra.sim.engine.request import Request
from libra.sim.granted_engine import GrantedEngine, LenderDevice
from libra.sim.tenant import ServingTenant
from libra.sim.workload.request_file import read_requests

_HOUR = 3600.0
_GOAL = 15.0  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    options = traffic_options("hour", __doc__, arguments)
    report(measured(options.traffic, options.rate), options.json)
    return 0


def measured(traffic: Path, rate: float) -> list[Row]:
    """Raises RuntimeError where the two differ."""
    requests = tuple(read_requests(traffic))
    case = LendingCase(SERVING, "7B", "1 x H800", SLO, traffic.name, requests, LONGEST)
    rows, outcomes = [], []
    for name, exact in (("step by step", True), ("advanced together", False)):
        began = time.process_time()
        engine, turns, now = _simulated(case, rate, exact)
        spent, goal = time.process_time() - began, None if exact else f"<= {_GOAL:g}"
        rows += [
            Row(name, "simulated", seconds(now), "s"),
            Row(name, "visits of the rollout engine", engine.events, ""),
            Row(name, "CPU time", spent, "s", goal, None if exact else spent <= _GOAL),
        ]
        outcomes.append([_times(turns), _times(engine.device.tenant.came)])
    if outcomes[0] != outcomes[1]:
        raise RuntimeError("steps advanced together differ from the steps one by one: a defect of the simulator")
    return rows


def _times(requests: Sequence[Request]) -> list[tuple[int, int | None, int]]:
    """Number, tick of the first token and tick of the last one of those that end within the hour."""
    ended = ((it.number, it.first_token, it.finish) for it in requests if it.finish is not None)
    return [(number, first, finish) for number, first, finish in ended if finish <= ticks(_HOUR)]


def _simulated(case: LendingCase, rate: float, exact: bool) -> tuple[GrantedEngine, list[Request], int]:
    """The rollout engine after an hour, its turns, and the tick."""
    pace = ticks(case.slo.pace(USE))
    tenant = ServingTenant(case.spec, case.arrivals(rate).start(), pace=pace, prompt=case.prompt)
    device = LenderDevice(tenant, Gate(ticks(LONGEST), 1), 0.8, exact=exact)
    engine = GrantedEngine(ROLLOUT.config, ROLLOUT.cost, exact=exact, device=device, recalled=lambda now: None)
    next_turn, now = make_turns(), 0
    turns = [next_turn(number, now) for number in range(TURNS)]
    for turn in turns:
        engine.submit(turn, now)
    while now < ticks(_HOUR):
        end = engine.plan(now)
        assert end is not None
        now = end
        for _ in engine.commit():
            turns.append(next_turn(len(turns), now))
            engine.submit(turns[-1], now)
    return engine, turns, now


if __name__ == "__main__":
    sys.exit(main())
