"""Every allocation of a small problem with its step, by brute force, and random problems that are small enough.

Invariant: nothing here calls the code that it judges. Steps follow the inequalities in the docstring of
`libra.plan.problem`. A bucket's step is the smallest that satisfies them under one of its options. An allocation's step
is the largest of its buckets' steps and of training. The list has every allocation in which each bucket serves a class,
with limits at the classes' peaks or at the limits of the present buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise

from hypothesis import strategies as st

from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption


@dataclass(frozen=True, slots=True)
class Priced:
    """One allocation, the seconds of its step, and the counts for the tie-break."""

    allocation: Allocation
    step: float
    changes: bool  # whether it differs from the running allocation
    moves: int
    devices: int


def priced(problem: Problem) -> list[Priced]:
    """Every allocation of the problem."""
    steps = _bucket_steps(problem)
    found = []
    for training in problem.training:
        for buckets in _all_buckets(problem, training):
            allocation = Allocation(training.replicas, buckets, training.layout)
            runs, begin = _runs(problem, buckets), buckets[0].shape
            step = max(training.seconds, *(steps(bucket, training, runs, begin) for bucket in buckets))
            options = [(b.engines, _options(problem, b.shape)[0]) for b in buckets]
            devices = training.devices + sum(
                n * (it.devices + (it.prefill[1] if it.prefill else 0)) for n, it in options
            )
            changes = problem.current not in (None, allocation)
            found.append(Priced(allocation, step, changes, moves(problem, allocation), devices))
    return found


def answers(problem: Problem) -> list[Priced]:
    """Every allocation of the problem. The running allocation is included if it fits, even if a bucket of it serves no
    class."""
    found, present = priced(problem), problem.current
    if present is not None and _fits(problem, present) and present not in [plan.allocation for plan in found]:
        found.append(Priced(present, step_of(problem, present), False, 0, sum(_devices(problem, present).values())))
    return found


def optimum(problem: Problem) -> float:
    """The shortest step; infinity if the problem has no allocation."""
    return min((plan.step for plan in priced(problem)), default=math.inf)


def step_of(problem: Problem, allocation: Allocation) -> float:
    """Seconds of one step of an allocation that fits."""
    steps = _bucket_steps(problem)
    training = next(t for t in problem.training if (t.layout, t.replicas) == (allocation.layout, allocation.replicas))
    runs = _runs(problem, allocation.buckets)
    begin = allocation.buckets[0].shape
    return max(training.seconds, *(steps(bucket, training, runs, begin) for bucket in allocation.buckets))


def moves(problem: Problem, allocation: Allocation) -> int:
    """Number of engines and replicas to start, and one more if ranges change; 0 if nothing runs."""
    current = problem.current
    if current is None:
        return 0
    started = max(0, allocation.replicas - (current.replicas if current.layout == allocation.layout else 0))
    for shape in {bucket.shape for bucket in allocation.buckets}:
        before = sum(bucket.engines for bucket in current.buckets if bucket.shape == shape)
        started += max(0, sum(bucket.engines for bucket in allocation.buckets if bucket.shape == shape) - before)
    return started + (not _runs(problem, allocation.buckets))


def _fits(problem: Problem, allocation: Allocation) -> bool:
    shapes = [bucket.shape for bucket in allocation.buckets]
    if (
        (allocation.layout, allocation.replicas) not in {(t.layout, t.replicas) for t in problem.training}
        or not shapes
        or not set(shapes) <= set(problem.shapes)
        or len(shapes) > (problem.most_buckets or len(shapes))
        or (problem.one_bucket_per_shape and len(set(shapes)) < len(shapes))
        or allocation.buckets[-1].up_to < problem.longest_context
        or any(bucket.up_to > _options(problem, bucket.shape)[0].holds for bucket in allocation.buckets)
    ):
        return False
    return _may_use(problem, _devices(problem, allocation))


def _may_use(problem: Problem, used: dict[str, int]) -> bool:
    """Whether the problem allows an allocation to use these devices, by pool."""
    for pool in problem.pools:
        allowed = {pool.devices, 0} if pool.serves else {pool.devices}
        if used[pool.name] > pool.devices or (problem.use_all_devices and used[pool.name] not in allowed):
            return False
    return True


def _devices(problem: Problem, allocation: Allocation) -> dict[str, int]:
    """Devices of each pool that the allocation uses."""
    training = next(t for t in problem.training if (t.layout, t.replicas) == (allocation.layout, allocation.replicas))
    trains = {pool.name: training.devices if pool.name == training.pool else 0 for pool in problem.pools}
    generates = dict.fromkeys(trains, 0)
    for bucket in allocation.buckets:
        option = _options(problem, bucket.shape)[0]
        generates[option.pool] += bucket.engines * option.devices
        if option.prefill is not None:
            generates[option.prefill[0]] += bucket.engines * option.prefill[1]
    together = max if problem.colocated else int.__add__
    return {name: together(trains[name], generates[name]) for name in trains}


def bucket_step(problem: Problem, bucket: Bucket, training: TrainingOption, runs: bool, begin: str) -> float:
    """The shortest step that the bucket allows with this training. `runs`: the bucket's routers are known. `begin`: the
    shape of the first bucket."""
    there = min(_options(problem, begin), key=lambda option: option.residence[-1])
    return min(
        _option_step(problem, option, bucket, training, runs, there) for option in _options(problem, bucket.shape)
    )


def members(problem: Problem, bucket: Bucket) -> list[int]:
    return [j for j, peak in enumerate(problem.peaks) if bucket.above < peak <= bucket.up_to]


def _runs(problem: Problem, buckets: tuple[Bucket, ...]) -> bool:
    """Whether the ranges are the present ones."""
    present = problem.current
    return present is not None and [(b.shape, b.up_to) for b in present.buckets] == [
        (b.shape, b.up_to) for b in buckets
    ]


def _options(problem: Problem, shape: str) -> list[EngineOption]:
    return [option for option in problem.engines if option.shape == shape]


def _bucket_steps(problem: Problem) -> Callable[[Bucket, TrainingOption, bool, str], float]:
    """`bucket_step`, cached."""

    @cache
    def step(bucket: Bucket, training: TrainingOption, runs: bool, begin: str) -> float:
        return bucket_step(problem, bucket, training, runs, begin)

    return step


def _option_step(
    problem: Problem, option: EngineOption, bucket: Bucket, training: TrainingOption, runs: bool, there: EngineOption
) -> float:
    """The smallest step in which the bucket's engines do their work and its longest trajectory is in time. This
    trajectory begins on the option `there`."""
    own = members(problem, bucket)
    routers = problem.recall_known if runs else problem.recall_possible

    # [class] of the fastest engine, with nothing beside.
    fastest = [
        min(
            max([it.residence[j], *(g[j] + w[j] for g, w in zip(it.generates, it.waits, strict=True))])
            for it in problem.engines
        )
        for j in range(len(problem.peaks))
    ]
    nothing = (0.0,) * len(problem.peaks)
    count = max(len(it.generates) for it in problem.engines)

    def rows(option: EngineOption) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        return list(zip(option.generates, option.waits, strict=True)) + [(nothing, nothing)] * count

    stays = [option.residence[j] for j in own if problem.expected[j]]
    lines = [(row[own[-1]], waits[own[-1]]) for row, waits in zip(option.generates, option.waits, strict=True) if own]
    if bucket.above > 0:
        stays, lines = [], []
        for reach in routers:
            stays += [
                reach[j] * option.residence[j] + (1 - reach[j]) * there.residence[j] for j in own if problem.expected[j]
            ]
            for (row, waits), (begun, waited) in list(zip(rows(option), rows(there), strict=False))[
                : count if own else 0
            ]:
                part = reach[own[-1]]
                lines.append(
                    (
                        part * row[own[-1]] + (1 - part) * begun[own[-1]],
                        part * waits[own[-1]] + (1 - part) * waited[own[-1]],
                    )
                )
    else:
        for reach in routers:
            for j in (j for j, peak in enumerate(problem.peaks) if peak > bucket.up_to):
                stays += [reach[j] * fastest[j] + (1 - reach[j]) * option.residence[j]] if problem.expected[j] else []
                for row, waits in rows(option)[:count]:
                    lines.append(((1 - reach[j]) * row[j], (1 - reach[j]) * waits[j] + reach[j] * fastest[j]))
    residence = max(stays, default=0.0)
    after = (
        (training.seconds if training.tail is None else training.tail)
        + training.publish
        + 2 * problem.switch * problem.colocated
    )

    def asked(costs: tuple[float, ...], reach: tuple[float, ...]) -> float:
        return _asked(costs, reach, own, bucket) if costs else 0.0

    loads = []  # of each router: seconds of a step, and seconds squared to be divided by it
    for reach in routers:
        gone = min(1.0, max(0.0, asked(option.kv_occupancy, reach) / bucket.engines - 1))
        busy = max(asked(row, reach) for row in option.work) + gone * asked(option.refill, reach)
        loads.append((busy / bucket.engines, asked(option.refresh, reach) / bucket.engines))

    def work(step: float) -> float:
        """Seconds of work in a step, for the router that needs most."""
        return max([busy + squared / step for busy, squared in loads])

    def kept(step: float) -> bool:
        """Whether the longest trajectory is in time with the part of its engine that the others leave."""
        allowed = (1 + problem.staleness) * step - after
        left, spread, load = allowed, step, work(step) + option.stall
        if problem.staleness == 0:  # the work is spread over the rollout
            left, spread, load = allowed - option.stall, allowed - option.stall, work(step)
        if residence > allowed or load > spread:
            return False
        return all(
            [waits <= left and (left - waits) * (spread - load) >= generates * spread for generates, waits in lines]
        )

    return _first(kept)


def _asked(costs: tuple[float, ...], reach: tuple[float, ...], own: list[int], bucket: Bucket) -> float:
    asked = 0.0
    for j, cost in enumerate(costs):
        if j in own:
            asked += cost * reach[j]
        if bucket.above == 0:
            asked += cost * (1 - reach[j])
    return asked


def _first(kept: Callable[[float], bool]) -> float:
    """The smallest step that is kept, given that all longer steps are kept, too; 0 for a step of almost no length."""
    short, long = 0.0, 1e-12
    if kept(long):
        return 0.0
    while not kept(long):
        short, long = long, 2 * long
    while long - short > 1e-13 * long:
        middle = (short + long) / 2
        short, long = (short, middle) if kept(middle) else (middle, long)
    return long


def _all_buckets(problem: Problem, training: TrainingOption) -> Iterator[tuple[Bucket, ...]]:
    devices = {pool.name: pool.devices for pool in problem.pools}
    room = dict(devices)
    if room[training.pool] < training.devices:
        return
    trained = {name: training.devices if name == training.pool else 0 for name in room}
    if not problem.colocated:
        room[training.pool] -= training.devices
    ends = [*sorted({peak for peak in problem.peaks if peak < problem.peaks[-1]}), problem.longest_context]
    ways = {tuple(cut) for cut in _cuts(ends)}
    present = problem.current
    if present is not None and present.buckets and present.buckets[-1].up_to >= problem.longest_context:
        ways.add(tuple(bucket.up_to for bucket in present.buckets))
    for way in sorted(ways):
        ranges = list(pairwise((0, *way)))
        if len(way) > (problem.most_buckets or len(way)) or not all(
            any(above < peak <= up_to for peak in problem.peaks) for above, up_to in ranges
        ):
            continue
        for buckets, left in _served(
            problem, ranges, {shape: _options(problem, shape)[0] for shape in problem.shapes}, room
        ):
            used = {name: size - left[name] for name, size in devices.items()}
            if problem.colocated:
                used = {name: max(count, trained[name]) for name, count in used.items()}
            if _may_use(problem, used):
                yield buckets


def _cuts(ends: list[int]) -> Iterator[list[int]]:
    """Every way to end buckets at some of `ends`, always at the last."""
    *others, last = ends
    for chosen in range(2 ** len(others)):
        yield [end for k, end in enumerate(others) if chosen >> k & 1] + [last]


def _served(
    problem: Problem, ranges: list[tuple[int, int]], shapes: dict[str, EngineOption], room: dict[str, int]
) -> Iterator[tuple[tuple[Bucket, ...], dict[str, int]]]:
    """Yield the numbers of engines of `shapes` for each range, within the remaining devices."""
    if not ranges:
        yield (), room
        return
    (above, up_to), *longer = ranges
    for shape, option in shapes.items():
        if option.holds < up_to:
            continue
        others = {name: o for name, o in shapes.items() if name != shape} if problem.one_bucket_per_shape else shapes
        for engines in range(1, room[option.pool] // option.devices + 1):
            left = {**room, option.pool: room[option.pool] - engines * option.devices}
            if option.prefill is not None:
                left[option.prefill[0]] -= engines * option.prefill[1]
                if left[option.prefill[0]] < 0:
                    break
            for rest, remains in _served(problem, longer, others, left):
                yield (Bucket(shape, engines, above, up_to), *rest), remains


_MOST = 1000  # allocations of a random problem, so that brute force takes well below a second

# Round numbers, so that ties happen; some much larger than others, so that each constraint binds somewhere.
_SECONDS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 5.0, 7.5, 20.0])
_FRACTIONS = st.sampled_from([0.0, 0.25, 0.8, 1.0, 1.0])


@st.composite
def _rising(draw: st.DrawFn, classes: int) -> tuple[float, ...]:
    """[class] seconds of the longest trajectory up to each class."""
    return tuple(sorted(draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])) for _ in range(classes)))


@st.composite
def problems(draw: st.DrawFn, *, feasible: bool = True, small: bool = False) -> Problem:
    """A problem with at most 6 classes (`small`: 3), 4 shapes (`small`: 2) and 3 pools. `feasible`: it has a plan."""
    fewest = 1 if small else draw(st.integers(1, 4))
    peaks = tuple(sorted(draw(st.lists(st.integers(1, 9), min_size=fewest, max_size=3 if small else 6))))
    classes = len(peaks)
    longest = draw(st.integers(peaks[-1], 11))
    pools = draw(_pools())
    staleness = draw(st.sampled_from([0, 0, 1, 2, 3]))
    colocated = staleness == 0 and draw(st.booleans())
    per_class = st.tuples(*[_SECONDS] * classes)
    reach = st.tuples(*[_FRACTIONS] * classes)
    refreshes = draw(st.integers(0, 3)) == 0
    engines: list[EngineOption] = []
    for shape in range(draw(st.sampled_from([1, 2, 2] if small else [1, 2, 2, 3, 3, 4]))):
        pool = draw(st.sampled_from(pools))
        devices = draw(st.sampled_from([1, 1, 2]))
        # The prefill half of a pair is on any pool, with fewer devices than the pool has.
        prompts = draw(st.sampled_from([it for it in pools if not it.serves]))
        pair = shape > 0 and not pool.serves and draw(st.booleans())
        # The first shape has room for everything. Otherwise most problems would be infeasible.
        holds = longest if shape == 0 else draw(st.integers(1, longest + 1))
        rows = draw(st.integers(1, 2))
        caches = st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5])] * classes)
        lines = draw(st.integers(0, 2))
        for max_num_seqs in range(1, draw(st.integers(1, 3)) + 1):
            engines.append(
                EngineOption(
                    shape=f"shape-{shape}",
                    pool=pool.name,
                    devices=devices,
                    max_num_seqs=max_num_seqs,
                    holds=holds,
                    prefill=(prompts.name, 1) if pair else None,
                    stall=draw(st.sampled_from([0.0, 0.0, 0.25, 2.0])),
                    work=tuple(draw(per_class) for _ in range(rows)),
                    refresh=draw(per_class) if refreshes else (0.0,) * classes,
                    residence=draw(per_class),
                    generates=tuple(draw(_rising(classes)) for _ in range(lines)),
                    waits=tuple(draw(_rising(classes)) for _ in range(lines)),
                    **({"refill": draw(per_class), "kv_occupancy": draw(caches)} if draw(st.booleans()) else {}),
                )
            )
    tried = tuple(draw(st.lists(reach, min_size=1, max_size=2)))
    problem = Problem(
        pools=pools,
        engines=tuple(engines),
        training=draw(_training(pools)),
        peaks=peaks,
        expected=draw(st.tuples(*[st.sampled_from([True, True, False])] * classes)),
        longest_context=longest,
        recall_known=tried,
        recall_possible=(*tried, *draw(st.lists(reach, max_size=1))),
        staleness=staleness,
        colocated=colocated,
        switch=draw(_SECONDS) if colocated else 0.0,
        use_all_devices=draw(st.integers(0, 3)) == 0,
        one_bucket_per_shape=draw(st.booleans()),
        most_buckets=draw(st.sampled_from([None, None, 1, 2, 3])),
    )
    for most_buckets in (3, 2, 1):
        if len(list(islice(_feasible(problem), _MOST + 1))) > _MOST:
            problem = replace(problem, most_buckets=most_buckets)
    if draw(st.booleans()):
        problem = draw(_with_current(problem))
    if feasible and next(_feasible(problem), None) is None:
        problem = replace(problem, use_all_devices=False)
        if next(_feasible(problem), None) is None:
            roomy = tuple(replace(pool, nodes=pool.nodes + 8) for pool in pools)
            problem = replace(problem, pools=roomy, most_buckets=1)
    return problem


def _feasible(problem: Problem) -> Iterator[tuple[Bucket, ...]]:
    for training in problem.training:
        yield from _all_buckets(problem, training)


@st.composite
def _pools(draw: st.DrawFn) -> tuple[Pool, ...]:
    sizes = draw(st.sampled_from([(8,), (6,), (7,), (5,), (3,), (4, 3), (2, 4), (3, 2, 2), (0, 5)]))
    return tuple(Pool(f"pool-{p}", size, 1) for p, size in enumerate(sizes))


@st.composite
def _training(draw: st.DrawFn, pools: tuple[Pool, ...]) -> tuple[TrainingOption, ...]:
    """One or two layouts, each with a few numbers of replicas; more of them need more devices."""
    options = []
    for layout in range(draw(st.integers(1, 2))):
        pool = draw(st.sampled_from(pools)).name
        devices = draw(st.sampled_from([1, 1, 2]))
        for replicas in sorted(draw(st.sets(st.integers(1, 3), min_size=1))):
            seconds, publish = draw(_SECONDS), draw(st.sampled_from([0.0, 0.25]))
            tail = draw(st.sampled_from([None, None, 0.0, seconds / 2]))
            options.append(
                TrainingOption(f"layout-{layout}", pool, devices * replicas, replicas, seconds, publish, tail)
            )
    return tuple(options)


@st.composite
def _with_current(draw: st.DrawFn, problem: Problem) -> Problem:
    """The problem with a running allocation: one of its own, or one that fits it no longer."""
    ways = list(islice(_feasible(replace(problem, use_all_devices=False)), _MOST))
    if not ways:
        return problem
    training = draw(st.sampled_from(problem.training))
    buckets = draw(st.sampled_from(ways))
    changes: list[tuple[Bucket, ...]] = [buckets, buckets, buckets]
    *others, last = buckets
    changes.append((*others, replace(last, up_to=last.up_to + 1)))
    changes.append((*others, replace(last, engines=last.engines + 2)))
    changes.append((*others, replace(last, shape="retired")))
    changes.append(tuple(others))
    if last.up_to - last.above > 1:  # add a limit between the peaks of classes
        changes.append((*others, replace(last, up_to=last.up_to - 1), replace(last, above=last.up_to - 1)))
        if others:
            cut = last.above + 1
            changes.append((*others[:-1], replace(others[-1], up_to=cut), replace(last, above=cut)))
    return replace(problem, current=Allocation(training.replicas, draw(st.sampled_from(changes)), training.layout))
