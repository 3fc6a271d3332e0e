"""Time that a serving engine can lend over a trace of its traffic, and the cost to its users, rule by rule.

Invariant: every rule serves the same arrivals on the same simulated engine; a miss is attributable where the same
request meets the SLO alone. The certificate is of the first half of the trace; the rows are of the second.

    python -m benchmarks.lending_rules --traffic azure_2023_conv.csv [--rate 0.5] [--json FILE]

The trace is the conversation hour of Azure's public LLM traces of 2023 (github.com/Azure/AzurePublicDataset), or any
file that `libra simulate --requests` reads. The serving engine has affine costs of the order of a 7B model on one H800,
the rollout engine those of an 8B model with 32 turns always under way.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.command import command_line, show
from benchmarks.rows import Row, at_least, none
from libra.lend.certificate import Certificate
from libra.lend.gate import Gate, SharingRule, Slo
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.rules import Alternate, NoLending, PositiveSlack, ServeFirst
from libra.lend.sim.certify import LendingCase, certify
from libra.lend.sim.shared_device import DeviceOutcome, RolloutBorrower, SharedDevice
from libra.lend.sim.tenant import misses
from libra.sim.clock import TICKS, seconds, ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.workload.request_file import read_requests

_US = TICKS // 1_000_000
SERVING = EngineSpec(
    "serving",
    EngineConfig(8192, 30_000, max_num_seqs=256, max_num_batched_tokens=2048),
    AffineCost(step=7000 * _US, per_sequence=20 * _US, per_context_token=_US // 40, per_new_token=32 * _US),
)
ROLLOUT = EngineSpec(
    "rollout",
    EngineConfig(8192, 8_000, max_num_seqs=32, max_num_batched_tokens=512),
    AffineCost(step=7500 * _US, per_sequence=20 * _US, per_context_token=_US // 17, per_new_token=36 * _US),
)
TURNS = 32  # of rollout, always under way
SLO = Slo(ttft=0.5, tpot=0.15)  # ROSE's of 7B models
USE = 0.8
LONGEST = 0.03  # seconds of a grant
_LOADS = (0.2, 0.3, 0.4, 0.5, 0.6)
_GOAL_SHARE = 0.75  # of a GPU of its own
RECALL = RecallPolicy(quiet=5.0, most_quiet=300.0)


def rows(options: Namespace) -> Iterator[Row]:
    """Rows of the certificate, of rollout alone, and of all rules."""
    traffic, rate = options.traffic, options.rate
    requests = tuple(read_requests(traffic))
    middle = (requests[0].arrival + requests[-1].arrival) // 2
    first, second = ([it for it in requests if (it.arrival > middle) is late] for late in (False, True))
    start = second[0].arrival
    second = [replace(it, arrival=it.arrival - start) for it in second]
    trained, held = (
        LendingCase(SERVING, "7B", "1 x H800", SLO, traffic.name, tuple(half), LONGEST) for half in (first, second)
    )
    (certificate,) = certify(trained, [USE], sorted({*_LOADS, rate}))
    own = _tokens_a_second_alone()
    yield Row("certificate", "largest load", certificate.rate, "requests/s")
    yield Row("certificate", "lent at that load", certificate.harvest[-1].share, "of the time")
    yield Row("rollout on a GPU of its own", "generates", own, "tokens/s")
    alone = held.alone(rate)
    met = {it.number for it in alone} - misses(alone, SLO.ttft, SLO.tpot).any
    for name, rule, use in _rules(certificate):
        began = time.process_time()
        borrower = RolloutBorrower(ROLLOUT, TURNS, make_turns())
        device = SharedDevice(SERVING, rule(), borrower, pace=ticks(SLO.pace(use)), prompt=held.prompt)
        outcome = device.run(held.arrivals(rate).start())
        spent = time.process_time() - began
        yield from _rows(name, outcome, borrower.generated / seconds(outcome.end) / own, met, spent)


def _rules(certificate: Certificate) -> list[tuple[str, Callable[[], SharingRule], float]]:
    longest = ticks(LONGEST)
    gate, envelope = partial(Gate, longest, 1), certificate.envelope
    return [
        ("serving alone", NoLending, 1.0),
        ("serve first", lambda: ServeFirst(longest), 1.0),
        ("a step each", lambda: Alternate(longest), 1.0),
        ("positive slack, as ROSE", lambda: PositiveSlack(longest, ticks(USE * SLO.ttft)), USE),
        ("gate", gate, USE),
        ("gate inside its envelope", lambda: WatchedRule(gate(), envelope, Recall(RECALL), float(TICKS)), USE),
    ]


def _rows(name: str, outcome: DeviceOutcome, of_own: float, met: set[int], spent: float) -> Iterator[Row]:
    missed, ours = misses(outcome.requests, SLO.ttft, SLO.tpot).any, name == "gate inside its envelope"
    yield Row(name, "serving computes", outcome.serving / outcome.end, "of the time")
    yield Row(name, "lent", outcome.lent_share, "of the time")
    yield at_least(name, "rollout over a GPU of its own", of_own, "x", _GOAL_SHARE if ours else None)
    yield (none if ours else Row)(name, "attributable misses", len(missed & met), f"of {len(met)}")
    yield Row(name, "CPU time", spent, "s")


def make_turns() -> Callable[[int, int], Request]:
    rng = np.random.default_rng(0)
    return lambda number, now: Request(10**7 + number, now, int(rng.integers(300, 3000)), int(rng.integers(50, 600)))


def _tokens_a_second_alone() -> float:
    borrower, now = RolloutBorrower(ROLLOUT, TURNS, make_turns()), 0
    while now < ticks(300.0):
        now += borrower.spend(now, ticks(1000.0))
    return borrower.generated / seconds(now)


if __name__ == "__main__":
    parser = command_line("lending_rules", __doc__)
    parser.add_argument("--traffic", type=Path, required=True, metavar="FILE", help="requests: .jsonl, or Azure's .csv")
    parser.add_argument("--rate", type=float, default=0.5, help="times the rate of the trace (default: 0.5)")
    show(parser, rows)
