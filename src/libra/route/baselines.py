"""Routing rules to compare with: round robin, least loaded, and the less loaded of two drawn at random.

Invariant: a turn goes only to an instance that holds its context and one more turn, whatever the rule; a rule sees the
present fleet and remembers of a trajectory where its latest turn went, until it is finished or forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Self

from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest, require_snapshot
from libra.trajectory import Trajectory

FORMAT = 1


@dataclass(slots=True)
class _Home:
    """Where a trajectory's latest turn went."""

    instance: str | None = None  # None: no instance could hold any of its turns yet
    position: int = 0  # of the instance in the fleet as last seen: looked at first, so a search is rare
    prefix_there: bool = False  # that instance has not gone since

    def position_in(self, instances: Sequence[Instance]) -> int | None:
        if self.position < len(instances) and instances[self.position].id == self.instance:
            return self.position
        return next((position for position, it in enumerate(instances) if it.id == self.instance), None)


class Baseline(ABC):
    """What the rules share: eligibility, following the prefix, and letting go.

    With `sticky`, a later turn of a trajectory goes where its previous turn went as long as that instance is there,
    holds the prefix and is eligible; the rule is asked for all others, and is not told of those. Buckets are ignored.
    """

    NAME: ClassVar[str]
    REASON: ClassVar[str]

    def __init__(self, *, sticky: bool = True) -> None:
        self._sticky = sticky
        self._homes: dict[str, _Home] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._serve(self._homes.setdefault(request.trajectory_id, _Home()), request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        home = self._homes.get(request.trajectory_id)
        if home is None:
            raise ValueError(f"trajectory {request.trajectory_id!r} was never placed: call place for its first turn")
        return self._serve(home, request, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None

    def finished(self, trajectory: Trajectory) -> None:
        self.forget(trajectory.id)

    def forget(self, trajectory_id: str) -> None:
        self._homes.pop(trajectory_id, None)

    def instance_gone(self, instance: str) -> None:
        for home in self._homes.values():
            if home.instance == instance:
                home.prefix_there = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy": self.NAME,
            "sticky": self._sticky,
            "rule": self._rule(),
            "live": [[id, home.instance, home.prefix_there] for id, home in self._homes.items()],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        require_snapshot(snapshot, cls.NAME, FORMAT)
        policy = cls(sticky=snapshot["sticky"])
        policy._resume(snapshot["rule"])
        policy._homes = {
            id: _Home(instance, prefix_there=prefix_there) for id, instance, prefix_there in snapshot["live"]
        }
        return policy

    def _serve(self, home: _Home, request: TurnRequest, fleet: Fleet) -> Placement | None:
        needed = request.context_tokens + fleet.turn_tokens
        instances = fleet.instances
        position = home.position_in(instances) if self._sticky and home.prefix_there else None
        reason = "holds the prefix"
        if position is None or instances[position].capacity_tokens < needed:
            position, reason = self._choose(instances, needed), self.REASON
        if position is None:
            return None
        chosen = instances[position]
        placement = Placement(
            instance=chosen.id,
            bucket=chosen.bucket,
            migrated=home.instance is not None and chosen.id != home.instance,
            reason=reason,
        )
        home.instance, home.position, home.prefix_there = chosen.id, position, True
        return placement

    @abstractmethod
    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        """Position of one of the instances that hold `needed` tokens; None where there is none."""

    @abstractmethod
    def _rule(self) -> Any:
        """What the rule itself remembers, as JSON values."""

    @abstractmethod
    def _resume(self, rule: Any) -> None:
        """Remember this, which `_rule` gave."""


class RoundRobin(Baseline):
    """Each instance in turn, passing over those that cannot hold the turn. O(1) where all can."""

    NAME = "round-robin"
    REASON = "next in turn"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._next = 0  # position, of a fleet that may have shrunk since

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        count = len(instances)
        for turn in range(self._next, self._next + count):
            position = turn % count
            if needed <= instances[position].capacity_tokens:
                self._next = (position + 1) % count
                return position
        return None

    def _rule(self) -> int:
        return self._next

    def _resume(self, rule: int) -> None:
        self._next = rule


class LeastLoaded(Baseline):
    """The least loaded instance that can hold the turn, ties by id. O(instances)."""

    NAME = "least-loaded"
    REASON = "least loaded"

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        eligible = _eligible(instances, needed)
        return min(eligible, key=lambda position: _load(instances[position]), default=None)

    def _rule(self) -> Any:
        return None

    def _resume(self, rule: Any) -> None:
        pass


class TwoChoices(Baseline):
    """The less loaded of two different instances drawn at random from those that can hold the turn, ties by id.

    Of n instances with a turn each, the fullest has ln ln n / ln 2 + O(1), exponentially fewer than with one draw
    (Mitzenmacher 2001, "The power of two choices in randomized load balancing"). O(1) where all can hold the turn:
    only if one of the two drawn cannot, they are drawn again from a list of those that can, which leaves every pair of
    these equally likely.
    """

    NAME = "two-choices"
    REASON = "less loaded of two drawn"

    def __init__(self, *, sticky: bool = True, seed: int = 0) -> None:
        super().__init__(sticky=sticky)
        self._random = Random(seed)

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        drawn = self._draw(range(len(instances)))
        if any(instances[position].capacity_tokens < needed for position in drawn):
            drawn = self._draw(_eligible(instances, needed))
        return min(drawn, key=lambda position: _load(instances[position]), default=None)

    def _draw(self, positions: Sequence[int]) -> Sequence[int]:
        """Two different ones; all of them where there are fewer."""
        count = len(positions)
        if count <= 2:
            return positions
        # Of all methods, only `random` promises the same numbers in every version of Python.
        first, second = int(self._random.random() * count), int(self._random.random() * (count - 1))
        return positions[first], positions[second + (second >= first)]

    def _rule(self) -> list[Any]:
        version, numbers, gauss = self._random.getstate()
        return [version, list(numbers), gauss]

    def _resume(self, rule: list[Any]) -> None:
        version, numbers, gauss = rule
        self._random.setstate((version, tuple(numbers), gauss))


def _eligible(instances: Sequence[Instance], needed: int) -> list[int]:
    return [position for position, instance in enumerate(instances) if needed <= instance.capacity_tokens]


def _load(instance: Instance) -> tuple[int, str]:
    return instance.load_tokens, instance.id
