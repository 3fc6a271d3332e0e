"""Buckets: which one a final context belongs to, who serves a turn there, and rules that expect a final context.

Invariant: a turn goes only to an instance that holds its context and one more turn; of these to one of the wanted
bucket, else of the next longer bucket that has one, else of the nearest shorter one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest, require_snapshot
from libra.trajectory import Trajectory

FORMAT = 1


def bucket_of(final_context: float, limits: Sequence[int]) -> int:
    """The shortest bucket whose limit is no less than this many tokens; the last one takes whatever is longer."""
    return min(bisect_left(limits, final_context), len(limits) - 1)


def server(
    instances: Iterable[Instance],
    needed: int,
    wanted: int,
    prefix_at: str | None,
    load: Callable[[Instance], float] = lambda instance: instance.load_tokens,
) -> Instance | None:
    """The instance that serves a turn of bucket `wanted` with `needed` tokens; None where none holds these.

    In the bucket it is the one that holds the prefix, else the least loaded, ties by id. O(instances).
    """
    return min(
        (it for it in instances if needed <= it.capacity_tokens),
        key=lambda it: (it.bucket < wanted, abs(it.bucket - wanted), it.id != prefix_at, load(it), it.id),
        default=None,
    )


@dataclass(slots=True)
class _Live:
    """What is remembered of a trajectory between its turns."""

    final_context: int  # tokens expected at its first turn, or attained since if those are more
    instance: str | None = None  # served its latest turn; None: no instance could hold any of its turns yet
    prefix_there: bool = False  # that instance has not gone since


class Bucketed(ABC):
    """What the rules share that expect a final context once, before the first turn.

    A turn goes to the bucket of the expected final context, or of the context it has attained if that is more. So a
    trajectory keeps its bucket until it outgrows it, also in the midst of a turn, and then moves to a longer one.
    With `sticky` a turn goes in its bucket to the instance that holds its prefix; otherwise, and where there is none,
    to the least loaded.
    """

    NAME: ClassVar[str]
    REASON: ClassVar[str]

    def __init__(self, *, sticky: bool = True) -> None:
        self._sticky = sticky
        self._live: dict[str, _Live] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        live = self._live.get(request.trajectory_id)
        if live is None:
            live = self._live[request.trajectory_id] = _Live(self._expected(request))
        return self._serve(live, request, 0, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, 0, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, generated_tokens, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        self.forget(trajectory.id)

    def forget(self, trajectory_id: str) -> None:
        self._live.pop(trajectory_id, None)

    def instance_gone(self, instance: str) -> None:
        for live in self._live.values():
            if live.instance == instance:
                live.prefix_there = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy": self.NAME,
            "sticky": self._sticky,
            "rule": self._rule(),
            "live": [[id, it.final_context, it.instance, it.prefix_there] for id, it in self._live.items()],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        require_snapshot(snapshot, cls.NAME, FORMAT)
        return cls(sticky=snapshot["sticky"])._resumed(snapshot)

    def _resumed(self, snapshot: dict[str, Any]) -> Self:
        self._live = {id: _Live(*live) for id, *live in snapshot["live"]}
        self._resume(snapshot["rule"])
        return self

    def _placed(self, request: TurnRequest) -> _Live:
        live = self._live.get(request.trajectory_id)
        if live is None:
            raise ValueError(f"trajectory {request.trajectory_id!r} was never placed: call place for its first turn")
        return live

    def _serve(self, live: _Live, request: TurnRequest, generated: int, fleet: Fleet) -> Placement | None:
        live.final_context = max(live.final_context, request.context_tokens + generated)
        wanted = bucket_of(live.final_context, fleet.limits)
        # A turn that has generated more than it should have goes on all the same, by one token at least.
        needed = request.context_tokens + max(fleet.turn_tokens, generated + 1 if generated else 0)
        # A turn that is under way stays in its bucket where it is, whether or not turns follow prefixes.
        follow = generated > 0 or (self._sticky and live.prefix_there)
        prefix_at = live.instance if follow else None
        chosen = server(fleet.instances, needed, wanted, prefix_at, self._load)
        if chosen is None:
            return None
        reason = "holds the prefix" if chosen.id == prefix_at else self.REASON
        if chosen.bucket != wanted:
            reason = f"{reason}; bucket {wanted} has no instance that holds it"
        placement = Placement(
            instance=chosen.id,
            bucket=chosen.bucket,
            migrated=live.instance is not None and chosen.id != live.instance,
            reason=reason,
            priority=self._priority(request, chosen),
            ask_again=_outgrows(request.context_tokens, max(wanted, chosen.bucket), fleet.limits),
        )
        live.instance, live.prefix_there = chosen.id, True
        return placement

    def _load(self, instance: Instance) -> float:
        """What the least loaded has least of."""
        return instance.load_tokens

    def _priority(self, request: TurnRequest, instance: Instance) -> int:
        return 0

    @abstractmethod
    def _expected(self, request: TurnRequest) -> int:
        """Final context in tokens, before the first turn; 0 or the context itself where nothing is known."""

    @abstractmethod
    def _rule(self) -> Any:
        """What the rule itself remembers, as JSON values."""

    @abstractmethod
    def _resume(self, rule: Any) -> None:
        """Remember this, which `_rule` gave."""


def _outgrows(context_tokens: int, bucket: int, limits: Sequence[int]) -> int | None:
    """Generated tokens with which a turn no longer fits the bucket; None: it always does."""
    return None if bucket == len(limits) - 1 else limits[bucket] - context_tokens + 1


class AttainedService(Bucketed):
    """The `mlfq` policy: the shortest bucket that holds the prompt, then the next one each time it is outgrown.

    A long generation without tools is demoted while it runs, when it outlives its bucket.
    """

    NAME = "mlfq"
    REASON = "bucket of the attained context"

    def _expected(self, request: TurnRequest) -> int:
        return request.context_tokens

    def _rule(self) -> None:
        return None

    def _resume(self, rule: None) -> None:
        pass
