"""The state machine of a worker: every pair of roles, and what a role change carries with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.exec.pool import (
    DEADLINES,
    LOSS_WINDOW,
    MOST_LOSSES,
    IllegalTransitionError,
    Worker,
    WorkerPool,
    bucket_limits,
    current_allocation,
    fitted,
    make_pool,
)
from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import InfeasiblePlanError
from libra.plan.transition import IDLE, TRAIN, Duty, Role

ANY = frozenset({Role.TRAIN, Role.ROLLOUT})

# Rows are the role before, columns the role after: + is legal.
TABLE = """
            idle  joining  rollout  train  draining  failed
  idle       .       +        .       .       .        +
  joining    .       .        +       +       .        +
  rollout    .       .        .       .       +        +
  train      .       .        .       .       +        +
  draining   +       .        .       .       .        +
  failed     +       .        .       .       .        +
"""


def transitions() -> list[tuple[Role, Role, bool]]:
    header, *rows = [line.split() for line in TABLE.strip().splitlines()]
    return [
        (Role(before), Role(after), mark == "+")
        for before, *marks in rows
        for after, mark in zip(header, marks, strict=True)
    ]


def test_the_table_names_every_pair() -> None:
    assert {(before, after) for before, after, _ in transitions()} == {(a, b) for a in Role for b in Role}


@pytest.mark.parametrize(("before", "after", "legal"), transitions())
def test_transitions(before: Role, after: Role, legal: bool) -> None:
    worker = Worker("w", 0, ANY, role=before, shape="short", since=1.0)
    if legal:
        assert worker.become(after, 2.0) == Worker("w", 0, ANY, role=after, shape=None, since=2.0)
    else:
        with pytest.raises(IllegalTransitionError, match=f"worker w: {before} -> {after}; legal are"):
            worker.become(after, 2.0)


@pytest.mark.parametrize("role", [Role.TRAIN, Role.ROLLOUT])
def test_a_worker_takes_only_roles_that_it_may_take(role: Role) -> None:
    other = next(iter(ANY - {role}))
    joining = Worker("w", 0, frozenset({other}), role=Role.JOINING)
    assert joining.become(other, 0.0).role is other
    with pytest.raises(IllegalTransitionError, match=f"worker w may not {role}; it may {other}"):
        joining.become(role, 0.0)


def test_an_illegal_transition_leaves_the_pool_as_it_was() -> None:
    pool = make_pool(1, 0, 0)
    with pytest.raises(IllegalTransitionError):
        pool.become("core-0", Role.TRAIN, 1.0)
    assert pool["core-0"] == Worker("core-0", 0, frozenset({Role.TRAIN}))


@pytest.mark.parametrize("most", [1, MOST_LOSSES, 50])
def test_a_slot_that_lost_its_process_is_used_again_until_it_has_lost_too_many(most: int) -> None:
    pool = make_pool(0, 1, 0, most)
    for number in range(most):
        assert not pool["hybrid-0"].retired
        assert pool.healthy() == pool.all()
        pool.become("hybrid-0", Role.JOINING, number + 0.1)
        lost = pool.lose("hybrid-0", number + 0.2)
        assert (lost.role, len(lost.losses)) == (Role.FAILED, number + 1)
        if number < most - 1:
            pool.become("hybrid-0", Role.IDLE, number + 0.2)
    assert lost.retired
    for role in set(Role) - {Role.FAILED}:
        with pytest.raises(IllegalTransitionError):
            pool.become("hybrid-0", role, 1e9)
    assert pool.healthy() == ()


def test_losses_that_are_long_ago_do_not_count() -> None:
    worker = Worker("w", 0, ANY)
    for number in range(2 * MOST_LOSSES):
        worker = worker.lose(number * LOSS_WINDOW * 0.51)
    assert worker.losses == tuple((2 * MOST_LOSSES - n) * LOSS_WINDOW * 0.51 for n in (2, 1))
    assert not worker.retired


def test_a_process_that_ends_in_a_move_that_is_undone_does_not_count() -> None:
    worker = Worker("w", 0, ANY, role=Role.JOINING)
    assert worker.become(Role.FAILED, 1.0).losses == ()


@pytest.mark.parametrize(
    ("worker", "duty", "text"),
    [
        (Worker("w", 0, ANY), IDLE, "idle"),
        (Worker("w", 0, ANY, Role.TRAIN), TRAIN, "train"),
        (Worker("w", 0, ANY, Role.ROLLOUT, "long"), Duty(Role.ROLLOUT, "long"), "rollout:long"),
        (Worker("w", 0, ANY, Role.JOINING, "long"), Duty(Role.JOINING), "joining"),
    ],
)
def test_what_a_worker_does(worker: Worker, duty: Duty, text: str) -> None:
    assert worker.duty == duty
    assert str(duty) == text


def test_the_shape_belongs_to_the_role() -> None:
    pool = make_pool(0, 0, 1)
    assert pool.become("rollout-0", Role.JOINING, 0.0, "short").shape == "short"
    assert pool.become("rollout-0", Role.ROLLOUT, 1.0, "short").shape == "short"
    assert pool.become("rollout-0", Role.DRAINING, 2.0).shape is None


@pytest.mark.parametrize(
    ("role", "waited", "overdue"),
    [
        *[(role, limit.seconds + 90.0 * limit.steps, False) for role, limit in DEADLINES.items()],
        *[(role, limit.seconds + 90.0 * limit.steps + 0.5, True) for role, limit in DEADLINES.items()],
        *[(role, 1e9, False) for role in Role if role not in DEADLINES],
    ],
)
def test_overdue(role: Role, waited: float, overdue: bool) -> None:
    worker = Worker("w", 0, ANY, role=role, since=10.0)
    assert WorkerPool([worker]).overdue(10.0 + waited, step_seconds=90.0) == ((worker,) if overdue else ())


def test_both_passing_roles_have_a_deadline() -> None:
    assert set(DEADLINES) == {Role.JOINING, Role.DRAINING}


def test_make_pool_numbers_slots_core_first() -> None:
    train, rollout = frozenset({Role.TRAIN}), frozenset({Role.ROLLOUT})
    assert make_pool(1, 2, 1).all() == (
        Worker("core-0", 0, train),
        Worker("hybrid-0", 1, ANY),
        Worker("hybrid-1", 2, ANY),
        Worker("rollout-0", 3, rollout),
    )


SHAPES = ("short", "middle", "long")
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


WITH_LENT = Allocation(
    2, (Bucket("short", 1, 0, 100), Bucket("lent", 2, 100, 150), Bucket("long", 2, 150, 200))
)  # for 2 replicas, 3 engines and 2 lent devices


@pytest.mark.parametrize(
    ("own", "lent", "wanted"),
    [
        (5, 2, WITH_LENT),
        (5, 1, replace(WITH_LENT, buckets=(WITH_LENT.buckets[0], Bucket("lent", 1, 100, 150), WITH_LENT.buckets[2]))),
        (5, 0, replace(WITH_LENT, buckets=(WITH_LENT.buckets[0], Bucket("long", 2, 100, 200)))),
        (4, 2, replace(WITH_LENT, buckets=(*WITH_LENT.buckets[:2], Bucket("long", 1, 150, 200)))),
        (3, 2, Allocation(2, (Bucket("lent", 2, 0, 150), Bucket("long", 1, 150, 200)))),
    ],
)
def test_a_lent_device_is_no_substitute_for_one_of_ones_own(own: int, lent: int, wanted: Allocation) -> None:
    kinds = [CORE, HYBRID, ROLLOUT, ROLLOUT, ROLLOUT][:own]
    workers = [worker(slot, kind) for slot, kind in enumerate(kinds)]
    workers += [replace(worker(own + slot, ROLLOUT), lent="lent") for slot in range(lent)]
    assert fitted(WITH_LENT, workers, {"lent"}) == wanted


def test_lent_devices_are_the_last_of_the_pool() -> None:
    pool = make_pool(1, 0, 1, lent=2, lent_shape="lent")
    assert [(it.id, it.slot, it.device.lent) for it in pool.all()] == [
        ("core-0", 0, None),
        ("rollout-0", 1, None),
        ("lent-0", 2, "lent"),
        ("lent-1", 3, "lent"),
    ]
    assert pool.lent_shapes() == {"lent"}


@pytest.mark.parametrize(
    ("kinds", "message"), [([CORE], "for a rollout engine"), ([ROLLOUT, ROLLOUT], "for training"), ([], "engine")]
)
def test_nobody_is_left_to_generate_or_to_train(kinds: list[frozenset[Role]], message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        fitted(allocation(1, long=1), [worker(slot, kind) for slot, kind in enumerate(kinds)])
