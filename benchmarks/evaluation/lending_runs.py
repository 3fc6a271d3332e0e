"""A post-training run whose engines are partly on devices that serve: one system in one case.

Invariant: all systems of a case train on the same trajectories, whose lengths do not drift, and every lender serves the
same requests in each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluation.cells import Cell
from benchmarks.evaluation.cells import run as run_cells
from benchmarks.lending.rules import RECALL, SERVING, SLO, USE
from benchmarks.workloads.definition import read
from benchmarks.workloads.drifting_tasks import Stationary
from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass, ServingPool
from libra.hardware.model_file import load_model
from libra.lend.certificate import Certificate, Harvest
from libra.lend.gate import Gate, SharingRule
from libra.lend.lender import Lender
from libra.lend.recall import Recall, WatchedRule
from libra.lend.rules import Alternate, PositiveSlack, ServeFirst
from libra.lend.sim.certify import LendingCase, certify
from libra.lend.sim.lending import LenderOutcome, lender_outcomes
from libra.lend.sim.shared_device import SharedDevice, SpendsAll
from libra.lend.sim.tenancy import ServingDevice, Tenancy
from libra.lend.sim.tenant import misses
from libra.lend.traffic.envelope import Envelope
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.clock import TICKS, ticks
from libra.sim.of_plan import teach
from libra.sim.planned_engines import lent_engines
from libra.sim.training_run.episodes import Episodes, generator_of
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import System
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import RecordedRequest
from libra.trajectory import Trajectory

VARIABLE = "LIBRA_SERVING_TRACE"  # of the environment: the trace that lenders serve
_BESIDE = Path(__file__).parents[3] / "shared" / "data" / "serving" / "azure_2023_conv.csv"  # beside the checkout
SERVED, WHOLE = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B"
RATE = 0.5  # share of the trace's requests that each lender gets
LONGEST_GRANT = 0.03  # seconds
START = 60.0  # seconds in which a device that is handed over becomes an engine
_STAGE = 30  # version of the drift whose lengths these are
_KNOWN, _BEFORE = 64, 1_000_000  # groups that planner and router have seen, and the number of the first
_WEIGHTS = 20.0  # seconds: 14B of bf16, of which a delta of 2 % goes over 0.25 Gb/s
_HOUR = 3600.0
_CERTIFIED = _HOUR  # seconds of the traffic of a lender that is in no run
_LOADS = (0.5, 0.8, 1.0, 1.2)
_SLICE, _LENDER = 0x736C696365, 0x6C656E646572  # streams of one seed


@dataclass(frozen=True)
class LendingSetting:
    """`asdict` of it is a cell's argument. All GPUs are H800."""

    workload: str
    nodes: int  # of 8 GPUs, the run's own
    lending: int  # nodes of 8 that serve
    groups: int  # of a step
    steps: int
    staleness: int = 4
    model: str = "Qwen/Qwen3-14B"  # that is trained

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def trajectories_a_gpu(self) -> int:
        """Trajectories of a step, for each GPU of the run's own."""
        return round(self.groups * self.episodes.samples_per_prompt / (8 * self.nodes))

    @cached_property
    def episodes(self) -> Episodes:
        workload = read(self.workload)
        return Stationary(workload.episodes("strong", seed=workload.seed, steps=60), _STAGE)

    @cached_property
    def known(self) -> tuple[Trajectory, ...]:
        return tuple(it for number in range(_KNOWN) for it in self.episodes.group(_BEFORE + number, 0))

    def recipe(self) -> Recipe:
        samples = self.episodes.samples_per_prompt
        return Recipe(
            batch=self.groups * samples,
            samples_per_prompt=samples,
            max_length=self.episodes.max_context,
            staleness=self.staleness,
            max_buckets=2,
            early_gradients=self.staleness > 0,
        )

    def plan(self, lending: int, share: float, inside: Envelope | None = None) -> Plan:
        """The best plan that may borrow the devices of `lending` nodes, each for `share` of its time next to serving
        within the envelope `inside`; without one nothing else is in their memory, and no grant ends."""
        own = _nodes("own", self.nodes)
        if not lending or not share:
            return self._solved(Planner(Cluster((own,)), load_model(self.model), self.recipe(), self._profiles(own)))
        serving = _nodes("serving", lending)
        whole = inside is None
        inside, grant = inside or Envelope(1, 1, 1, 1, 60), 10.0 if whole else LONGEST_GRANT
        certificate = Certificate(
            SERVED, "1 x H800", SLO, USE, grant, 0.1, inside, (Harvest(1.0, share),), "replay", 1, 0
        )
        lender = Lender("serving", load_model(WHOLE if whole else SERVED), 1, (certificate,), (1.0,), _HOUR)
        cluster = Cluster((own,), (ServingPool(serving),))
        return self._solved(
            Planner(
                cluster, load_model(self.model), self.recipe(), self._profiles(own), (lender,), self._profiles(serving)
            )
        )

    def _solved(self, planner: Planner) -> Plan:
        return planner.plan(planner.tracker(self.known))

    def _profiles(self, nodes: NodeClass) -> Any:
        return engine_profiles(Cluster((nodes,)), load_model(self.model), self.recipe(), "tables")

    def router(self) -> Policy:
        policy = policy_named("cmlfq")
        teach(policy, self.known)
        return policy


# Who shares a device how

_GRANT = ticks(LONGEST_GRANT)
RULES: dict[str, Callable[[], SharingRule]] = {
    "gate": lambda: Gate(_GRANT, 1),
    "published": lambda: PositiveSlack(_GRANT, ticks(USE * SLO.ttft)),
    "naive": lambda: Alternate(_GRANT),
    "serve-first": lambda: ServeFirst(_GRANT),
}
_USES = {"gate": USE, "published": USE}  # of tpot; the others look at no pace
SYSTEMS = ("fixed", *RULES, "half-device", "elastic", "whole")


def run(setting: dict[str, Any], system: str) -> dict[str, Any]:
    """Outcome of a run of `system` in the setting, as JSON values."""
    where = LendingSetting(**setting)
    made = _system(where, system)
    outcome = simulate_posttraining(made, where.episodes, where.steps)
    assert made.plan.layout is not None
    return {
        "seconds": outcome.seconds,
        "throughput": outcome.throughput,
        "waited": sum(step.waited for step in outcome.steps) / len(outcome.steps),
        "trainer_share": outcome.trainer_share,
        "training": made.plan.layout.devices,
        "borrowed": sum(loan.engines for loan in made.plan.loans),
        "predicted": made.plan.predicted.step,
        "bottleneck": made.plan.predicted.bottleneck,
        "interrupted": outcome.interrupted,
        **(_handed_over(where, outcome.seconds) if system == "elastic" else _lent(where, system, made, outcome)),
    }


def _system(where: LendingSetting, name: str) -> System:
    make = partial(System, name, route=where.router, serve_by_priority=True, start_by_cache=True)
    if name == "fixed":
        return make(where.plan(0, 0.0))
    if name == "elastic":
        return make(where.plan(granted(where), 1.0), tenancy=Tenancy({}, START, _WEIGHTS))
    if name == "whole":  # what no way of lending can exceed
        return make(where.plan(where.lending, 1.0), tenancy=Tenancy({}, 0.0, 0.0))
    inside = Envelope(**_certified("gate")["envelope"])
    if name == "half-device":  # both always at half of the speed
        return make(where.plan(where.lending, 0.5, inside))
    # ROSE's rule lends nearly as much as the gate: with one plan for both, what differs is the rule.
    share, rule = float(_certified("gate" if name == "published" else name)["share"]), RULES[name]
    plan = where.plan(where.lending, share, inside)
    if name == "gate":
        rule = lambda: WatchedRule(Gate(_GRANT, 1), inside, Recall(RECALL), float(TICKS))  # noqa: E731
    devices = {
        engine: ServingDevice(_case(number, _HOUR), _USES.get(name, 1.0), rule, share)
        for number, engine in enumerate(sorted(lent_engines(plan)))
    }
    return make(plan, tenancy=Tenancy(devices, weights=_WEIGHTS))


def _lent(where: LendingSetting, name: str, system: System, outcome: SimulatedRun) -> dict[str, Any]:
    """Time that lenders lent, and what that cost their users."""
    devices = system.tenancy.devices if isinstance(system.tenancy, Tenancy) else {}
    lenders = lender_outcomes(outcome)
    attributable = covered = 0
    for lender in lenders:
        if lender.missed.any:
            blamed = lender.missed.any - _missed_alone(devices[lender.name], lender)
            attributable, covered = attributable + len(blamed), covered + len(blamed - lender.uncovered)
    return {
        "lent": sum(it.lent for it in lenders) / len(lenders) / outcome.seconds if lenders else 0.0,
        "recalls": sum(it.recalls for it in lenders),
        "away": sum(it.away for it in lenders) / len(lenders) / outcome.seconds if lenders else 0.0,
        "requests": sum(it.requests for it in lenders),
        "missed": sum(len(it.missed.any) for it in lenders),
        "attributable": attributable,
        "covered": covered,
    }


def _handed_over(where: LendingSetting, seconds: float) -> dict[str, Any]:
    """Cost to users when devices are taken away: their requests go in turn to the devices that stay."""
    cases = [_case(number, min(seconds, _HOUR)) for number in range(8 * where.lending)]
    stay = len(cases) - 8 * granted(where)
    load: list[list[tuple[int, int, int]]] = [[] for _ in range(stay)]  # arrival, whose, its number
    for of, case in enumerate(cases):
        for number, request in enumerate(case.requests):
            load[of if of < stay else number % stay].append((request.arrival, of, number))
    before = [misses(case.alone(1.0), SLO.ttft, SLO.tpot).any for case in cases]
    now: list[tuple[int, int, int]] = []
    for mine in load:
        mine.sort()
        case = replace(cases[0], requests=tuple(cases[of].requests[number] for _, of, number in mine))
        now += [mine[place] for place in misses(case.alone(1.0), SLO.ttft, SLO.tpot).any]
    return {
        "lent": 0.0,
        "recalls": 0,
        "away": 0.0,
        "requests": sum(len(case.requests) for case in cases),
        "missed": len(now),
        "attributable": sum(number not in before[of] for _, of, number in now),
    }


def granted(where: LendingSetting) -> int:
    """Nodes that elastic provisioning gets: half of those that it asks for."""
    return where.lending // 2


def _missed_alone(device: ServingDevice, lender: LenderOutcome) -> frozenset[int]:
    return misses(device.case.alone(1.0)[: lender.requests], SLO.ttft, SLO.tpot).any


def _nodes(name: str, count: int) -> NodeClass:
    gpu = GPUS["H800"]
    return NodeClass(name, count, 8, gpu, gpu.link, 25e9)


# What lenders serve


def trace() -> Path | None:
    """The trace, if it is there: Azure's conversation hour, or what the environment names."""
    path = Path(os.environ.get(VARIABLE) or _BESIDE)
    return path if path.is_file() else None


def certified_cell(name: str) -> Cell:
    found = trace()
    return Cell(f"certificate, {name}", certificate, {"name": name}, () if found is None else (found,), cost=1e9)


def _certified(name: str) -> dict[str, Any]:
    """The kept certificate of `name`; computed and kept where there is none."""
    (result,) = run_cells([certified_cell(name)], processes=1, progress=False)
    return dict(result.values)


def certificate(name: str) -> dict[str, Any]:
    """Share of its time that a lender outside any run lends by the rule `name`, if the borrower spends every grant.
    For the gate: the certified share, with rate and envelope."""
    case = _case(_BEFORE, _CERTIFIED)
    if name == "gate":
        (found,) = certify(case, [USE], _LOADS)
        return {"share": found.share_at(found.rate), "rate": found.rate, "envelope": asdict(found.envelope)}
    pace = ticks(SLO.pace(_USES.get(name, 1.0)))
    device = SharedDevice(case.spec, RULES[name](), SpendsAll(), pace=pace, prompt=case.prompt)
    return {"share": device.run(case.arrivals(1.0).start()).lent_share}


def _case(lender: int, seconds: float) -> LendingCase:
    """The requests of one lender: its share of the trace's requests, at their times."""
    kept = generator_of(0, _LENDER, lender)
    requests = tuple(it for it in _trace_requests() if it.arrival < ticks(seconds) and kept.random() < RATE)
    return LendingCase(SERVING, SERVED, "1 x H800", SLO, "trace", requests, LONGEST_GRANT)


_READ: list[tuple[RecordedRequest, ...]] = []


def _trace_requests() -> tuple[RecordedRequest, ...]:
    if not _READ:
        path = trace()
        _READ.append(tuple(_made_up() if path is None else read_requests(path)))
    return _READ[0]


def _made_up() -> Iterator[RecordedRequest]:
    """An hour as bursty as Azure's, of 5.4 requests/s with log-normal lengths of about its means."""
    random, at = np.random.default_rng(_SLICE), 0.0
    while at < _HOUR:
        wave = 1 + 0.3 * np.sin(2 * np.pi * at / 900)
        at += float(random.gamma(0.5, 2 / (5.4 * wave)))
        prompt, output = random.lognormal(6.6, 0.95), random.lognormal(5.0, 0.8)
        yield RecordedRequest(ticks(at), max(1, min(7000, int(prompt))), max(1, min(1000, int(output))))
