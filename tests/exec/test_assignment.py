"""From an allocation to workers and moves, against every way to do it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.exec.assignment import assign, bucket_limits, current_allocation, describe, fitted
from libra.exec.moves import Move, obstacle
from libra.exec.workers import IDLE, TRAIN, Duty, Role, Worker
from libra.plan.problem import Allocation, Bucket, InfeasiblePlanError

SHAPES = ("short", "middle", "long")
HOLD_ALL = frozenset({"middle", "long"})  # the shapes that hold the longest contexts
CORE, ROLLOUT = frozenset({Role.TRAIN}), frozenset({Role.ROLLOUT})
HYBRID = CORE | ROLLOUT


def engine(shape: str) -> Duty:
    return Duty(Role.ROLLOUT, shape)


def worker(slot: int, allowed: frozenset[Role], duty: Duty = IDLE) -> Worker:
    return Worker(f"w{slot}", slot, allowed, duty.role, duty.shape)


def allocation(replicas: int, **engines: int) -> Allocation:
    """Buckets of 100 tokens each, in the order of the shapes."""
    present = [shape for shape in SHAPES if engines.get(shape)]
    return Allocation(
        replicas, tuple(Bucket(shape, engines[shape], 100 * i, 100 * (i + 1)) for i, shape in enumerate(present))
    )


def moved(workers: Sequence[Worker], move: Move) -> tuple[Worker, ...]:
    return tuple(
        replace(w, role=move.after.role, shape=move.after.shape) if w.id == move.worker else w for w in workers
    )


def after(workers: Sequence[Worker], moves: Iterable[Move]) -> tuple[Worker, ...]:
    state = tuple(workers)
    for move in moves:
        state = moved(state, move)
    return state


def wanted_totals(wanted: Allocation) -> Counter[Duty]:
    counts: Counter[Duty] = Counter({engine(bucket.shape): bucket.engines for bucket in wanted.buckets})
    counts[TRAIN] = wanted.replicas
    return +counts


def totals(workers: Iterable[Worker]) -> Counter[Duty]:
    return Counter(w.duty for w in workers)


def ways(workers: Sequence[Worker], wanted: Allocation) -> Iterator[tuple[Duty, ...]]:
    """Every assignment of duties that the workers may take and that is the wanted allocation."""
    choices = [
        ([TRAIN] if Role.TRAIN in w.allowed else [])
        + ([engine(bucket.shape) for bucket in wanted.buckets] if Role.ROLLOUT in w.allowed else [])
        for w in workers
    ]
    for duties in product(*choices):
        if Counter(duties) == wanted_totals(wanted):
            yield duties


def fewest_changes(workers: Sequence[Worker], wanted: Allocation) -> int:
    return min(sum(w.duty != duty for w, duty in zip(workers, duties, strict=True)) for duties in ways(workers, wanted))


def leaves_a_gap(workers: Sequence[Worker], move: Move) -> bool:
    """Whether nobody holds the longest contexts while the worker moves, though somebody did before."""

    def holds(w: Worker) -> bool:
        return w.role is Role.ROLLOUT and w.shape in HOLD_ALL

    return any(map(holds, workers)) and not any(holds(w) for w in workers if w.id != move.worker)


def shortest_way_without_a_gap(workers: Sequence[Worker], wanted: Allocation) -> int:
    """By breadth-first search over all that the workers may be."""
    goal = wanted_totals(wanted)
    duties = [TRAIN, *(engine(shape) for shape in SHAPES)]
    seen, queue = {tuple(w.duty for w in workers)}, deque([(tuple(workers), 0)])
    while queue:
        state, length = queue.popleft()
        if totals(state) == goal:
            return length
        for w, duty in product(state, duties):
            move = Move(w.id, w.duty, duty)
            if duty.role not in w.allowed or duty == w.duty or leaves_a_gap(state, move):
                continue
            following = moved(state, move)
            key = tuple(each.duty for each in following)
            if key not in seen:
                seen.add(key)
                queue.append((following, length + 1))
    raise AssertionError("the wanted allocation cannot be reached")


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Worker], Allocation]:
    """Up to five workers with duties that they may have, and an allocation that uses them all."""
    core, hybrid, rollout = draw(st.integers(0, 1)), draw(st.integers(0, 3)), draw(st.integers(0, 1))
    if hybrid + rollout == 0:
        rollout = 1
    engines = [*(engine(shape) for shape in SHAPES), IDLE]
    duties: dict[frozenset[Role], list[Duty]] = {CORE: [TRAIN, IDLE], HYBRID: [*engines, TRAIN], ROLLOUT: engines}
    kinds = draw(st.permutations([CORE] * core + [HYBRID] * hybrid + [ROLLOUT] * rollout))
    workers = [worker(slot, kind, draw(st.sampled_from(duties[kind]))) for slot, kind in enumerate(kinds)]
    training = draw(st.integers(0, hybrid - (rollout == 0)))
    others = hybrid - training + rollout - 1
    shapes = [draw(st.sampled_from(sorted(HOLD_ALL))), *(draw(st.sampled_from(SHAPES)) for _ in range(others))]
    return workers, allocation(core + training, **Counter(shapes))


@settings(max_examples=300, deadline=None)
@given(situations())
def test_the_result_is_what_was_wanted_and_nobody_is_without_need(situation: tuple[list[Worker], Allocation]) -> None:
    workers, wanted = situation
    moves = assign(workers, wanted, HOLD_ALL)
    state = tuple(workers)
    for move in moves:
        assert next(w for w in state if w.id == move.worker).duty == move.before != move.after
        assert obstacle(state, move, HOLD_ALL) is None
        if sum(w.role is Role.ROLLOUT for w in workers) > 1:
            assert not leaves_a_gap(state, move)
        state = moved(state, move)
    assert totals(state) == wanted_totals(wanted)
    assert all(w.role in w.allowed for w in state)


@settings(max_examples=100, deadline=None)
@given(situations())
def test_no_more_moves_than_have_to_be(situation: tuple[list[Worker], Allocation]) -> None:
    workers, wanted = situation
    moves = assign(workers, wanted, HOLD_ALL)
    if sum(w.role is Role.ROLLOUT for w in workers) > 1:
        assert len(moves) == shortest_way_without_a_gap(workers, wanted)
    else:
        assert len(moves) == fewest_changes(workers, wanted)


@settings(deadline=None)
@given(situations())
def test_nothing_changes_twice(situation: tuple[list[Worker], Allocation]) -> None:
    workers, wanted = situation
    assert assign(after(workers, assign(workers, wanted, HOLD_ALL)), wanted, HOLD_ALL) == ()


@pytest.mark.parametrize(
    ("name", "workers", "wanted", "moves"),
    [
        (
            "the first allocation: longer engines start first, joining comes last",
            [worker(0, CORE, TRAIN), worker(1, HYBRID), worker(2, ROLLOUT), worker(3, ROLLOUT)],
            allocation(2, short=1, long=1),
            ["w2 idle -> rollout:long", "w3 idle -> rollout:short", "w1 idle -> train"],
        ),
        (
            "a trainer that leaves goes before the others and takes the longest engine",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("short")), worker(2, HYBRID, TRAIN)],
            allocation(1, short=1, long=1),
            ["w2 train -> rollout:long"],
        ),
        (
            "the engine that is not needed joins the training",
            [worker(0, CORE, TRAIN), worker(1, HYBRID, engine("short")), worker(2, HYBRID, engine("long"))],
            allocation(2, long=1),
            ["w1 rollout:short -> train"],
        ),
        (
            "one engine too many of a shape: it, not the last of another shape, joins the training",
            [worker(0, HYBRID, engine("short")), worker(1, HYBRID, engine("long")), worker(2, HYBRID, engine("long"))],
            allocation(1, short=1, long=1),
            ["w1 rollout:long -> train"],
        ),
        (
            "another shape in the same slot",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("short"))],
            allocation(1, long=1),
            ["w1 rollout:short -> rollout:long"],
        ),
        (
            "who holds the longest contexts waits until somebody else does",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("middle")), worker(2, ROLLOUT, engine("short"))],
            allocation(1, short=1, long=1),
            ["w2 rollout:short -> rollout:long", "w1 rollout:middle -> rollout:short"],
        ),
        (
            "also where the other one is to train",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("middle")), worker(2, HYBRID, engine("short"))],
            allocation(2, long=1),
            [
                "w2 rollout:short -> rollout:long",
                "w1 rollout:middle -> rollout:long",
                "w2 rollout:long -> train",
            ],
        ),
        (
            "the only engine has nobody to stand in for it",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("middle"))],
            allocation(1, long=1),
            ["w1 rollout:middle -> rollout:long"],
        ),
        (
            "a slot that came back",
            [worker(0, CORE, TRAIN), worker(1, ROLLOUT), worker(2, ROLLOUT, engine("short"))],
            allocation(1, short=1, long=1),
            ["w1 idle -> rollout:long"],
        ),
        (
            "what is idle starts first, and as the longest engine: that takes nobody's device",
            [worker(0, CORE, TRAIN), worker(1, HYBRID, TRAIN), worker(2, ROLLOUT)],
            allocation(1, short=1, long=1),
            ["w2 idle -> rollout:long", "w1 train -> rollout:short"],
        ),
        (
            "also where it is to train",
            [worker(0, CORE, TRAIN), worker(1, CORE), worker(2, HYBRID, TRAIN), worker(3, ROLLOUT, engine("long"))],
            allocation(2, short=1, long=1),
            ["w1 idle -> train", "w2 train -> rollout:short"],
        ),
        ("nothing to do", [worker(0, CORE, TRAIN), worker(1, HYBRID, engine("long"))], allocation(1, long=1), []),
    ],
)
def test_moves(name: str, workers: list[Worker], wanted: Allocation, moves: list[str]) -> None:
    assert [f"{move.worker} {move}" for move in assign(workers, wanted, HOLD_ALL)] == moves, name


@pytest.mark.parametrize(
    ("workers", "wanted", "message"),
    [
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(2, long=1), "2 replicas are wanted, but only 1"),
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(1, long=2), "2 engines are wanted, but 1 workers"),
        ([worker(0, CORE), worker(1, CORE)], allocation(1, long=1), "1 engines are wanted, but 1 workers"),
        ([worker(0, CORE), worker(1, ROLLOUT), worker(2, ROLLOUT)], allocation(1, long=1), "1 engines are wanted, but"),
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(1, short=1), "no engine of train 1 | short 1 <= 100 holds"),
    ],
)
def test_what_the_workers_cannot_do_is_refused(workers: list[Worker], wanted: Allocation, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        assign(workers, wanted, HOLD_ALL)


OBSTACLES = [
    ("the last core replica", [worker(0, CORE, TRAIN), worker(1, HYBRID, TRAIN)], ("w0", TRAIN), "last core replica"),
    ("a hybrid leaves", [worker(0, CORE, TRAIN), worker(1, HYBRID, TRAIN)], ("w1", engine("long")), None),
    ("others hold them", [worker(0, ROLLOUT, engine("long")), worker(1, HYBRID, engine("long"))], ("w1", TRAIN), None),
    (
        "the last that holds them leaves",
        [worker(0, CORE, TRAIN), worker(1, HYBRID, engine("long")), worker(2, ROLLOUT, engine("short"))],
        ("w1", TRAIN),
        "w1 is the last engine for the longest contexts",
    ),
    (
        "the last that holds them starts again while others run",
        [worker(0, CORE, TRAIN), worker(1, HYBRID, engine("long")), worker(2, ROLLOUT, engine("short"))],
        ("w1", engine("middle")),
        "no other engine holds the longest contexts while w1 starts again",
    ),
    ("there is no other", [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("long"))], ("w1", engine("middle")), None),
    (
        "nobody holds them any more",
        [worker(0, CORE, TRAIN), worker(1, ROLLOUT, engine("short")), worker(2, ROLLOUT)],
        ("w1", engine("long")),
        None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "to", "reason"), [row[1:] for row in OBSTACLES], ids=[row[0] for row in OBSTACLES])
def test_obstacles(workers: list[Worker], to: tuple[str, Duty], reason: str | None) -> None:
    name, duty = to
    move = Move(name, next(w for w in workers if w.id == name).duty, duty)
    found = obstacle(workers, move, HOLD_ALL)
    assert found is None if reason is None else found is not None and reason in found


PLANNED = Allocation(1, (Bucket("short", 2, 0, 40), Bucket("middle", 1, 40, 80), Bucket("long", 1, 80, 160)))


@pytest.mark.parametrize(
    ("name", "duties", "wanted"),
    [
        ("as planned", [TRAIN, *map(engine, ["short", "short", "middle", "long"])], PLANNED),
        (
            "fewer engines",
            [TRAIN, *map(engine, ["short", "middle", "long"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("middle", 1, 40, 80), Bucket("long", 1, 80, 160))),
        ),
        (
            "an empty bucket's range belongs to the next longer one",
            [TRAIN, *map(engine, ["short", "long"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160))),
        ),
        (
            "the first range too",
            [TRAIN, engine("long")],
            Allocation(1, (Bucket("long", 1, 0, 160),)),
        ),
        (
            "the last range belongs to whoever is left",
            [TRAIN, *map(engine, ["short", "middle"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("middle", 1, 40, 160))),
        ),
        (
            "a shape that the plan does not know has no bucket yet",
            [TRAIN, TRAIN, *map(engine, ["short", "other"])],
            Allocation(2, (Bucket("short", 1, 0, 160),)),
        ),
        ("nothing generates", [TRAIN, Duty(Role.DRAINING), Duty(Role.JOINING)], None),
        ("nothing trains", [Duty(Role.JOINING), engine("long")], None),
        ("the failed do not count", [TRAIN, Duty(Role.FAILED)], None),
    ],
)
def test_what_the_workers_really_do(name: str, duties: list[Duty], wanted: Allocation | None) -> None:
    assert current_allocation(duties, bucket_limits([PLANNED]), longest_context=160) == wanted, name


def test_between_two_plans_engines_of_both_have_a_bucket() -> None:
    new = Allocation(1, (Bucket("middle", 2, 0, 60), Bucket("other", 1, 60, 160)))

    def buckets(*shapes: str) -> list[tuple[str, int]]:
        found = current_allocation([TRAIN, *map(engine, shapes)], bucket_limits([new, PLANNED]), longest_context=160)
        assert found is not None
        return [(bucket.shape, bucket.up_to) for bucket in found.buckets]

    assert buckets("short", "middle", "long") == [("short", 40), ("middle", 60), ("long", 160)]
    assert buckets("short", "middle", "other") == [("short", 40), ("middle", 60), ("other", 160)]
    # Both end at the longest context: the new one's bucket stays.
    assert buckets("short", "other", "long") == [("short", 40), ("other", 160)]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ([CORE, HYBRID, ROLLOUT, ROLLOUT, ROLLOUT], allocation(2, short=1, long=2)),
        ([CORE, HYBRID, ROLLOUT, ROLLOUT], allocation(2, short=1, long=1)),
        ([CORE, HYBRID, ROLLOUT, ROLLOUT, ROLLOUT, ROLLOUT], allocation(2, short=1, long=3)),
        ([CORE, HYBRID], Allocation(1, (Bucket("long", 1, 0, 200),))),
        ([CORE, ROLLOUT, ROLLOUT], allocation(1, short=1, long=1)),
    ],
)
def test_an_allocation_is_fitted_to_who_is_left(kinds: list[frozenset[Role]], wanted: Allocation) -> None:
    workers = [worker(slot, kind) for slot, kind in enumerate(kinds)]
    assert fitted(allocation(2, short=1, long=2), workers) == wanted
    assert totals(after(workers, assign(workers, wanted, HOLD_ALL))) == wanted_totals(wanted)


@pytest.mark.parametrize(
    ("kinds", "message"), [([CORE], "for a rollout engine"), ([ROLLOUT, ROLLOUT], "for training"), ([], "engine")]
)
def test_nobody_is_left_to_generate_or_to_train(kinds: list[frozenset[Role]], message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        fitted(allocation(1, long=1), [worker(slot, kind) for slot, kind in enumerate(kinds)])


def test_describe() -> None:
    assert describe(PLANNED) == "train 1 | short 2 <= 40 | middle 1 <= 80 | long 1 <= 160"
    assert describe(Allocation(2, ())) == "train 2"
