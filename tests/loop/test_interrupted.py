"""In which allocation an interrupted run goes on."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from libra.exec.journal import JournalReplay
from libra.exec.pool import make_pool
from libra.loop.checkpoint import allocation_in_force
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import TRAIN, Duty, Role

HOLDS = {"short": 40, "middle": 100, "long": 100}
WORKERS = make_pool(1, 1, 2).all()
SHORT, MIDDLE, LONG = (Duty(Role.ROLLOUT, shape) for shape in HOLDS)
FIRST = Allocation(1, (Bucket("short", 2, 0, 40), Bucket("long", 1, 40, 100)))
OTHER = Allocation(1, (Bucket("short", 2, 0, 30), Bucket("middle", 1, 30, 100)))


def left(*duties: Duty, plans: tuple[Allocation, ...] = (FIRST,)) -> JournalReplay:
    worked = {worker.id: duty for worker, duty in zip(WORKERS, (TRAIN, *duties), strict=False)}
    return JournalReplay(7, MappingProxyType({}), MappingProxyType({}), MappingProxyType(worked), plans)


def allocation(replicas: int, *buckets: tuple[str, int, int]) -> Allocation:
    made: list[Bucket] = []
    for shape, engines, up_to in buckets:
        made.append(Bucket(shape, engines, made[-1].up_to if made else 0, up_to))
    return Allocation(replicas, tuple(made))


CASES = [
    ("as it was", left(SHORT, SHORT, LONG), FIRST),
    ("a plan that was applied", left(TRAIN, SHORT, LONG), allocation(2, ("short", 1, 40), ("long", 1, 100))),
    (
        "in the middle of one: both kinds of engines for the longest contexts become one",
        left(SHORT, MIDDLE, LONG, plans=(OTHER, FIRST)),
        allocation(1, ("short", 1, 30), ("middle", 2, 100)),
    ),
    (
        "a slot that was lost in an earlier plan does what it did, and has a bucket again",
        left(SHORT, SHORT, LONG, plans=(allocation(1, ("short", 2, 100)),)),
        allocation(1, ("short", 2, 40), ("long", 1, 100)),
    ),
    ("nobody knows what all did", left(SHORT, SHORT), None),
    ("there are other shapes now", left(SHORT, SHORT, Duty(Role.ROLLOUT, "huge")), None),
    ("nobody holds the longest contexts now", left(SHORT, SHORT, SHORT), None),
]


@pytest.mark.parametrize(("before", "wanted"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_the_allocation_in_force(before: JournalReplay, wanted: Allocation | None) -> None:
    assert allocation_in_force(before, WORKERS, HOLDS) == wanted
