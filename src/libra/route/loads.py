"""How much the instances of a fleet have to do, in sum and at least: by a look at all, or kept while loads change.

Invariant: an `IndexedFleet` says of its instances what `loads_of` would, whatever has happened since it was asked last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from libra.route.policy import Fleet, Instance

Kind = tuple[int, bool]  # bucket, and whether it is lent

_STALE = 4  # entries of an instance in a heap, in the mean, with which it is made anew


@dataclass(slots=True)
class Loads:
    """Of the instances that hold some number of tokens."""

    instances: int = 0  # how many
    tokens: int = 0  # of work, of all together
    least: dict[Kind, tuple[int, Instance]] = field(default_factory=dict)  # of each kind; ties by id

    def offer(self, kind: Kind, load: int, instance: Instance) -> None:
        """The instance may be the least loaded one of its kind."""
        least = self.least.get(kind)
        if least is None or load < least[0] or (load == least[0] and instance.id < least[1].id):
            self.least[kind] = load, instance


def loads_of(fleet: Fleet, needed: int) -> Loads:
    """Of the instances that hold `needed` tokens. O(instances), unless the fleet is indexed."""
    return fleet.loads(needed) if isinstance(fleet, IndexedFleet) else _looked_at(fleet.instances, needed)


def instance_of(fleet: Fleet, id: str) -> Instance | None:
    """The one of this id, if it is there. O(instances), unless the fleet is indexed."""
    if isinstance(fleet, IndexedFleet):
        return fleet.instance(id)
    return next((it for it in fleet.instances if it.id == id), None)


def _looked_at(instances: Iterable[Instance], needed: int) -> Loads:
    loads = Loads()
    for instance in instances:
        if instance.capacity_tokens >= needed:
            load = instance.load_tokens
            loads.instances += 1
            loads.tokens += load
            loads.offer((instance.bucket, instance.recall_rate > 0), load, instance)
    return loads


class WatchedInstance(Instance, Protocol):
    """An `Instance` that may say when its load has changed."""

    def watch(self, changed: Callable[[], object]) -> bool:
        """Call this whenever the load has changed, and nobody else any more. False: it cannot say, or its `recall_rate`
        need not be 0; it is to be looked at each time."""


W = TypeVar("W", bound=WatchedInstance)


class IndexedFleet(Generic[W]):
    """A `Fleet` that need not look at all its instances to know who has least to do.

    Capacities and buckets of its instances stay as they are; where that changes, make another one. Until somebody asks
    for loads or an instance, nothing is kept.
    """

    __slots__ = ("_by_id", "_changed", "_groups", "_unwatched", "instances", "limits", "turn_tokens")

    def __init__(self, instances: tuple[W, ...], limits: tuple[int, ...], turn_tokens: int) -> None:
        self.instances = instances
        self.limits = limits
        self.turn_tokens = turn_tokens
        self._by_id: dict[str, W] = {}
        self._groups: dict[tuple[int, int], _Group] = {}  # by bucket and capacity; of those that are watched
        self._unwatched: list[W] = []  # looked at each time: there are few
        self._changed: set[str] = set()  # ids of those whose loads have, since somebody asked

    def instance(self, id: str) -> W | None:
        """The one of this id, if it is there."""
        self._index()
        return self._by_id.get(id)

    def loads(self, needed: int) -> Loads:
        """Of the instances that hold `needed` tokens. O(log instances) for each whose load has changed, and O(1) for
        each bucket and capacity."""
        self._index()
        for id in self._changed:
            instance = self._by_id[id]
            self._groups[instance.bucket, instance.capacity_tokens].changed(instance)
        self._changed.clear()
        loads = _looked_at(self._unwatched, needed)
        for (bucket, capacity), group in self._groups.items():
            if capacity >= needed:
                loads.instances += len(group)
                loads.tokens += group.tokens
                load, id = group.least()
                loads.offer((bucket, False), load, self._by_id[id])
        return loads

    def _index(self) -> None:
        if len(self._by_id) == len(self.instances):
            return
        for instance in self.instances:
            self._by_id[instance.id] = instance
            if instance.watch(partial(self._changed.add, instance.id)):
                self._groups.setdefault((instance.bucket, instance.capacity_tokens), _Group()).changed(instance)
            else:
                self._unwatched.append(instance)


class _Group:
    """Instances of one bucket and capacity: their loads in a heap that still has some that are over."""

    __slots__ = ("_heap", "_loads", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # sum of the loads
        self._loads: dict[str, int] = {}  # by id
        self._heap: list[tuple[int, str]] = []  # (load, id)

    def __len__(self) -> int:
        return len(self._loads)

    def changed(self, instance: Instance) -> None:
        load, before = instance.load_tokens, self._loads.get(instance.id)
        if load == before:
            return
        self.tokens += load - (before or 0)
        self._loads[instance.id] = load
        heappush(self._heap, (load, instance.id))
        if len(self._heap) > _STALE * len(self._loads):
            self._heap = [(load, id) for id, load in self._loads.items()]
            heapify(self._heap)

    def least(self) -> tuple[int, str]:
        """Load and id."""
        heap = self._heap
        while self._loads[heap[0][1]] != heap[0][0]:
            heappop(heap)
        return heap[0]
