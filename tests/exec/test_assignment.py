"""From an allocation to workers, against every way to do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.exec.assignment import Change, assign, current_allocation, describe
from libra.exec.pool import Role, Worker
from libra.plan.problem import Allocation, Bucket

SHAPES = ("short", "middle", "long")
CORE, ROLLOUT = frozenset({Role.TRAIN}), frozenset({Role.ROLLOUT})
HYBRID = CORE | ROLLOUT

State = tuple[Role, str | None]
TRAINING: State = (Role.TRAIN, None)


def engine(shape: str) -> State:
    return Role.ROLLOUT, shape


def worker(slot: int, allowed: frozenset[Role], state: State = (Role.IDLE, None)) -> Worker:
    return Worker(f"w{slot}", slot, allowed, *state)


def allocation(replicas: int, **engines: int) -> Allocation:
    """Buckets of 100 tokens each, in the order of the shapes."""
    present = [shape for shape in SHAPES if engines.get(shape)]
    return Allocation(
        replicas, tuple(Bucket(shape, engines[shape], 100 * i, 100 * (i + 1)) for i, shape in enumerate(present))
    )


def after(workers: Sequence[Worker], changes: Sequence[Change]) -> list[Worker]:
    changed = {change.worker: change for change in changes}
    return [replace(w, role=changed[w.id].role, shape=changed[w.id].shape) if w.id in changed else w for w in workers]


def totals(states: Sequence[State]) -> Counter[State]:
    return Counter(states)


def wanted_totals(wanted: Allocation) -> Counter[State]:
    counts: Counter[State] = Counter({engine(bucket.shape): bucket.engines for bucket in wanted.buckets})
    counts[TRAINING] = wanted.replicas
    return +counts


def ways(workers: Sequence[Worker], wanted: Allocation) -> Iterator[tuple[State, ...]]:
    """Every assignment of working roles that the workers may take and that is the wanted allocation."""
    choices = [
        ([TRAINING] if Role.TRAIN in w.allowed else [])
        + ([engine(bucket.shape) for bucket in wanted.buckets] if Role.ROLLOUT in w.allowed else [])
        for w in workers
    ]
    for states in product(*choices):
        if totals(states) == wanted_totals(wanted):
            yield states


def fewest_changes(workers: Sequence[Worker], wanted: Allocation) -> int:
    return min(
        sum((w.role, w.shape) != state for w, state in zip(workers, states, strict=True))
        for states in ways(workers, wanted)
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Worker], Allocation]:
    """Up to six workers in roles that they may have, and an allocation that uses them all."""
    core, hybrid, rollout = draw(st.integers(0, 1)), draw(st.integers(0, 4)), draw(st.integers(0, 1))
    shapes_in_use = SHAPES[: draw(st.integers(1, 3))]
    engines = [*(engine(shape) for shape in shapes_in_use), (Role.IDLE, None)]
    states: dict[frozenset[Role], list[State]] = {
        CORE: [TRAINING, (Role.IDLE, None)],
        HYBRID: [*engines, TRAINING],
        ROLLOUT: engines,
    }
    kinds = draw(st.permutations([CORE] * core + [HYBRID] * hybrid + [ROLLOUT] * rollout))
    workers = [worker(slot, kind, draw(st.sampled_from(states[kind]))) for slot, kind in enumerate(kinds)]
    training = draw(st.integers(0, hybrid))
    shapes = [draw(st.sampled_from(shapes_in_use)) for _ in range(hybrid - training + rollout)]
    return workers, allocation(core + training, **Counter(shapes))


@settings(max_examples=300, deadline=None)
@given(situations())
def test_the_result_is_what_was_wanted_with_as_few_changes_as_possible(
    situation: tuple[list[Worker], Allocation],
) -> None:
    workers, wanted = situation
    changes = assign(workers, wanted)
    assert len({change.worker for change in changes}) == len(changes)
    reached = after(workers, changes)
    assert totals([(w.role, w.shape) for w in reached]) == wanted_totals(wanted)
    assert all(w.role in w.allowed for w in reached)
    assert len(changes) == fewest_changes(workers, wanted)


@settings(deadline=None)
@given(situations())
def test_nothing_changes_twice(situation: tuple[list[Worker], Allocation]) -> None:
    workers, wanted = situation
    assert assign(after(workers, assign(workers, wanted)), wanted) == ()


@pytest.mark.parametrize(
    ("name", "workers", "wanted", "changes"),
    [
        (
            "the first allocation: longer engines start first, joining comes last",
            [worker(0, CORE, TRAINING), worker(1, HYBRID), worker(2, ROLLOUT), worker(3, ROLLOUT)],
            allocation(2, short=1, long=1),
            [("w2", Role.ROLLOUT, "long"), ("w3", Role.ROLLOUT, "short"), ("w1", Role.TRAIN, None)],
        ),
        (
            "a trainer that leaves goes before the others and takes the longest engine",
            [worker(0, CORE, TRAINING), worker(1, ROLLOUT, engine("short")), worker(2, HYBRID, TRAINING)],
            allocation(1, short=1, long=1),
            [("w2", Role.ROLLOUT, "long")],
        ),
        (
            "the engine that is not needed joins the training",
            [worker(0, CORE, TRAINING), worker(1, HYBRID, engine("short")), worker(2, HYBRID, engine("long"))],
            allocation(2, short=1),
            [("w2", Role.TRAIN, None)],
        ),
        (
            "one engine too many of a shape: it, not the last of another shape, joins the training",
            [worker(0, HYBRID, engine("short")), worker(1, HYBRID, engine("long")), worker(2, HYBRID, engine("long"))],
            allocation(1, short=1, long=1),
            [("w1", Role.TRAIN, None)],
        ),
        (
            "another shape in the same slot",
            [worker(0, CORE, TRAINING), worker(1, ROLLOUT, engine("short"))],
            allocation(1, long=1),
            [("w1", Role.ROLLOUT, "long")],
        ),
        ("nothing to do", [worker(0, CORE, TRAINING), worker(1, HYBRID, TRAINING)], allocation(2), []),
    ],
)
def test_changes(
    name: str, workers: list[Worker], wanted: Allocation, changes: list[tuple[str, Role, str | None]]
) -> None:
    assert [(change.worker, change.role, change.shape) for change in assign(workers, wanted)] == changes, name


@pytest.mark.parametrize(
    ("workers", "wanted", "message"),
    [
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(2), "2 replicas are wanted, but only 1"),
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(1, short=2), "2 engines are wanted, but 1 workers"),
        ([worker(0, CORE), worker(1, CORE)], allocation(1, short=1), "1 engines are wanted, but 1 workers"),
        ([worker(0, CORE), worker(1, ROLLOUT)], allocation(1), "0 engines are wanted, but 1 workers"),
    ],
)
def test_what_the_workers_cannot_do_is_refused(workers: list[Worker], wanted: Allocation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(workers, wanted)


PLANNED = Allocation(1, (Bucket("short", 2, 0, 40), Bucket("middle", 1, 40, 80), Bucket("long", 1, 80, 160)))


@pytest.mark.parametrize(
    ("name", "states", "wanted"),
    [
        ("as planned", [TRAINING, *map(engine, ["short", "short", "middle", "long"])], PLANNED),
        (
            "fewer engines",
            [TRAINING, *map(engine, ["short", "middle", "long"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("middle", 1, 40, 80), Bucket("long", 1, 80, 160))),
        ),
        (
            "an empty bucket's range belongs to the next longer one",
            [TRAINING, *map(engine, ["short", "long"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160))),
        ),
        (
            "the first range too",
            [TRAINING, engine("long")],
            Allocation(1, (Bucket("long", 1, 0, 160),)),
        ),
        (
            "the last range belongs to whoever is left",
            [TRAINING, *map(engine, ["short", "middle"])],
            Allocation(1, (Bucket("short", 1, 0, 40), Bucket("middle", 1, 40, 160))),
        ),
        (
            "a shape that the plan does not know has no bucket yet",
            [TRAINING, TRAINING, *map(engine, ["short", "other"])],
            Allocation(2, (Bucket("short", 1, 0, 160),)),
        ),
        ("nothing generates", [TRAINING, (Role.DRAINING, "short"), (Role.JOINING, "long")], None),
        ("nothing trains", [(Role.JOINING, None), engine("long")], None),
        ("the failed do not count", [TRAINING, (Role.FAILED, "long")], None),
    ],
)
def test_what_the_workers_really_do(name: str, states: list[State], wanted: Allocation | None) -> None:
    workers = [worker(slot, HYBRID, state) for slot, state in enumerate(states)]
    assert current_allocation(workers, PLANNED, longest_context=160) == wanted, name


def test_describe() -> None:
    assert describe(PLANNED) == "train 1 | short 2 <= 40 | middle 1 <= 80 | long 1 <= 160"
    assert describe(Allocation(2, ())) == "train 2"
