"""Explanations against every allocation there is, on small problems, and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libra.plan.allocation import Allocation, Bucket
from libra.plan.explain.alternatives import Alternative, relaxations, restrictions, splits, without_strays
from libra.plan.explain.explanation import Explanation, by_kind, explain
from libra.plan.model.relaxation import require_feasible
from libra.plan.model.solve import STEP_TOLERANCE, solve
from libra.plan.options.price import infeasibility, price, training_option
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, Proof, Solution, TrainingOption

FEW = settings(max_examples=40, deadline=None)
CLOSE = 2 * STEP_TOLERANCE  # relative: the tie-break's and the bisection's together


def allocations(problem: Problem) -> Iterator[Allocation]:
    """Every allocation that fits and in which each bucket has a class."""
    cuts = [shorter for shorter, longer in pairwise(problem.peaks) if shorter < longer]
    for buckets in range(1, len(cuts) + 2):
        for inner in combinations(cuts, buckets - 1):
            ends = (*inner, problem.longest_context)
            for shapes in product(problem.shapes, repeat=buckets):
                most = [problem.pool(problem.footprint(shape)[0]).devices for shape in shapes]
                for counts in product(*(range(1, n + 1) for n in most)):
                    starts = (0, *ends[:-1])
                    serving = tuple(map(Bucket, shapes, counts, starts, ends))
                    for option in problem.training:
                        allocation = Allocation(option.replicas, serving, option.layout)
                        if infeasibility(problem, allocation) is None:
                            yield allocation


def best(problem: Problem, allowed: Callable[[Allocation], bool] = lambda _: True) -> float | None:
    return min((price(problem, a).step for a in allocations(problem) if allowed(a)), default=None)


def is_other_with_more(problem: Problem, allocation: Allocation, other: Allocation) -> bool:
    mine, others = training_option(problem, allocation), training_option(problem, other)
    assert mine is not None and others is not None
    trains = mine.pool == others.pool and mine.devices >= others.devices
    engines = allocation.engines_by_shape
    return trains and all(engines[shape] >= count for shape, count in other.engines_by_shape.items())


@st.composite
def menus(draw: st.DrawFn) -> Problem:
    """A problem of at most 3 classes, 2 shapes and two pools of 4 devices; round numbers, so that ties happen."""
    numbers = st.integers(0, 12).map(float)
    peaks = tuple(sorted(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))))
    longest = draw(st.integers(peaks[-1], 7))
    classes = len(peaks)
    vectors = st.tuples(*[numbers] * classes)
    pools = tuple(Pool(name, draw(st.integers(1, 4)), 1) for name in draw(st.sampled_from([("a",), ("a", "b")])))
    names = st.sampled_from([pool.name for pool in pools])
    engines = []
    for shape in range(draw(st.integers(1, 2))):
        pool, devices, holds = draw(names), draw(st.integers(1, 2)), draw(st.integers(3, 8))
        for max_num_seqs in range(1, draw(st.integers(1, 2)) + 1):
            rows = tuple(draw(st.lists(vectors, min_size=1, max_size=2)))
            refresh = draw(st.sampled_from([(0.0,) * classes, (3.0,) * classes]))
            stall = draw(st.sampled_from([0.0, 1.0]))
            option = EngineOption(
                f"s{shape}",
                pool,
                devices,
                max_num_seqs,
                holds,
                stall,
                rows,
                refresh,
                draw(vectors),
                generates=((draw(st.sampled_from([0.0, 4.0])),) * classes,),
                waits=((draw(st.sampled_from([0.0, 6.0])),) * classes,),
            )
            engines.append(option)
    training = tuple(
        TrainingOption(
            f"t{k}", draw(names), draw(st.integers(1, 3)), 1, draw(numbers), draw(st.sampled_from([0.0, 2.0]))
        )
        for k in range(draw(st.integers(1, 3)))
    )
    staleness = draw(st.integers(0, 2))
    reach = tuple(draw(st.sampled_from([0.5, 1.0])) for _ in peaks)
    problem = Problem(
        pools=pools,
        engines=tuple(engines),
        training=training,
        peaks=peaks,
        expected=draw(st.tuples(*[st.booleans()] * classes)),
        longest_context=longest,
        recall_known=(reach,),
        recall_possible=(reach,),
        staleness=staleness,
        colocated=staleness == 0 and draw(st.booleans()),
        switch=1.0,
        one_bucket_per_shape=draw(st.booleans()),
        most_buckets=draw(st.sampled_from([None, None, 1, 2])),
    )
    try:
        require_feasible(problem)
    except InfeasiblePlanError:
        assume(False)
    return problem


def is_close(found: float, wanted: float) -> bool:
    return wanted * (1 - 1e-7) - 1e-5 <= found <= wanted * (1 + CLOSE) + 1e-5


@FEW
@given(menus())
def test_what_is_excluded_is_not_found_again_and_the_best_of_the_rest_is(problem: Problem) -> None:
    known: list[Allocation] = []
    for _ in range(4):

        def different(allocation: Allocation) -> bool:
            return not any(is_other_with_more(problem, allocation, other) for other in known)

        wanted = best(problem, different)
        if wanted is None:
            with pytest.raises(InfeasiblePlanError, match="no plan but the excluded"):
                solve(problem, excluding=known)
            return
        found = solve(problem, excluding=known)
        assert different(found.allocation)
        assert is_close(found.predicted.step, wanted)
        assert found.proof.bound <= wanted + 1e-5
        known.append(found.allocation)


@FEW
@given(menus())
def test_relaxed_problems_allow_every_plan_and_reliefs_are_their_optima(problem: Problem) -> None:
    solution = solve(problem)
    explained = explain(problem, solution)
    own = best(problem)
    assert own is not None
    steps = {relief.change: relief for relief in explained.reliefs}
    changes = list(relaxations(problem, {}))
    assert len(steps) == len(changes)
    for change in changes:
        wanted = best(change.problem)
        assert wanted is not None and wanted <= own + 1e-9
        relief = steps[change.what]
        assert is_close(relief.step, wanted)
        assert relief.seconds == explained.plan.predicted.step - relief.step
        if relief.binds:
            assert wanted < own
        if wanted < own * (1 - CLOSE) - 1e-4:
            assert relief.binds
    assert [relief.seconds for relief in explained.reliefs] == sorted((r.seconds for r in steps.values()), reverse=True)


@FEW
@given(menus())
def test_restricted_problems_forbid_the_decision_and_nothing_else(problem: Problem) -> None:
    solution = solve(problem)
    allocation, explained = solution.allocation, explain(problem, solution)
    own = (allocation.layout, allocation.replicas)
    shapes = {bucket.shape for bucket in allocation.buckets}
    forbidden: dict[str, Callable[[Allocation], bool]] = {
        "train on other devices or in another layout": lambda a: (a.layout, a.replicas) != own,
        **{f"no {shape}": lambda a, s=shape: all(b.shape != s for b in a.buckets) for shape in shapes},
        "a single bucket": lambda a: len(a.buckets) == 1,
        "2 buckets": lambda a: len(a.buckets) <= 2,
    }
    assert [other.decision for other in explained.otherwise] == [c.what for c in restrictions(problem, allocation)]
    decisions = {other.decision: other.plan for other in explained.otherwise}
    assert ("a single bucket" in decisions) == (len(allocation.buckets) > 1)
    for decision, plan in decisions.items():
        wanted = best(problem, forbidden[decision])
        assert (plan is None) == (wanted is None)
        if plan is not None and wanted is not None:
            assert is_close(plan.predicted.step, wanted)
            if explained.plan.predicted.step > 0:
                assert plan.loss == plan.predicted.step / explained.plan.predicted.step - 1


@FEW
@given(menus())
def test_a_split_is_the_fastest_training_and_the_fastest_generation_beside_it(problem: Problem) -> None:
    found = {(split.pool, split.devices): split for split in splits(problem, 40)}
    for pool, devices in {(option.pool, option.devices) for option in problem.training}:
        options = [option for option in problem.training if (option.pool, option.devices) == (pool, devices)]
        fastest = min(options, key=lambda option: option.seconds)
        alone = replace(problem, training=(fastest,))
        priced = [price(alone, allocation) for allocation in allocations(alone)]
        assert bool(priced) == ((pool, devices) in found)
        if not priced:
            continue
        split = found[pool, devices]
        assert split.training == fastest.seconds
        assert is_close(split.step, min(p.step for p in priced))
        if problem.staleness:
            assert is_close(split.generation, min(max(p.rollout, p.latency) for p in priced))
        else:
            fixed = fastest.seconds + fastest.publish + 2 * problem.switch * problem.colocated
            assert split.step == pytest.approx(split.generation + fixed)


@FEW
@given(menus())
def test_an_explanation_is_json_and_prices_its_own_plan(problem: Problem) -> None:
    solution = solve(problem)
    explained = explain(problem, solution)
    json.dumps(asdict(explained), allow_nan=False)
    assert explained.plan.predicted == solution.predicted
    assert explained.bound.by == solution.predicted.bottleneck
    assert sum(seconds for _, seconds in explained.bound.parts) == pytest.approx(solution.predicted.step)
    used = sum(bucket.devices for bucket in explained.buckets)
    assert used == sum(pool.generating for pool in explained.pools)
    for pool in explained.pools:
        busy = max(pool.training, pool.generating) if problem.colocated else pool.training + pool.generating
        assert pool.idle == pool.devices - busy >= 0
    if solution.predicted.step > 0:
        worst = max(bucket.share for bucket in explained.buckets)
        assert worst == pytest.approx(
            max(solution.predicted.rollout, solution.predicted.latency) / solution.predicted.step
        )
    wanted = best(without_strays(problem))
    assert wanted is not None and is_close(explained.routing.best_plan, wanted)
    assert explained.routing.same_plan == price(without_strays(problem), solution.allocation).step


def one_shape(
    work: tuple[float, float],
    residence: tuple[float, float],
    *,
    stall: float = 0.0,
    generates: float = 0.0,
    waits: float = 0.0,
    **fields: object,
) -> Problem:
    """Two classes on four single devices that each train in 8 s and less where more of them do."""
    lines = (((generates,) * 2,), ((waits,) * 2,)) if generates or waits else ((), ())
    engine = EngineOption("e", "p", 1, 8, 100, stall, (work,), (0.0, 0.0), residence, *lines)
    training = tuple(TrainingOption("t", "p", n, n, 8.0 / n, 0.5) for n in (1, 2, 3))
    problem = Problem((Pool("p", 2, 2),), (engine,), training, (10, 100), (True, True), 100, ((1, 1),), ((1, 1),), 1)
    return replace(problem, **fields)  # type: ignore[arg-type]


def shared(generates: float, waits: float) -> dict[str, object]:
    return {"generates": generates, "waits": waits}


BOUNDS = [
    ("rollout", (6.0, 3.0), (1.0, 1.0), {}, {"rollout": 4.5}, 1 - 4.0 / 4.5),
    ("training", (4.0, 3.0), (1.0, 1.0), {}, {"training": 4.0}, 0.125),
    ("latency", (4.0, 3.0), (1.0, 6.0), {}, {"latency": 3.0, "training": 2.0, "publication": 0.25}, None),
    # A synchronous step is a sum of work, or the longest trajectory where that is longer, and of what follows.
    ("sync, rollout", (4.0, 6.0), (1.0, 1.0), {"staleness": 0},
     {"rollout": 5.0, "training": 4.0, "publication": 0.5}, None),
    ("sync, latency", (4.0, 3.0), (1.0, 6.0), {"staleness": 0},
     {"latency": 6.0, "training": 4.0, "publication": 0.5}, None),
    # (9.911 - 3.5) (9.911 - 4.5) = 3.5 * 9.911
    ("sync, batches", (6.0, 3.0), (1.0, 1.0), {"staleness": 0, **shared(3.5, 3.5)},
     {"rollout": 9.911, "training": 4.0, "publication": 0.5}, None),
    # Of batches that overlap, half of each part: (16 - 4.5 - 1.9) (8 - 7.5) = 0.6 * 8, and 2.5 of 16 are the longest's,
    ("batches, rollout", (9.0, 6.0), (1.0, 1.0), shared(0.6, 1.9),
     {"rollout": 4.5, "training": 2.0, "latency": 1.25, "publication": 0.25}, None),
    # (16 - 4.5 - 3.5) (8 - 4.5) = 3.5 * 8,
    ("batches, latency", (6.0, 3.0), (1.0, 1.0), shared(3.5, 3.5),
     {"latency": 3.5, "rollout": 2.25, "training": 2.0, "publication": 0.25}, None),
    # (10 - 4.5 - 0.7) (5 - 1.8) = 3.072 * 5, just longer than training,
    ("batches, mostly training", (3.0, 0.6), (1.0, 1.0), shared(3.072, 0.7),
     {"training": 2.0, "latency": 1.886, "rollout": 0.864, "publication": 0.25}, None),
    # and (7 - 4.5 - 0.75) (3.5 - 1.5) = 3.5, for which training has no time.
    ("batches, training", (2.0, 1.0), (1.0, 1.0), shared(1.0, 0.75), {"training": 4.0}, 0.125),
    # Where the longest is in time anyway nothing is a sum.
    ("batches, only rollout", (6.0, 3.0), (1.0, 1.0), shared(0.0, 1.0), {"rollout": 4.5}, 1 - 4.0 / 4.5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("work", "residence", "fields", "parts", "slack"), [row[1:] for row in BOUNDS], ids=[r[0] for r in BOUNDS]
)
def test_the_parts_of_a_step_are_named_the_largest_first(
    work: tuple[float, float],
    residence: tuple[float, float],
    fields: dict[str, object],
    parts: dict[str, float],
    slack: float | None,
) -> None:
    problem = one_shape(work, residence, **fields)
    allocation = Allocation(2, (Bucket("e", 2, 0, 100),), "t")
    solution = Solution(allocation, price(problem, allocation), Proof("feasible", 0.0, 1.0))
    bound = explain(problem, solution).bound
    assert [name for name, _ in bound.parts] == list(parts)
    assert dict(bound.parts) == pytest.approx(parts, abs=1e-3)
    assert (bound.by, bound.batches) == (next(iter(parts)), 1 + problem.staleness)
    assert bound.slack == (slack if slack is None else pytest.approx(slack))


def explained_example(**arguments: object) -> Explanation:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    return explain(problem, solve(problem), **arguments)  # type: ignore[arg-type]


def test_a_node_is_priced_anew_where_the_problem_with_it_is_given() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    faster = replace(problem, training=(TrainingOption("new", "p", 1, 1, 0.1, 0.0),), pools=(Pool("p", 3, 2),))
    node = next(relief for relief in explained_example().reliefs if relief.node_of == "p")
    anew = next(relief for relief in explained_example(larger={"p": faster}).reliefs if relief.node_of == "p")
    # 12 s of work on 4 engines beside 2 or on 5 beside 1 of six devices.
    assert (node.step, anew.step) == (pytest.approx(4.0), pytest.approx(2.4))
    assert node.change == "one more node of p (2 devices)"


def test_buckets_of_batches_show_what_their_engines_take_and_what_follows() -> None:
    """Two engines of 9 s of work and 1 s for weights; the longest trajectory generates for 4 s and waits for 2 s."""
    problem = one_shape((6.0, 3.0), (1.0, 6.0), stall=1.0, generates=4.0, waits=2.0)
    # (2 T - 4.5 - 2) (T - 5.5) = 4 T, and (2 T - 8.5 - 2) (T - 5.5) = 4 T
    for replicas, follows, end in ((2, 4.5, (21.5 + 176.25**0.5) / 4), (1, 8.5, (25.5 + 188.25**0.5) / 4)):
        allocation = Allocation(replicas, (Bucket("e", 2, 0, 100),), "t")
        solution = Solution(allocation, price(problem, allocation), Proof("feasible", 0.0, 1.0))
        (bucket,) = explain(problem, solution).buckets
        assert (bucket.load, bucket.residence, bucket.latency) == pytest.approx((5.5, 2 * end - follows, end))
        assert bucket.share == 1.0 == bucket.latency / solution.predicted.step
    slow = replace(problem, training=(TrainingOption("t", "p", 2, 2, 30.0, 0.5),))
    allocation = Allocation(2, (Bucket("e", 2, 0, 100),), "t")
    (bucket,) = explain(slow, Solution(allocation, price(slow, allocation), Proof("feasible", 0.0, 1.0))).buckets
    assert (30 * bucket.share, bucket.latency) == pytest.approx(((47.5 + 826.25**0.5) / 4,) * 2)


def test_without_the_longest_trajectories_nothing_waits_for_them() -> None:
    problem = one_shape((6.0, 3.0), (1.0, 6.0), stall=1.0, generates=4.0, waits=2.0)
    change = next(c for c in relaxations(problem, {}) if c.what == "no waiting for a step's longest trajectories")
    allocation = Allocation(2, (Bucket("e", 2, 0, 100),), "t")
    assert price(problem, allocation).step > 8.0
    assert price(change.problem, allocation).step == 5.5


def test_another_version_of_staleness_is_priced_anew_where_that_problem_is_given() -> None:
    problem = one_shape((6.0, 3.0), (1.0, 6.0))
    anew = replace(problem, staleness=2, engines=(replace(problem.engines[0], work=((2.0, 1.0),)),))
    found = {
        given: next(r for r in explain(problem, solve(problem), staler=given).reliefs if "staleness" in r.change)
        for given in (None, anew)
    }
    assert {relief.change for relief in found.values()} == {"staleness 2 instead of 1"}
    assert is_close(found[None].step, solve(replace(problem, staleness=2)).predicted.step)
    assert is_close(found[anew].step, solve(anew).predicted.step)
    assert found[anew].step < found[None].step


def test_splits_are_thinned_evenly_and_keep_both_ends() -> None:
    training = tuple(TrainingOption("t", "p", n, n, 90.0 / n, 0.5) for n in range(1, 22))
    problem = one_shape((9.0, 3.0), (1.0, 1.0), training=training, pools=(Pool("p", 22, 1),))
    assert [split.devices for split in splits(problem, 5)] == [1, 6, 11, 16, 21]
    assert [split.devices for split in splits(problem, 21)] == list(range(1, 22))
    assert [split.devices for split in splits(problem, 5, training[6])] == [1, 6, 7, 11, 16, 21]
    assert [split.devices for split in splits(problem, 5, training[10])] == [1, 6, 11, 16, 21]


def test_a_lone_plan_has_no_runners_up() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0), pools=(Pool("p", 2, 1),))
    explained = explain(problem, solve(problem))
    assert explained.runners_up == ()
    assert {other.decision: other.plan for other in explained.otherwise}["no e"] is None


def test_a_solution_that_does_not_fit_is_refused() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    solution = solve(problem)
    with pytest.raises(ValueError, match="no option trains"):
        explain(problem, replace(solution, allocation=replace(solution.allocation, replicas=7)))


def test_a_lower_longest_context_spares_no_work_but_the_memory_for_it() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    small = EngineOption("small", "p", 1, 8, 10, 0.0, ((0.1, 0.1),), (0.0, 0.0), (1.0, 1.0))
    changes = {c.what: c for c in relaxations(replace(problem, engines=(*problem.engines, small)), {})}
    change: Alternative = changes["longest context 10 instead of 100 tokens, for the same work"]
    assert [option.holds for option in change.problem.engines] == [100, 100]
    assert (change.problem.peaks, change.problem.longest_context) == ((10, 100), 100)


REJECTED = [
    ("a", "at dp 24 it needs 338.3 GB; the largest item is logits"),
    ("b", "a replica has 64 devices; there are 48"),
    ("c", "a replica has 128 devices; there are 48"),
    ("d", "slower, by 2.5% at least, than tp1 dp* full-recompute, on 8 devices"),
]


def test_reasons_of_one_kind_differ_in_numbers_and_layouts_alone() -> None:
    kinds = by_kind(REJECTED)
    assert [(kind.kind, [name for name, _ in kind.options]) for kind in kinds] == [
        ("a replica has … devices", ["b", "c"]),
        ("at dp … it needs … GB", ["a"]),
        ("slower, by … at least, than …, on … devices", ["d"]),
    ]
    assert sorted(option for kind in kinds for option in kind.options) == REJECTED
    assert explained_example(rejected=REJECTED).rejected == kinds
