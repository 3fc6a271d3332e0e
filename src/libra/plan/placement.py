"""Placement of training replicas and engines on GPUs of nodes.

Invariant: a group inside a node takes an aligned block of its GPUs, and a larger group takes whole nodes. No GPU has
two roles at once. If sizes in a pool divide each other (one, two, four, ... a node, whole nodes), groups that fit by
count also fit in place. A placed group stays unless a larger group needs its block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from libra.plan.allocation import Allocation
from libra.plan.options.menu import PairHalf, PrefillDecodePair
from libra.plan.options.price import training_option
from libra.plan.problem import Pool, Problem

Role = Literal["train", "generate", "prefill", "decode"]  # the last two: of a prefill/decode pair


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The GPUs of one training replica or one engine."""

    role: Role
    name: str  # layout of the replica, or shape of the engine
    bucket: int | None  # position in the allocation's buckets; None for a replica
    pool: str
    nodes: tuple[int, ...]  # counted from 0 within the pool
    gpus: tuple[int, ...]  # on each of these nodes

    @property
    def kind(self) -> tuple[bool, str]:
        """Kind of the group. Groups of one kind are interchangeable: the router can move an engine to another bucket,
        or another role of a pair, on the same GPUs.
        """
        return self.role == "train", self.name

    @property
    def devices(self) -> int:
        return len(self.nodes) * len(self.gpus)


@dataclass(frozen=True, slots=True)
class _Wanted:
    role: Role
    name: str
    bucket: int | None
    devices: int

    @property
    def kind(self) -> tuple[bool, str]:
        return self.role == "train", self.name


def place(
    problem: Problem,
    allocation: Allocation,
    current: Sequence[DeviceGroup] = (),
    pairs: Sequence[PrefillDecodePair] = (),
) -> tuple[DeviceGroup, ...]:
    """Place replicas, then the engines of each bucket; for shapes in `pairs`, the engines of both halves. Groups of
    `current` stay in place if possible. In colocated training, replicas and engines are placed separately, each on the
    whole pool. Raises ValueError if a group's size neither divides its node nor is a number of whole nodes.
    """
    training = training_option(problem, allocation)
    if training is None:
        raise ValueError(f"no option trains {allocation.replicas} replicas as {allocation.layout!r}; plan again")
    wanted: dict[tuple[str, Role], list[_Wanted]] = {}
    size = training.devices // training.replicas
    replicas = [_Wanted("train", training.layout, None, size)] * training.replicas
    wanted.setdefault((training.pool, "train" if problem.colocated else "generate"), []).extend(replicas)
    paired = {pair.shape: pair for pair in pairs}
    for index, bucket in enumerate(allocation.buckets):
        if bucket.shape in paired:
            pair = paired[bucket.shape]
            halves: tuple[tuple[Role, PairHalf], ...] = (("prefill", pair.prefill), ("decode", pair.decode))
            for role, half in halves:
                its = [_Wanted(role, half.shape, index, half.tp)] * half.engines * bucket.engines
                wanted.setdefault((half.pool, "generate"), []).extend(its)
            continue
        pool, devices, _ = problem.footprint(bucket.shape)
        engines = [_Wanted("generate", bucket.shape, index, devices)] * bucket.engines
        wanted.setdefault((pool, "generate"), []).extend(engines)
    groups = [
        group
        for (pool, _), groups in wanted.items()
        for group in _Floor(problem.pool(pool)).place(groups, [kept for kept in current if kept.pool == pool])
    ]
    return tuple(sorted(groups, key=lambda group: (group.role != "train", group.bucket or 0)))


def _alike(it: DeviceGroup | _Wanted) -> tuple[object, ...]:
    return it.role, it.name, it.devices


def _of_kind(it: DeviceGroup | _Wanted) -> tuple[object, ...]:
    return *it.kind, it.devices


class _Floor:
    """One pool while groups are placed, largest first. Blocks of one size never overlap, and displaced groups are
    smaller.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._owner: list[list[DeviceGroup | None]] = [[None] * pool.devices_per_node for _ in range(pool.nodes)]

    def place(self, wanted: Sequence[_Wanted], current: Iterable[DeviceGroup]) -> list[DeviceGroup]:
        waiting = self._keep(wanted, current)
        while waiting:
            size = max(item.devices for item in waiting)
            settling = [item for item in waiting if item.devices == size]
            waiting = [item for item in waiting if item.devices != size]
            blocks = self._free_blocks(size)
            for item in settling:
                waiting += self._settle(item, blocks)
        return list({id(owner): owner for owners in self._owner for owner in owners if owner is not None}.values())

    def _keep(self, wanted: Sequence[_Wanted], current: Iterable[DeviceGroup]) -> list[_Wanted]:
        """Keep present groups of wanted kinds, first the groups that keep their role. Returns the wanted groups that
        still need a place.
        """
        left = list(current)
        waiting = list(wanted)
        for of in (_alike, _of_kind):
            present: dict[tuple[object, ...], deque[DeviceGroup]] = {}
            for group in left:
                present.setdefault(of(group), deque()).append(group)
            asking, waiting = waiting, []
            for item in asking:
                same = present.get(of(item), deque())
                while same and not self._can_stay(same[0]):
                    same.popleft()
                if same:
                    kept = same.popleft()
                    self._occupy(DeviceGroup(item.role, item.name, item.bucket, self._pool.name, kept.nodes, kept.gpus))
                else:
                    waiting.append(item)
            left = [group for groups in present.values() for group in groups]
        return waiting

    def _can_stay(self, group: DeviceGroup) -> bool:
        """Whether the group's GPUs exist in the pool, which may have changed, and are free."""
        per_node = self._pool.devices_per_node
        if max(group.nodes) >= self._pool.nodes or max(group.gpus) >= per_node:
            return False
        in_place = len(group.gpus) == per_node if len(group.nodes) > 1 else per_node % len(group.gpus) == 0
        return in_place and all(self._owner[node][gpu] is None for node in group.nodes for gpu in group.gpus)

    def _settle(self, item: _Wanted, blocks: deque[tuple[int, int]]) -> list[_Wanted]:
        """Place the item on a free block, or on the block that displaces the fewest GPUs; return the displaced
        groups.
        """
        per_node = self._pool.devices_per_node
        nodes: tuple[int, ...]
        if item.devices <= per_node and per_node % item.devices == 0:
            node, start = blocks.popleft() if blocks else self._cheapest_block(item.devices)
            nodes, gpus = (node,), tuple(range(start, start + item.devices))
        elif item.devices % per_node == 0:
            nodes, gpus = self._emptiest_nodes(item.devices // per_node), tuple(range(per_node))
        else:
            raise ValueError(
                f"{item.name} takes {item.devices} devices; nodes of {self._pool.name} have {per_node}: give "
                f"sizes that divide a node, or whole nodes"
            )
        displaced = {id(owner): owner for n in nodes for g in gpus if (owner := self._owner[n][g]) is not None}
        for group in displaced.values():
            self._clear(group)
        self._occupy(DeviceGroup(item.role, item.name, item.bucket, self._pool.name, nodes, gpus))
        return [_Wanted(group.role, group.name, group.bucket, group.devices) for group in displaced.values()]

    def _free_blocks(self, size: int) -> deque[tuple[int, int]]:
        """(node, first GPU) of the free aligned blocks of one size, on the fullest nodes first."""
        found = [
            (owners.count(None), node, start)
            for node, owners in enumerate(self._owner)
            for start in range(0, len(owners) - size + 1, size)
            if owners[start : start + size].count(None) == size
        ]
        return deque((node, start) for _, node, start in sorted(found))

    def _cheapest_block(self, size: int) -> tuple[int, int]:
        """The aligned block with the fewest taken GPUs, all taken by smaller groups."""
        blocks = [
            (size - owners[start : start + size].count(None), node, start)
            for node, owners in enumerate(self._owner)
            for start in range(0, len(owners), size)
            if all(owner is None or owner.devices < size for owner in owners[start : start + size])
        ]
        if not blocks:
            raise ValueError(f"pool {self._pool.name} has no room for a group of {size}; the allocation does not fit")
        _, node, start = min(blocks)
        return node, start

    def _emptiest_nodes(self, count: int) -> tuple[int, ...]:
        per_node = self._pool.devices_per_node
        movable = sorted(
            (per_node - owners.count(None), node)
            for node, owners in enumerate(self._owner)
            if all(owner is None or owner.devices < per_node for owner in owners)
        )
        if len(movable) < count:
            raise ValueError(f"pool {self._pool.name} has no {count} nodes left; the allocation does not fit")
        return tuple(sorted(node for _, node in movable[:count]))

    def _occupy(self, group: DeviceGroup) -> None:
        for node in group.nodes:
            for gpu in group.gpus:
                self._owner[node][gpu] = group

    def _clear(self, group: DeviceGroup) -> None:
        for node in group.nodes:
            for gpu in group.gpus:
                self._owner[node][gpu] = None
