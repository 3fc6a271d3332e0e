"""Whole runs on engines that are lent: the plan says which, serving says when."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from oracles.small_cluster import CLASSES, QWEN_06B
from sim.training_run.posttrain_cases import ONE_NODE, Timetable, agents, layout_of, recipe_of, run, seeing

from libra.cost.sources.roofline import node_roofline
from libra.hardware.cluster import ServingPool
from libra.lend.certificate import Certificate, Harvest
from libra.lend.gate import Gate, SharingRule, Slo
from libra.lend.lender import Lender
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.sim import granted_engine
from libra.lend.sim.certify import LendingCase
from libra.lend.sim.kv_loan import KVTerms
from libra.lend.sim.tenancy import ServingDevice, Tenancy
from libra.lend.sim.tenant import misses
from libra.lend.traffic.envelope import Envelope
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import solution
from libra.plan.plan import Plan, answer
from libra.plan.planner import rooflines
from libra.route.catalogue import policy_named
from libra.sim.clock import TICKS, ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.planned_engines import lent_engines, planned_engines
from libra.sim.training_run.system import System
from libra.sim.workload.caller import EpisodeCaller
from libra.sim.workload.requests import RecordedRequest

MS = ticks(0.001)
GRANT, SLO, USE = 0.03, Slo(0.3, 0.1), 0.8
SERVING = EngineSpec(
    "serving",
    EngineConfig(2048, 4096, max_num_seqs=64, max_num_batched_tokens=256),
    AffineCost(step=5 * MS, per_sequence=MS // 5, per_context_token=MS // 1000, per_new_token=MS // 20),
)
ENVELOPE = Envelope(rate=12.0, queued=4000, live=24, context=20_000, window=2.0)
RECIPE = recipe_of(8, 4, staleness=2)
EPISODES = agents(4, mean=400.0)


def plan_with(lent: int, own: int = 1) -> Plan:
    """So many lent engines for short contexts, and some of one's own for all others."""
    node = replace(ONE_NODE.nodes[0], name="serving", gpus=4)
    cluster = replace(ONE_NODE, serving=(ServingPool(node),))
    certificate = Certificate("m", "1 x A800", SLO, USE, GRANT, 0.03, ENVELOPE, (Harvest(8.0, 0.7),), "traffic", 100, 0)
    lender = Lender("serving", QWEN_06B, 1, (certificate,), (6.0,), 60.0)
    profiles = rooflines(cluster, QWEN_06B, RECIPE)
    beside = (node_roofline(node, QWEN_06B, RECIPE),)
    layout = layout_of(2)
    request = ClusterRequest(cluster, QWEN_06B, RECIPE, CLASSES, profiles, None, (("a800", layout),), (lender,), beside)
    problem = request.menu().problem
    short = [Bucket("serving/tp1@0.8", lent, 0, 1500)] if lent else []
    buckets = (*short, Bucket("a800/tp1", own, 1500 if lent else 0, problem.longest_context))
    return answer(request, request.menu(), solution(problem, Allocation(2, buckets, f"a800/{layout.family}")))


def traffic(number: int) -> tuple[RecordedRequest, ...]:
    """Steady, with a burst that leaves the envelope."""
    steady = [RecordedRequest(ticks(0.2) * at + number * 13 * MS, 100 + at % 90, 5 + at % 30) for at in range(300)]
    burst = [RecordedRequest(ticks(4.0) + at * 20 * MS, 200, 20) for at in range(60)]
    return tuple(sorted([*steady, *burst], key=lambda it: it.arrival))


def served(plan: Plan, weights: float = 0.0, kv: KVTerms | None = None) -> Tenancy:
    """With the gate inside its envelope; where memory changes hands that alone ends a loan."""
    serving = SERVING if kv is None else replace(SERVING, config=replace(SERVING.config, kv_blocks=1300))
    recall = RecallPolicy(0.5, 4.0)

    def rule() -> SharingRule:
        gate = Gate(ticks(GRANT), 1)
        return gate if kv is not None else WatchedRule(gate, ENVELOPE, Recall(recall), float(TICKS))

    def device(number: int) -> ServingDevice:
        case = LendingCase(serving, "m", "1 x A800", SLO, "traffic", traffic(number), GRANT)
        return ServingDevice(case, USE, rule, 0.7, kv)

    names = sorted(lent_engines(plan))
    return Tenancy({name: device(number) for number, name in enumerate(names)}, weights=weights)


def system(plan: Plan, serving: Tenancy | None, **others: object) -> System:
    return System("lent", plan, lambda: policy_named("cmlfq"), tenancy=serving, serve_by_priority=True, **others)


def test_advanced_together_is_step_by_step_and_nothing_is_lost() -> None:
    plan, fewer = plan_with(4), plan_with(2, own=2)
    changes = {2: fewer, 3: plan}
    made, exact = (
        run(system(plan, served(plan, weights=1.5), replan=lambda: Timetable(changes)), EPISODES, 6, exact=exact)
        for exact in (False, True)
    )
    assert made == exact
    assert sum(it.recalls for it in made.lenders) >= 4 and made.interrupted
    assert all(it.lent > 0 and it.away > 0 for it in made.lenders)
    assert sum(it.trajectories for it in made.steps) == 6 * RECIPE.batch
    assert max(it.worst_staleness for it in made.steps) <= RECIPE.staleness


def test_memory_that_serving_needs_comes_back_after_a_step() -> None:
    plan = plan_with(4)
    small = KVTerms(serving=1000, rollout=2100, quiet=0.5)  # for one context of the longest kind
    made, exact = (run(system(plan, served(plan, kv=small)), EPISODES, 6, exact=exact) for exact in (False, True))
    assert made == exact
    assert sum(it.trajectories for it in made.steps) == 6 * RECIPE.batch
    assert sum(it.put_out for it in made.lenders) and made.interrupted
    assert all(it.recalls and it.lent > 0 and 0 < it.away < made.seconds for it in made.lenders)
    back = {step.ended for step in made.steps if step.ended > 4.0}
    assert back and made.seconds > min(back) + small.quiet


@pytest.mark.skipif(str(granted_engine.__file__).endswith(".so"), reason="what is compiled cannot be patched")
def test_what_a_recalled_engine_has_of_a_context_moves_where_that_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with(4)
    moved = run(system(plan, served(plan)), EPISODES, 6)
    monkeypatch.setattr(granted_engine.GrantedEngine, "borrowed", False)
    again = run(system(plan, served(plan)), EPISODES, 6)
    assert moved.moved_tokens > again.moved_tokens and moved.interrupted


def test_who_watches_sees_memory_come_and_go() -> None:
    plan = plan_with(4)
    serving = replace(served(plan, kv=KVTerms(serving=1000, rollout=2100, quiet=0.5)), watched=True)
    for it in run(system(plan, serving), EPISODES, 6).lenders:
        assert it.history is not None
        held = [after for _, after in it.history.quotas]
        assert all(before != after and after % 2100 == 0 for before, after in pairwise([-1, *held]))
        assert bool(it.put_out) <= any(after < before for before, after in pairwise(held))


def test_who_watches_sees_what_the_outcome_says() -> None:
    plan = plan_with(4)
    serving = served(plan)
    made, seen = (run(system(plan, it), EPISODES, 4) for it in (serving, replace(serving, watched=True)))
    assert replace(seen, lenders=tuple(replace(it, history=None) for it in seen.lenders)) == made
    for it in seen.lenders:
        history = it.history
        assert history is not None and (history.name, history.rule, history.slo) == (it.name, "gate", SLO)
        assert sum(span.end - span.start for span in history.grants) == pytest.approx(it.lent)
        assert sum(span.end - span.start for span in history.recalls) == pytest.approx(it.away)
        assert len(history.recalls) == it.recalls and all("lent up to" in span.why for span in history.recalls)
        assert min(span.margin for span in history.serving if span.margin is not None) == pytest.approx(it.margin)
        assert {miss.request.number for miss in history.missed()} == it.missed.any
        assert max(used for _, used in history.load) > 1  # a burst left the envelope


def test_a_turn_never_meets_weights_older_than_its_group_began_with() -> None:
    plan, weights = plan_with(4), 2.0
    with seeing() as seen:
        made = run(system(plan, served(plan, weights)), EPISODES, 6)
    # A version is sent when the one before has arrived; what came in between is skipped.
    arrivals, free = [(0, 0)], 0.0
    for step in made.steps:
        begins = max(step.ended, free)
        if any(begins < other.ended + 1e-9 for other in made.steps if other.version == step.version + 1) or (
            step is made.steps[-1]
        ):
            free = begins + weights
            arrivals.append((ticks(free), step.version))
    lent = {index for index, spec in enumerate(seen.cluster.specs) if spec.name in lent_engines(plan)}
    behind = taken = 0
    for request in seen.cluster.requests:
        owner = request.owner
        assert isinstance(owner, EpisodeCaller)
        there = max(version for at, version in arrivals if at <= request.arrival)
        if request.engine in lent:
            taken += 1
            assert owner.trajectory.policy_version <= there
        elif owner.trajectory.policy_version > there:
            behind += 1
    assert taken and behind


def test_misses_are_those_of_the_same_arrivals_served_alone() -> None:
    plan = plan_with(4)
    serving = served(plan)
    for lender in run(system(plan, serving), EPISODES, 4).lenders:
        case = serving.devices[lender.name].case
        alone = misses(case.alone(1.0)[: lender.requests], SLO.ttft, SLO.tpot)
        assert lender.missed.any <= alone.any


def test_a_device_that_is_handed_over_whole_starts_late_and_is_not_slowed() -> None:
    plan = plan_with(2)
    with seeing() as seen:
        run(system(plan, Tenancy({}, start=3.0)), EPISODES, 3)
    names, engines = lent_engines(plan), zip(seen.cluster.engines, seen.cluster.specs, strict=True)
    lent = [engine for engine, spec in engines if spec.name in names]
    assert len(lent) == 2 and all(it.busy_ticks for it in lent)
    first = min(it.start for it in seen.iterations if it.engine in {engine.index for engine in lent})
    assert first >= ticks(3.0)
    granted, slowed = ({it.name: it.cost for it in planned_engines(plan, granted=it)} for it in (True, False))
    assert all(granted[name] is not slowed[name] for name in names)


def test_without_traffic_told_lent_engines_are_as_slow_as_their_share() -> None:
    plan = plan_with(2)
    found = run(system(plan, None), EPISODES, 3)
    assert found.lenders == () and len(found.steps) == 3
