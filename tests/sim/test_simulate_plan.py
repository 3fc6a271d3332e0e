"""A plan's rollout in the simulator: the same engines, memory, times and work that the planner priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, RECIPE, kv_of

from libra.config.recipe import Recipe
from libra.config.run import load_config
from libra.cost.device import EngineCost
from libra.cost.engine_memory import BLOCK
from libra.cost.sources.files import load_profile
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.allocation import Allocation, Bucket
from libra.plan.offline import gather, request_from
from libra.plan.options.engines import batch_kv_tokens
from libra.plan.options.price import bucket_prices, solution
from libra.plan.options.slots import EngineShape, LentSlots, SlotRequest
from libra.plan.plan import Plan, answer, make_plan
from libra.plan.planner import Planner
from libra.route.catalogue import policy_named
from libra.route.published import PublishedCMLFQ
from libra.sim.clock import seconds, ticks
from libra.sim.engine.iteration_cost import DecodeBatch, measured_cost
from libra.sim.of_plan import forecast_of, planned_run, simulate_plan
from libra.sim.planned_engines import planned_engines
from libra.sim.simulate import DECISIONS, Elapsed
from libra.trajectory import Trajectory, Turn, read_trajectories

EXAMPLES = Path(__file__).parents[2] / "examples"
LOG = list(read_trajectories(EXAMPLES / "trajectories.jsonl"))


def cluster_plan(recipe: Recipe = RECIPE) -> Plan:
    return Planner(CLUSTER, QWEN_06B, recipe).plan(CLASSES)


def slot_plan() -> Plan:
    settings = load_config(EXAMPLES / "calculator.yaml")
    evidence = gather(settings, LOG)
    return make_plan(request_from(settings, evidence, load_profile(EXAMPLES / "profile_2_cores.json")))


def agents(count: int, *, tool: str | None = "search", seconds_each: float | None = 1.0) -> list[Trajectory]:
    """Two turns with a tool between, of ever longer contexts."""
    made = []
    for i in range(count):
        turns = (
            (Turn(40, tool, "ok", 20, seconds_each), Turn(60, None, None, 0)) if tool else (Turn(100, None, None, 0),)
        )
        made.append(Trajectory(f"t{i}", f"p{i}", "x", 300 + 40 * i, turns, None, 0, True))
    return made


def test_the_engines_are_those_of_the_plan() -> None:
    plan = cluster_plan()
    engines = planned_engines(plan)
    assert len({engine.name for engine in engines}) == len(engines) == plan.allocation.engines
    for index, bucket in enumerate(plan.allocation.buckets):
        its = [engine for engine in engines if engine.bucket == index]
        assert len(its) == bucket.engines
        tp = int(bucket.shape.partition("/tp")[2])
        kv = kv_of(RECIPE, QWEN_06B, tp)
        for engine in its:
            config = engine.config
            assert config.max_num_seqs == plan.max_num_seqs[index]
            assert config.kv_blocks == kv // 16
            assert config.max_model_len == min(kv, RECIPE.max_length) >= bucket.up_to
            assert config.max_num_batched_tokens == RECIPE.max_batched_tokens


def test_times_are_the_planners() -> None:
    plan = cluster_plan()
    request = plan.request
    assert request.kind == "cluster"
    for engine in planned_engines(plan):
        tp = int(plan.allocation.buckets[engine.bucket].shape.partition("/tp")[2])
        grid = request.profiles[0].grid(tp)
        base, slope, _ = engine.cost.line(DecodeBatch(8), 8 * 2048)
        assert base + slope * 8 * 2048 == pytest.approx(ticks(grid.decode_seconds(8, 2048)), rel=1e-6)


def test_engines_are_named_after_their_gpus() -> None:
    plan = cluster_plan()
    groups = [group for group in plan.placement if group.bucket is not None]
    for engine, group in zip(planned_engines(plan), groups, strict=True):
        place, _, gpus = engine.name.partition("/")
        assert place == f"{group.pool}-{group.nodes[0]}"
        assert [int(gpu) for gpu in gpus.split("-")] == sorted({group.gpus[0], group.gpus[-1]})


def test_a_lent_slot_is_as_slow_as_its_share() -> None:
    own = slot_plan().request
    assert isinstance(own, SlotRequest)
    request = replace(own, lent=LentSlots(EngineShape("lent", 64, 8, 512), 2, 0.5))
    menu, longest = request.menu(), own.workload.longest_context
    generating = own.fleet.devices - own.fleet.core
    buckets = (Bucket("lent", 2, 0, 64), Bucket(own.shapes[-1].name, generating, 64, longest))
    plan = answer(request, menu, solution(menu.problem, Allocation(own.fleet.core, buckets)))
    costs = [engine.cost.line(DecodeBatch(4), 200)[0] for engine in planned_engines(plan)]
    assert len(costs) == 2 + generating and costs[0] == costs[1]
    assert costs[0] == pytest.approx(2 * costs[-1], rel=1e-6)


def test_slots_have_the_shapes_and_times_of_the_configuration() -> None:
    plan = slot_plan()
    request = plan.request
    assert request.kind == "slots"
    shapes = {shape.name: shape for shape in request.shapes}
    for engine in planned_engines(plan):
        shape = shapes[plan.allocation.buckets[engine.bucket].shape]
        assert engine.config.max_num_seqs == shape.max_num_seqs
        assert engine.config.kv_blocks * engine.config.block_size == shape.kv_tokens
        assert engine.config.max_model_len == shape.max_model_len
        assert engine.cost == measured_cost(request.profile.engine)


def test_a_measured_iteration_takes_what_was_measured() -> None:
    cost = EngineCost(1e-3, 2e-4, 3e-7, 4e-6, 5e-4)
    found = measured_cost(cost)
    base, slope, _ = found.line(DecodeBatch(3), 100)
    assert seconds(base + slope * 100) == pytest.approx(decode := 1e-3 + 3 * 2e-4 + 100 * 3e-7)
    mixed = found.mixed(DecodeBatch(3), 100, [(50, 0), (7, 9)])
    assert seconds(mixed) == pytest.approx(decode + 57 * 4e-6 + 2 * 5e-4)


def test_one_step_is_as_many_trajectories_as_the_plan_trains_on() -> None:
    plan = cluster_plan()
    deployment, workload = planned_run(plan, agents(20), seed=3)
    described = workload.describe()
    assert described["trajectories"] == RECIPE.batch == 64
    assert described["concurrency"] == 2 * RECIPE.batch  # staleness 1
    assert described["unknown_tool_seconds"] == RECIPE.tool_seconds_if_unknown
    assert described["source"]["log"] == 20
    assert described["source"]["drawn"] == 64
    assert deployment.limits == tuple(bucket.up_to for bucket in plan.allocation.buckets)
    assert deployment.turn_tokens == 60  # the longest turn
    _, samples = planned_run(plan, agents(20), samples_per_prompt=8)
    assert samples.describe()["source"]["drawn"] == 8
    assert samples.describe()["trajectories"] == 64


def test_a_turn_needs_no_more_room_than_the_longest_context_leaves() -> None:
    trajectory = Trajectory("t", "p", "x", 8150, (Turn(10, "s", "ok", 12, 0.0), Turn(20, None, None, 0)), None, 0, True)
    short = Trajectory("u", "q", "x", 10, (Turn(500, None, None, 0),), None, 0, True)
    deployment, _ = planned_run(cluster_plan(), [trajectory, short])
    assert deployment.turn_tokens == 20
    requests = simulate_plan(cluster_plan(), [trajectory, short]).requests
    assert (requests.ended("finished") | requests.ended("interrupted")).all()  # what is moved goes on elsewhere
    wanted = {"t": 10 + 20, "u": 500}
    assert requests.generated.sum() == sum(wanted[name[0]] for name in requests.trajectories)


def test_weights_come_as_the_planner_says() -> None:
    plan = cluster_plan(RECIPE.model_copy(update={"kv_on_update": "refresh"}))
    request = plan.request
    assert request.kind == "cluster"
    prices = bucket_prices(request.menu().problem, plan.allocation)
    deployment, _ = planned_run(plan, agents(20), steps=3)
    for bucket, price in enumerate(prices):
        members = frozenset(i for i, engine in enumerate(deployment.engines) if engine.bucket == bucket)
        its = [update for update in deployment.updates if update.engines == members]
        assert [update.at for update in its] == [ticks(step * plan.predicted.step) for step in range(3)]
        assert {update.pause for update in its} == {ticks(price.option.stall)}
        assert [update.refresh for update in its] == [False, True, True]


def test_the_forecast_is_the_plans() -> None:
    plan = cluster_plan()
    forecast = forecast_of(plan, 3)
    assert forecast.work == 3 * plan.predicted.rollout
    assert forecast.seconds == max(forecast.work, forecast.longest)
    assert forecast.error(2 * forecast.seconds) == 1.0
    # A synchronous step is its rollout, which is the longer of the two, and what follows.
    sync = cluster_plan(Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="sync"))
    alone = forecast_of(sync)
    assert alone.work == sync.predicted.rollout
    assert alone.seconds <= sync.predicted.step - sync.predicted.training


def test_everything_is_generated_and_tools_take_their_time() -> None:
    result = simulate_plan(cluster_plan(), agents(20), "least-loaded", seed=1)
    requests = result.requests
    assert requests.ended("finished").all()
    assert int(requests.generated.sum()) == 64 * 100
    for trajectory in range(len(requests.trajectories)):
        its = requests.trajectory == trajectory
        first, second = requests.arrival[its][requests.turn[its].argsort()]
        finish = requests.finish[its][requests.turn[its].argsort()][0]
        assert second - finish == ticks(1.0)
        assert first >= 0


def test_unknown_tools_take_what_the_plan_assumes_or_what_is_said() -> None:
    log = agents(20, seconds_each=None)
    slow = simulate_plan(cluster_plan(), log, "least-loaded", unknown_tool_seconds=50.0)
    usual = simulate_plan(cluster_plan(), log, "least-loaded")
    # Not 49 exactly: in the longer pause more engines' work is done.
    assert ticks(45.0) < slow.makespan - usual.makespan <= ticks(49.0)


def test_the_same_seed_gives_the_same_result_and_looking_changes_nothing() -> None:
    plan = slot_plan()
    seen: list[Elapsed] = []
    first = simulate_plan(plan, LOG, "two-choices", steps=30, seed=7)
    again = simulate_plan(plan, LOG, "two-choices", steps=30, seed=7, progress=seen.append)
    other = simulate_plan(plan, LOG, "two-choices", steps=30, seed=8)
    assert (first.requests.finish == again.requests.finish).all()
    assert first.makespan == again.makespan != other.makespan
    assert len(seen) >= 1
    assert sum(engine.events for engine in again.engines) >= len(seen) * DECISIONS // 2
    assert all(0 <= moment.ended <= moment.arrived for moment in seen)
    assert [moment.seconds for moment in seen] == sorted(moment.seconds for moment in seen)


def test_a_router_that_has_learned_uses_all_buckets() -> None:
    plan = slot_plan()
    assert len(plan.allocation.buckets) == 2

    def turns_in_the_second_bucket(learned: Sequence[Trajectory]) -> int:
        result = simulate_plan(plan, LOG, "cmlfq-published", learned=learned)
        buckets = [engine.bucket for engine in result.engines]
        return sum(buckets[engine] for engine in result.requests.engine.tolist())

    assert turns_in_the_second_bucket(LOG) > turns_in_the_second_bucket(())


def test_a_policy_that_is_given_goes_on_from_what_it_knows() -> None:
    policy = policy_named("cmlfq-published")
    assert isinstance(policy, PublishedCMLFQ)
    simulate_plan(cluster_plan(), agents(20), policy)
    once = policy.snapshot()["prompt_tokens"]
    simulate_plan(cluster_plan(), agents(20), policy)
    assert policy.snapshot()["prompt_tokens"] == 2 * once > 0


def test_exact_is_the_same() -> None:
    plan = slot_plan()
    quick, exact = (simulate_plan(plan, LOG, exact=exact) for exact in (False, True))
    assert (quick.requests.finish == exact.requests.finish).all()
    assert sum(it.events for it in quick.engines) <= sum(it.events for it in exact.engines)


def test_a_time_limit_makes_it_partial() -> None:
    result = simulate_plan(cluster_plan(), agents(20), time_limit=0.5)
    assert result.partial
    assert result.end == ticks(0.5)


def test_unfinished_trajectories_are_not_drawn() -> None:
    log = [*agents(3), replace(agents(1)[0], id="open", turns=agents(1)[0].turns[:1], finished=False)]
    _, workload = planned_run(cluster_plan(), log)
    assert workload.describe()["source"]["log"] == 3


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = cluster_plan()
    with pytest.raises(
        ValueError, match=r"'t' has a context of 9010 tokens, more than the 8192.*plan again with this log"
    ):
        simulate_plan(plan, [Trajectory("t", "p", "x", 9000, (Turn(10, None, None, 0),), None, 0, True)])
    with pytest.raises(ValueError, match="policy is 'best'; choose one of"):
        simulate_plan(plan, agents(2), "best")
    narrow = replace(plan, max_num_seqs=tuple(10_000 for _ in plan.max_num_seqs))
    with pytest.raises(ValueError, match="max_num_batched_tokens is 8192, less than max_num_seqs 10000"):
        simulate_plan(narrow, agents(2))


def test_engines_over_nodes_are_simulated_with_the_memory_that_was_priced() -> None:
    """DeepSeek-V3 in bf16 is 1,343 GB, and a node of H200 has 1,200 GB."""
    nodes = NodeClass("h200", 64, 8, GPUS["H200"], intra_bandwidth=450e9, inter_bandwidth=400e9)
    model = load_model("deepseek-ai/DeepSeek-V3")
    recipe = RECIPE.model_copy(update={"rollout_dtype": "bf16", "max_length": 32768})
    plan = Planner(Cluster((nodes,)), model, recipe).plan(CLASSES)
    groups = [group for group in plan.placement if group.role == "generate"]
    engines = planned_engines(plan)
    assert len(groups) == len(engines) > 0
    for group, engine in zip(groups, engines, strict=True):
        assert len(group.gpus) * len(group.nodes) == engine.devices == group.devices > 8
        assert engine.name.startswith(f"h200-{'+'.join(map(str, group.nodes))}/0-7")
        held = batch_kv_tokens(model, nodes, recipe, engine.devices, CLASSES)
        assert engine.config.kv_blocks * engine.config.block_size == pytest.approx(held, abs=BLOCK)
    assert len({engine.name for engine in engines}) == len(engines)
