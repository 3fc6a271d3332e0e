"""Total and least loads of a fleet's instances, from a scan or from an index that is updated with each change.

Invariant: an `IndexedFleet` always returns the same loads as a scan of its instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from libra.route.policy import Fleet, Instance

Kind = tuple[int, int, bool]  # bucket, class of pace, and whether the instance is lent

_STALE = 4  # mean number of heap entries per instance above which a heap is rebuilt


@dataclass(slots=True)
class Loads:
    """Loads of the instances with room for some number of tokens."""

    instances: int = 0  # number of these instances
    tokens: int = 0  # tokens of work on all these instances
    # Least loaded instance of each kind; ties by id.
    least: dict[Kind, tuple[int, Instance]] = field(default_factory=dict)

    def offer(self, kind: Kind, load: int, instance: Instance) -> None:
        """Keep the instance if it is the least loaded of its kind seen until now."""
        least = self.least.get(kind)
        if least is None or load < least[0] or (load == least[0] and instance.id < least[1].id):
            self.least[kind] = load, instance

    def least_in(self, bucket: int) -> tuple[int, Instance] | None:
        """The least loaded instance of a bucket, without lent instances; ties by id."""
        least: tuple[int, Instance] | None = None
        for (its_bucket, _, lent), found in self.least.items():
            if its_bucket != bucket or lent:
                continue
            if least is None or found[0] < least[0] or (found[0] == least[0] and found[1].id < least[1].id):
                least = found
        return least


def loads_of(fleet: Fleet, needed: int) -> Loads:
    """Loads of the instances with room for `needed` tokens. O(instances), unless the fleet is indexed."""
    return fleet.loads(needed) if isinstance(fleet, IndexedFleet) else _looked_at(fleet.instances, needed)


def instance_of(fleet: Fleet, id: str) -> Instance | None:
    """The instance with this id, or None. O(instances), unless the fleet is indexed."""
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
            loads.offer((instance.bucket, instance.pace_class, instance.recall_rate > 0), load, instance)
    return loads


class WatchedInstance(Instance, Protocol):
    """An `Instance` that may be able to report changes of its load."""

    def watch(self, changed: Callable[[], object]) -> bool:
        """Call `changed` on every change of the load from now on, instead of an earlier callback. Returns False if
        callers must read the instance each time, since the instance cannot report changes, or since its `recall_rate`
        may be above 0.
        """


W = TypeVar("W", bound=WatchedInstance)


class IndexedFleet(Generic[W]):
    """A `Fleet` that finds the least loaded instances without reading all of them.

    Capacities, buckets and classes of its instances must not change; make a new fleet instead. The first call of
    `loads` or `instance` builds the index.
    """

    __slots__ = ("_by_id", "_changed", "_groups", "_unwatched", "instances", "limits", "turn_tokens")

    def __init__(self, instances: tuple[W, ...], limits: tuple[int, ...], turn_tokens: int) -> None:
        self.instances = instances
        self.limits = limits
        self.turn_tokens = turn_tokens
        self._by_id: dict[str, W] = {}
        self._groups: dict[tuple[int, int, int], _Group] = {}  # watched instances, by bucket, class and capacity
        self._unwatched: list[W] = []  # the few instances that must be read each time
        self._changed: set[str] = set()  # ids of instances whose loads have changed since the last `loads`

    def instance(self, id: str) -> W | None:
        """The instance with this id, or None."""
        self._index()
        return self._by_id.get(id)

    def loads(self, needed: int) -> Loads:
        """Loads of the instances with room for `needed` tokens. O(log instances) for each changed load, and O(1) for
        each bucket, class and capacity."""
        self._index()
        for id in self._changed:
            instance = self._by_id[id]
            self._groups[_group_of(instance)].changed(instance)
        self._changed.clear()
        loads = _looked_at(self._unwatched, needed)
        for (bucket, pace_class, capacity), group in self._groups.items():
            if capacity >= needed:
                loads.instances += len(group)
                loads.tokens += group.tokens
                load, id = group.least()
                loads.offer((bucket, pace_class, False), load, self._by_id[id])
        return loads

    def _index(self) -> None:
        if len(self._by_id) == len(self.instances):
            return
        for instance in self.instances:
            self._by_id[instance.id] = instance
            if instance.watch(partial(self._changed.add, instance.id)):
                self._groups.setdefault(_group_of(instance), _Group()).changed(instance)
            else:
                self._unwatched.append(instance)


def _group_of(instance: Instance) -> tuple[int, int, int]:
    return instance.bucket, instance.pace_class, instance.capacity_tokens


class _Group:
    """Instances of one bucket, class and capacity, with their loads in a heap that may contain stale entries."""

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
        """Load and id of the least loaded instance."""
        heap = self._heap
        while self._loads[heap[0][1]] != heap[0][0]:
            heappop(heap)
        return heap[0]
