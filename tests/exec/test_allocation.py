"""What workers amount to, and an allocation for those that are left."""

from __future__ import annotations

import pytest

from libra.exec.allocation import bucket_limits, current_allocation, fitted
from libra.exec.pool import Worker
from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import InfeasiblePlanError
from libra.plan.transition import IDLE, TRAIN, Duty, Role

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


@pytest.mark.parametrize(
    ("kinds", "message"), [([CORE], "for a rollout engine"), ([ROLLOUT, ROLLOUT], "for training"), ([], "engine")]
)
def test_nobody_is_left_to_generate_or_to_train(kinds: list[frozenset[Role]], message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        fitted(allocation(1, long=1), [worker(slot, kind) for slot, kind in enumerate(kinds)])
