"""Policies that place turns by a list, for clusters whose engines come and go."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Self

from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.trajectory import Trajectory


class Places:
    """Each trajectory's turns go to the engines of its list, in its order; None where the next one is not there."""

    def __init__(self, places: dict[str, list[str]], otherwise: Callable[[str, int], str] | None = None) -> None:
        self._places, self._otherwise = places, otherwise
        self._latest: dict[str, str] = {}
        self._count: dict[str, int] = {}
        self.told: list[tuple[str, str]] = []  # (what, of whom)

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.told.append(("place", request.trajectory_id))
        return self._placed(request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        self.told.append(("tool", request.trajectory_id))
        return self._placed(request, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None

    def finished(self, trajectory: Trajectory) -> None:
        self.told.append(("finished", trajectory.id))

    def forget(self, trajectory_id: str) -> None:
        self.told.append(("forget", trajectory_id))

    def instance_gone(self, instance: str) -> None:
        self.told.append(("gone", instance))

    def snapshot(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        raise NotImplementedError

    def _placed(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        who = request.trajectory_id
        wanted = self._places[who][0] if self._otherwise is None else self._otherwise(who, self._count.get(who, 0))
        instance = next((it for it in fleet.instances if it.id == wanted), None)
        if instance is None:
            return None
        self._count[who] = self._count.get(who, 0) + 1
        if self._otherwise is None:
            self._places[who].pop(0)
        before, self._latest[who] = self._latest.get(who), wanted
        return Placement(wanted, instance.bucket, before not in (None, wanted), "as listed")


def following(seed: int, names: str) -> Places:
    """Any turn on any engine, drawn by the trajectory and the turn alone."""
    return Places({}, lambda who, turn: Random(f"{seed} {who} {turn}").choice(names))
