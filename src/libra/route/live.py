"""State of live trajectories, and base classes of the policies that keep such state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from libra.route.policy import Fleet, Instance, Placement, Policy, TurnRequest, require_snapshot
from libra.trajectory import Trajectory

FORMAT = 2  # format number of snapshots


@dataclass(slots=True)
class Live:
    """State of a trajectory between its turns."""

    instance: str | None = None  # instance of the latest turn; None: no turn has been placed yet
    prefix_there: bool = False  # whether this instance is still present


L = TypeVar("L", bound=Live)


class LivePolicy(Policy, Generic[L]):
    """The common part of all policies: dropping state, and snapshots. By default, a turn stays at a bucket overrun, and
    the policy learns nothing.
    """

    NAME: ClassVar[str]
    BUCKETS: ClassVar[bool] = True  # whether the rule uses the buckets of instances

    def __init__(self) -> None:
        self._live: dict[str, L] = {}

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None

    def finished(self, trajectory: Trajectory) -> None:
        self.forget(trajectory.id)

    def forget(self, trajectory_id: str) -> None:
        self._live.pop(trajectory_id, None)

    def instance_gone(self, instance: str) -> None:
        for live in self._live.values():
            if live.instance == instance:
                live.prefix_there = False

    def snapshot(self) -> dict[str, Any]:
        live = [[id, *self._row(live)] for id, live in self._live.items()]
        return {"format": FORMAT, "policy": self.NAME, **self._learned(), "live": live}

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        require_snapshot(snapshot, cls.NAME, FORMAT)
        return cls._made_of(snapshot)._resumed(snapshot)

    def _resumed(self, snapshot: dict[str, Any]) -> Self:
        self._live = {id: self._of_row(*row) for id, *row in snapshot["live"]}
        self._resume(snapshot)
        return self

    def _placed(self, request: TurnRequest) -> L:
        live = self._live.get(request.trajectory_id)
        if live is None:
            raise ValueError(f"trajectory {request.trajectory_id!r} was never placed: call place for its first turn")
        return live

    def _goes(
        self, live: Live, instance: Instance, reason: str, priority: int = 0, ask_again: int | None = None
    ) -> Placement:
        """Place the next turn on `instance`, and record it in `live`."""
        id = instance.id
        migrated = live.instance is not None and id != live.instance
        live.instance, live.prefix_there = id, True
        return Placement(id, instance.bucket, migrated, reason, priority, ask_again)

    @classmethod
    def _made_of(cls, snapshot: dict[str, Any]) -> Self:
        """A new policy with the settings of the snapshot."""
        return cls()

    @abstractmethod
    def _learned(self) -> dict[str, Any]:
        """Settings and learned state as JSON values."""

    @abstractmethod
    def _resume(self, snapshot: dict[str, Any]) -> None:
        """Restore the values of `_learned` from the snapshot."""

    @abstractmethod
    def _row(self, live: L) -> Sequence[Any]:
        """The state of a trajectory as JSON values."""

    @abstractmethod
    def _of_row(self, *row: Any) -> L:
        """The state of a trajectory from the values of `_row`."""


class StickyPolicy(LivePolicy[L]):
    """A rule with optional prefix affinity. With `sticky`, a later turn goes to the instance with its prefix if
    possible. A rule that has more state than the state of its trajectories returns this further state from `_rule`, and
    restores it in `_resume_rule`.
    """

    REASON: ClassVar[str]  # reason of a placement that does not follow a prefix

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__()
        self._sticky = sticky

    @classmethod
    def _made_of(cls, snapshot: dict[str, Any]) -> Self:
        return cls(sticky=snapshot["sticky"])

    def _learned(self) -> dict[str, Any]:
        return {"sticky": self._sticky, "rule": self._rule()}

    def _resume(self, snapshot: dict[str, Any]) -> None:
        self._resume_rule(snapshot["rule"])

    def _rule(self) -> Any:
        """The state of the rule as JSON values."""
        return None

    def _resume_rule(self, rule: Any) -> None:
        """Restore the state that `_rule` returned."""
