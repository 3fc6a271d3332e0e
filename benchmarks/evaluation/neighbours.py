"""Allocations that differ from a given one by one step.

Invariant: each fits the problem, differs from the given one, and comes once. No device that a change frees is left
idle where training or another bucket could take it, but for the neighbours that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.price import devices_used, infeasibility, training_option
from libra.plan.problem import Problem, TrainingOption


@dataclass(frozen=True, slots=True)
class Neighbour:
    """`what` says the change in words."""

    what: str
    allocation: Allocation


def neighbours(problem: Problem, allocation: Allocation) -> tuple[Neighbour, ...]:
    """One engine more or less in each bucket; training on the next number of devices of the menu that is worth it, up
    or down; and each limit between two buckets at the next longest context of a class, up or down.

    Devices that are needed come from those that idle, from training, or from one other bucket; those that become free
    go there, or idle: each way is a neighbour. Raises ValueError where the allocation does not fit the problem.
    """
    reason = infeasibility(problem, allocation)
    if reason is not None:
        raise ValueError(f"an allocation that does not fit has no neighbours: {reason}")
    found: dict[Allocation, Neighbour] = {}
    here = _Here(problem, allocation)
    for neighbour in (*here.engines(), *here.training(), *here.limits()):
        other = neighbour.allocation
        if other != allocation and other not in found and infeasibility(problem, other) is None:
            found[other] = neighbour
    return tuple(found.values())


class _Here:
    def __init__(self, problem: Problem, allocation: Allocation) -> None:
        option = training_option(problem, allocation)
        assert option is not None  # it fits
        self._problem, self._allocation, self._option = problem, allocation, option
        self._counts = [bucket.engines for bucket in allocation.buckets]
        footprints = [problem.footprint(bucket.shape) for bucket in allocation.buckets]
        self._pools, self._sizes = [it[0] for it in footprints], [it[1] for it in footprints]
        used = devices_used(problem, allocation)
        self._idle = {
            pool.name: pool.devices - (max(used[pool.name]) if problem.colocated else sum(used[pool.name]))
            for pool in problem.pools
        }

    def engines(self) -> Iterator[Neighbour]:
        for at, (size, pool) in enumerate(zip(self._sizes, self._pools, strict=True)):
            for change in (-1, 1):
                counts = list(self._counts)
                counts[at] += change
                what = f"{change:+d} engine in bucket {at}"
                yield from self._balanced(what, self._option, counts, pool, self._idle[pool] - change * size, at)

    def training(self) -> Iterator[Neighbour]:
        pool, devices = self._option.pool, self._option.devices
        # Only numbers of devices that are worth it: no smaller number trains as fast.
        sizes = {option.devices for option in self._problem.training if option.pool == pool}
        worth = [option for size in sorted(sizes) if (option := self._fastest(size)) and option.devices == size]
        fewer = [option for option in worth if option.devices < devices]
        more = [option for option in worth if option.devices > devices]
        for option in (*fewer[-1:], *more[:1]):
            size = option.devices
            left = self._idle[pool] if self._problem.colocated else self._idle[pool] - size + devices
            yield from self._balanced(f"train on {size} devices", option, self._counts, pool, left, None)

    def limits(self) -> Iterator[Neighbour]:
        peaks = sorted(set(self._problem.peaks))
        buckets = self._allocation.buckets
        for at, (shorter, longer) in enumerate(pairwise(buckets)):
            below = [peak for peak in peaks if shorter.above < peak < shorter.up_to]
            above = [peak for peak in peaks if shorter.up_to < peak < longer.up_to]
            for limit in (*below[-1:], *above[:1]):
                moved = (replace(shorter, up_to=limit), replace(longer, above=limit))
                changed = (*buckets[:at], *moved, *buckets[at + 2 :])
                yield Neighbour(f"bucket {at} up to {limit:,}", replace(self._allocation, buckets=changed))

    def _balanced(
        self, what: str, option: TrainingOption, counts: Sequence[int], pool: str, left: int, changed: int | None
    ) -> Iterator[Neighbour]:
        """Neighbours with `left` devices of the pool idle, or missing if negative. One part at a time gives or takes
        them."""
        if left >= 0:
            yield from self._made(what, option, counts)
        if changed is not None and pool == option.pool and not self._problem.colocated:
            other = self._fastest(option.devices + left)
            if other is not None:
                yield from self._made(f"{what}, training on {other.devices}", other, counts)
        for at, (size, its) in enumerate(zip(self._sizes, self._pools, strict=True)):
            if at != changed and its == pool and left // size:  # rounds down: what is needed is covered
                others = [count + (left // size if at == number else 0) for number, count in enumerate(counts)]
                yield from self._made(f"{what}, {left // size:+d} in bucket {at}", option, others)

    def _made(self, what: str, option: TrainingOption, counts: Sequence[int]) -> Iterator[Neighbour]:
        if min(counts) >= 1:
            buckets: tuple[Bucket, ...] = tuple(
                replace(bucket, engines=count) for bucket, count in zip(self._allocation.buckets, counts, strict=True)
            )
            yield Neighbour(what, Allocation(option.replicas, buckets, option.layout))

    def _fastest(self, devices: int) -> TrainingOption | None:
        """The fastest option with at most `devices` devices, on the pool that trains."""
        pool = self._option.pool
        options = [it for it in self._problem.training if it.pool == pool and it.devices <= devices]
        return min(options, key=lambda it: (it.seconds, it.devices, it.layout), default=None)
