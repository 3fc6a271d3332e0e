"""From one allocation to another: moves of a machine's devices against every way to do it, and groups of a cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_problem import problem_of
from tables import by_name

from libra.plan.allocation import Allocation, Bucket
from libra.plan.placement import place
from libra.plan.problem import EngineOption, Pool, TrainingOption
from libra.plan.transition import (
    IDLE,
    TRAIN,
    Device,
    Duty,
    Move,
    Role,
    device_transition,
    group_transition,
    unsafe,
)

SHAPES = ("short", "middle", "long")
ORDER = ("short", "lent", "middle", "long")  # of buckets; one shape runs on lent devices, and nowhere else
HOLD_ALL = frozenset({"middle", "long"})  # the shapes that hold the longest contexts
CORE, ROLLOUT = frozenset({Role.TRAIN}), frozenset({Role.ROLLOUT})
HYBRID = CORE | ROLLOUT


def engine(shape: str) -> Duty:
    return Duty(Role.ROLLOUT, shape)


def device(slot: int, allowed: frozenset[Role], duty: Duty = IDLE) -> Device:
    return Device(f"w{slot}", slot, allowed, duty)


def lent(slot: int, duty: Duty = IDLE) -> Device:
    return Device(f"w{slot}", slot, ROLLOUT, duty, "lent")


def suits(w: Device, duty: Duty) -> bool:
    """Whether a device may have the duty."""
    return duty.role in w.allowed and (duty.shape == "lent") == (w.lent is not None)


def allocation(replicas: int, **engines: int) -> Allocation:
    """Buckets of 100 tokens each, in the order of the shapes."""
    present = [shape for shape in ORDER if engines.get(shape)]
    return Allocation(
        replicas, tuple(Bucket(shape, engines[shape], 100 * i, 100 * (i + 1)) for i, shape in enumerate(present))
    )


def moves_to(workers: Sequence[Device], wanted: Allocation) -> tuple[Move, ...]:
    return device_transition(workers, None, wanted, HOLD_ALL).moves


def moved(workers: Sequence[Device], move: Move) -> tuple[Device, ...]:
    return tuple(replace(w, duty=move.after) if w.id == move.worker else w for w in workers)


def after(workers: Sequence[Device], moves: Iterable[Move]) -> tuple[Device, ...]:
    state = tuple(workers)
    for move in moves:
        state = moved(state, move)
    return state


def wanted_totals(wanted: Allocation) -> Counter[Duty]:
    counts: Counter[Duty] = Counter({engine(bucket.shape): bucket.engines for bucket in wanted.buckets})
    counts[TRAIN] = wanted.replicas
    return +counts


def totals(workers: Iterable[Device]) -> Counter[Duty]:
    return Counter(w.duty for w in workers)


def concerned(workers: Iterable[Device], wanted: Allocation) -> list[Device]:
    """All but engines on lent devices that are not wanted: they stay as they are."""
    return [w for w in workers if w.lent is None or wanted.engines_by_shape[w.lent]]


def ways(workers: Sequence[Device], wanted: Allocation) -> Iterator[tuple[Duty, ...]]:
    """Every assignment of duties that the workers may take and that is the wanted allocation."""
    duties_there_are = [TRAIN, *(engine(bucket.shape) for bucket in wanted.buckets)]
    choices = [[duty for duty in duties_there_are if suits(w, duty)] for w in workers]
    for duties in product(*choices):
        if Counter(duties) == wanted_totals(wanted):
            yield duties


def fewest_changes(workers: Sequence[Device], wanted: Allocation) -> int:
    return min(sum(w.duty != duty for w, duty in zip(workers, duties, strict=True)) for duties in ways(workers, wanted))


def leaves_a_gap(workers: Sequence[Device], move: Move) -> bool:
    """Whether nobody holds the longest contexts while the worker moves, though somebody did before."""

    def holds(w: Device) -> bool:
        return w.duty.role is Role.ROLLOUT and w.duty.shape in HOLD_ALL

    return any(map(holds, workers)) and not any(holds(w) for w in workers if w.id != move.worker)


def shortest_way_without_a_gap(workers: Sequence[Device], wanted: Allocation) -> int:
    """By breadth-first search over all that the workers may be."""
    goal = wanted_totals(wanted)
    duties = [TRAIN, *(engine(shape) for shape in ORDER)]
    seen, queue = {tuple(w.duty for w in workers)}, deque([(tuple(workers), 0)])
    while queue:
        state, length = queue.popleft()
        if totals(concerned(state, wanted)) == goal:
            return length
        for w, duty in product(state, duties):
            move = Move(w.id, w.duty, duty)
            if not suits(w, duty) or duty == w.duty or leaves_a_gap(state, move):
                continue
            following = moved(state, move)
            key = tuple(each.duty for each in following)
            if key not in seen:
                seen.add(key)
                queue.append((following, length + 1))
    raise AssertionError("the wanted allocation cannot be reached")


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Device], Allocation]:
    """Up to five workers of one's own and two on lent devices, with duties that they may have, and an allocation that
    uses them all."""
    core, hybrid, rollout = draw(st.integers(0, 1)), draw(st.integers(0, 3)), draw(st.integers(0, 1))
    if hybrid + rollout == 0:
        rollout = 1
    engines = [*(engine(shape) for shape in SHAPES), IDLE]
    duties: dict[frozenset[Role], list[Duty]] = {CORE: [TRAIN, IDLE], HYBRID: [*engines, TRAIN], ROLLOUT: engines}
    kinds = draw(st.permutations([CORE] * core + [HYBRID] * hybrid + [ROLLOUT] * rollout))
    workers = [device(slot, kind, draw(st.sampled_from(duties[kind]))) for slot, kind in enumerate(kinds)]
    borrowed, used = draw(st.integers(0, 2)), draw(st.booleans())
    workers += [lent(len(kinds) + slot, draw(st.sampled_from([engine("lent"), IDLE]))) for slot in range(borrowed)]
    training = draw(st.integers(0, hybrid - (rollout == 0)))
    others = hybrid - training + rollout - 1
    shapes = [draw(st.sampled_from(sorted(HOLD_ALL))), *(draw(st.sampled_from(SHAPES)) for _ in range(others))]
    return workers, allocation(core + training, **Counter(shapes), lent=borrowed if used else 0)


@settings(max_examples=300, deadline=None)
@given(situations())
def test_the_result_is_what_was_wanted_and_nobody_is_without_need(situation: tuple[list[Device], Allocation]) -> None:
    workers, wanted = situation
    moves = moves_to(workers, wanted)
    state = tuple(workers)
    for move in moves:
        assert next(w for w in state if w.id == move.worker).duty == move.before != move.after
        assert unsafe(state, move, HOLD_ALL) is None
        if sum(w.duty.role is Role.ROLLOUT and w.lent is None for w in workers) > 1:
            assert not leaves_a_gap(state, move)
        state = moved(state, move)
    assert totals(concerned(state, wanted)) == wanted_totals(wanted)
    assert all(suits(w, w.duty) for w in concerned(state, wanted))


@settings(max_examples=100, deadline=None)
@given(situations())
def test_no_more_moves_than_have_to_be(situation: tuple[list[Device], Allocation]) -> None:
    workers, wanted = situation
    moves = moves_to(workers, wanted)
    workers = concerned(workers, wanted)
    if sum(w.duty.role is Role.ROLLOUT and w.lent is None for w in workers) > 1:
        assert len(moves) == shortest_way_without_a_gap(workers, wanted)
    else:
        assert len(moves) == fewest_changes(workers, wanted)


@settings(deadline=None)
@given(situations())
def test_nothing_changes_twice(situation: tuple[list[Device], Allocation]) -> None:
    workers, wanted = situation
    assert moves_to(after(workers, moves_to(workers, wanted)), wanted) == ()


@pytest.mark.parametrize(
    ("name", "workers", "wanted", "moves"),
    [
        (
            "the first allocation: longer engines start first, joining comes last",
            [device(0, CORE, TRAIN), device(1, HYBRID), device(2, ROLLOUT), device(3, ROLLOUT)],
            allocation(2, short=1, long=1),
            ["w2 idle -> rollout:long", "w3 idle -> rollout:short", "w1 idle -> train"],
        ),
        (
            "a trainer that leaves goes before the others and takes the longest engine",
            [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("short")), device(2, HYBRID, TRAIN)],
            allocation(1, short=1, long=1),
            ["w2 train -> rollout:long"],
        ),
        (
            "the engine that is not needed joins the training",
            [device(0, CORE, TRAIN), device(1, HYBRID, engine("short")), device(2, HYBRID, engine("long"))],
            allocation(2, long=1),
            ["w1 rollout:short -> train"],
        ),
        (
            "one engine too many of a shape: it, not the last of another shape, joins the training",
            [device(0, HYBRID, engine("short")), device(1, HYBRID, engine("long")), device(2, HYBRID, engine("long"))],
            allocation(1, short=1, long=1),
            ["w1 rollout:long -> train"],
        ),
        (
            "another shape in the same slot",
            [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("short"))],
            allocation(1, long=1),
            ["w1 rollout:short -> rollout:long"],
        ),
        (
            "who holds the longest contexts waits until somebody else does",
            [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("middle")), device(2, ROLLOUT, engine("short"))],
            allocation(1, short=1, long=1),
            ["w2 rollout:short -> rollout:long", "w1 rollout:middle -> rollout:short"],
        ),
        (
            "also where the other one is to train",
            [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("middle")), device(2, HYBRID, engine("short"))],
            allocation(2, long=1),
            [
                "w2 rollout:short -> rollout:long",
                "w1 rollout:middle -> rollout:long",
                "w2 rollout:long -> train",
            ],
        ),
        (
            "but one that stays an engine stands in before one that is to train",
            [
                device(0, CORE, TRAIN),
                device(1, ROLLOUT, engine("middle")),
                device(2, HYBRID, engine("short")),
                device(3, ROLLOUT, engine("short")),
            ],
            allocation(2, short=1, long=1),
            ["w3 rollout:short -> rollout:long", "w1 rollout:middle -> rollout:short", "w2 rollout:short -> train"],
        ),
        (
            "the only engine has nobody to stand in for it",
            [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("middle"))],
            allocation(1, long=1),
            ["w1 rollout:middle -> rollout:long"],
        ),
        (
            "a slot that came back",
            [device(0, CORE, TRAIN), device(1, ROLLOUT), device(2, ROLLOUT, engine("short"))],
            allocation(1, short=1, long=1),
            ["w1 idle -> rollout:long"],
        ),
        (
            "what is idle starts first, and as the longest engine: that takes nobody's device",
            [device(0, CORE, TRAIN), device(1, HYBRID, TRAIN), device(2, ROLLOUT)],
            allocation(1, short=1, long=1),
            ["w2 idle -> rollout:long", "w1 train -> rollout:short"],
        ),
        (
            "also where it is to train",
            [device(0, CORE, TRAIN), device(1, CORE), device(2, HYBRID, TRAIN), device(3, ROLLOUT, engine("long"))],
            allocation(2, short=1, long=1),
            ["w1 idle -> train", "w2 train -> rollout:short"],
        ),
        ("nothing to do", [device(0, CORE, TRAIN), device(1, HYBRID, engine("long"))], allocation(1, long=1), []),
    ],
)
def test_moves(name: str, workers: list[Device], wanted: Allocation, moves: list[str]) -> None:
    assert [f"{move.worker} {move}" for move in moves_to(workers, wanted)] == moves, name


@pytest.mark.parametrize(
    ("workers", "wanted", "message"),
    [
        ([device(0, CORE), device(1, ROLLOUT)], allocation(2, long=1), "2 replicas are wanted, but only 1"),
        ([device(0, CORE), device(1, ROLLOUT)], allocation(1, long=2), "2 engines are wanted, but 1 workers"),
        ([device(0, CORE), device(1, CORE)], allocation(1, long=1), "1 engines are wanted, but 1 workers"),
        ([device(0, CORE), device(1, ROLLOUT), device(2, ROLLOUT)], allocation(1, long=1), "1 engines are wanted, but"),
        ([device(0, CORE), device(1, CORE), device(2, ROLLOUT)], allocation(1, long=2), "2 engines are wanted"),
        ([device(0, CORE), device(1, ROLLOUT)], allocation(1, short=1), "no engine of train 1 | short 1 <= 100 holds"),
    ],
)
def test_what_the_workers_cannot_do_is_refused(workers: list[Device], wanted: Allocation, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        moves_to(workers, wanted)


UNSAFE = [
    ("the last core replica", [device(0, CORE, TRAIN), device(1, HYBRID, TRAIN)], ("w0", TRAIN), "last core replica"),
    ("a hybrid leaves", [device(0, CORE, TRAIN), device(1, HYBRID, TRAIN)], ("w1", engine("long")), None),
    ("others hold them", [device(0, ROLLOUT, engine("long")), device(1, HYBRID, engine("long"))], ("w1", TRAIN), None),
    ("the last that holds them leaves",
     [device(0, CORE, TRAIN), device(1, HYBRID, engine("long")), device(2, ROLLOUT, engine("short"))], ("w1", TRAIN),
     "w1 is the last engine for the longest contexts"),
    ("the last that holds them starts again while others run",
     [device(0, CORE, TRAIN), device(1, HYBRID, engine("long")), device(2, ROLLOUT, engine("short"))],
     ("w1", engine("middle")), "no other engine holds the longest contexts while w1 starts again"),
    ("there is no other", [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("long"))], ("w1", engine("middle")), None),
    ("nobody holds them any more", [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("short")), device(2, ROLLOUT)],
     ("w1", engine("long")), None),
]  # fmt: skip


@by_name("workers, to, reason", UNSAFE)
def test_unsafe_moves(workers: list[Device], to: tuple[str, Duty], reason: str | None) -> None:
    name, duty = to
    move = Move(name, next(w for w in workers if w.id == name).duty, duty)
    found = unsafe(workers, move, HOLD_ALL)
    assert found is None if reason is None else found is not None and reason in found


def test_a_transition_reads_as_text() -> None:
    before, wanted = allocation(3, short=1, long=1), allocation(1, short=1, long=3)
    workers = [device(0, CORE, TRAIN), device(1, HYBRID, TRAIN), device(2, HYBRID, TRAIN)]
    workers += [device(3, ROLLOUT, engine("short")), device(4, ROLLOUT, engine("long"))]
    assert device_transition(workers, before, wanted, HOLD_ALL).words() == ("2 x train -> rollout:long",)
    moved_cut = replace(before, buckets=(Bucket("short", 1, 0, 50), Bucket("long", 1, 50, 200)))
    assert device_transition(workers, before, moved_cut, HOLD_ALL).words() == ("new bucket ranges",)
    assert device_transition(workers, None, before, HOLD_ALL).words() == ("new bucket ranges",)


CONFLICTS = [
    ("as planned", {"w0": TRAIN, "w1": engine("short")}, None),
    ("another worker is gone", {"w0": TRAIN}, "there is no worker w1"),
    (
        "it does something else",
        {"w0": TRAIN, "w1": engine("middle")},
        "the duty of w1 is rollout:middle, not rollout:short",
    ),
    ("one more is there", {"w0": TRAIN, "w1": engine("short"), "w2": TRAIN}, "do not lead to train 1 | long 1 <= 100"),
    ("one more is idle", {"w0": TRAIN, "w1": engine("short"), "w2": IDLE}, None),
]


@by_name("duties, conflict", CONFLICTS)
def test_moves_are_for_the_workers_that_they_were_planned_for(duties: dict[str, Duty], conflict: str | None) -> None:
    workers = [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("short"))]
    found = device_transition(workers, None, allocation(1, long=1), HOLD_ALL).conflict(duties)
    assert found is None if conflict is None else found is not None and conflict in found


@pytest.mark.parametrize(("role", "shape"), [(Role.ROLLOUT, None), (Role.IDLE, "long"), (Role.JOINING, "long")])
def test_a_duty_has_a_shape_where_there_is_something_to_have_one(role: Role, shape: str | None) -> None:
    with pytest.raises(ValueError, match="shape"):
        Duty(role, shape)


def test_a_group_that_is_displaced_starts_again() -> None:
    """Two nodes of four GPUs with an engine of one on each: a replica of four takes a node, so one of them moves."""
    problem = problem_of(
        pools=(Pool("p", 2, 4),),
        engines=(EngineOption("tp1", "p", 1, 4, 100, 0.0, ((1.0,),), (0.0,), (0.0,)),),
        training=(TrainingOption("a", "p", 2, 1, 1.0, 0.0), TrainingOption("b", "p", 4, 1, 1.0, 0.0)),
        peaks=(100,),
    )
    before, wanted = (Allocation(1, (Bucket("tp1", 3, 0, 100),), layout) for layout in "ab")
    placed = place(problem, before)
    spread = tuple(
        replace(group, nodes=(index % 2,), gpus=(3 - index // 2,)) if group.role == "generate" else group
        for index, group in enumerate(placed)
    )
    found = group_transition(before, wanted, spread, place(problem, wanted, spread))
    stopped = [move.before for move in found.moves if move.after == IDLE]
    assert Duty(Role.TRAIN, "a") in stopped and Duty(Role.ROLLOUT, "tp1") in stopped
    assert Counter(stopped) - Counter({Duty(Role.TRAIN, "a"): 1}) == Counter(
        move.after for move in found.moves if move.after.role is Role.ROLLOUT
    )
    assert group_transition(before, before, spread, place(problem, before, spread)).moves == ()
    # Where groups are is not known: those of a kind that goes on are taken to stay.
    assert group_transition(before, wanted).words() == ("train:a -> idle", "idle -> train:b")


@pytest.mark.parametrize("wanted", [1, 3])
def test_an_allocation_has_an_engine_for_each_lent_device(wanted: int) -> None:
    workers = [device(0, CORE, TRAIN), device(1, ROLLOUT, engine("long")), *(lent(2 + n) for n in range(2))]
    for _ in range(wanted - 2):
        workers.append(device(len(workers), ROLLOUT))
    with pytest.raises(ValueError, match="engines"):
        device_transition(workers, None, allocation(1, long=1, lent=wanted), HOLD_ALL)
