"""Buckets: the bucket of a final context, the instance that serves a turn there, and rules that predict final contexts.

Invariant: a turn goes only to an eligible instance, one with room for its context and one more turn. The wanted bucket
comes first, then the next longer bucket with an eligible instance, then the nearest shorter bucket.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from libra.route.live import Live, StickyPolicy
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest


def bucket_of(final_context: float, limits: Sequence[int]) -> int:
    """The shortest bucket with a limit of at least `final_context` tokens; the last bucket if no limit is high
    enough."""
    return min(bisect_left(limits, final_context), len(limits) - 1)


def server(
    instances: Iterable[Instance],
    needed: int,
    wanted: int,
    prefix_at: str | None,
    load: Callable[[Instance], float] = lambda instance: instance.load_tokens,
) -> Instance | None:
    """The instance that serves a turn of bucket `wanted` with `needed` tokens; None if no instance has room. Within a
    bucket, the instance with the prefix comes first, then the least loaded, ties by id. O(instances).
    """
    return min(
        (it for it in instances if needed <= it.capacity_tokens),
        key=lambda it: (it.bucket < wanted, abs(it.bucket - wanted), it.id != prefix_at, load(it), it.id),
        default=None,
    )


@dataclass(slots=True)
class _Live(Live):
    final_context: int = 0  # tokens: the larger of the first turn's prediction and the attained context


class Bucketed(StickyPolicy[_Live]):
    """Base of the rules that predict a final context once, before the first turn.

    A turn goes to the bucket of the predicted final context, or of the attained context if that is longer. So a
    trajectory keeps its bucket until its context exceeds the limit, which may happen in the middle of a turn. The
    trajectory then moves to a longer bucket. With `sticky`, a turn goes to the instance of its bucket that has its
    prefix, if there is one. Otherwise the turn goes to the least loaded instance of the bucket.
    """

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        live = self._live.get(request.trajectory_id)
        if live is None:
            live = self._live[request.trajectory_id] = _Live(final_context=self._expected(request))
        return self._serve(live, request, 0, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, 0, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, generated_tokens, fleet)

    def _row(self, live: _Live) -> tuple[int, str | None, bool]:
        return live.final_context, live.instance, live.prefix_there

    def _of_row(self, final_context: int, instance: str | None, prefix_there: bool) -> _Live:
        return _Live(instance, prefix_there, final_context)

    def _serve(self, live: _Live, request: TurnRequest, generated: int, fleet: Fleet) -> Placement | None:
        live.final_context = max(live.final_context, request.context_tokens + generated)
        wanted = bucket_of(live.final_context, fleet.limits)
        # A turn that has generated more than `turn_tokens` tokens still needs room for one more token.
        needed = request.context_tokens + max(fleet.turn_tokens, generated + 1 if generated else 0)
        # A turn in flight prefers its present instance within the bucket, whether `sticky` or not.
        follow = generated > 0 or (self._sticky and live.prefix_there)
        prefix_at = live.instance if follow else None
        chosen = server(fleet.instances, needed, wanted, prefix_at, self._load)
        if chosen is None:
            return None
        reason = "holds the prefix" if chosen.id == prefix_at else self.REASON
        if chosen.bucket != wanted:
            reason = f"{reason}; no instance of bucket {wanted} holds the turn"
        ask_again = _outgrows(request.context_tokens, max(wanted, chosen.bucket), fleet.limits)
        return self._goes(live, chosen, reason, self._priority(request, chosen), ask_again)

    def _load(self, instance: Instance) -> float:
        """Load by which instances are compared."""
        return instance.load_tokens

    def _priority(self, request: TurnRequest, instance: Instance) -> int:
        return 0

    @abstractmethod
    def _expected(self, request: TurnRequest) -> int:
        """Final context in tokens, predicted before the first turn; without evidence, 0 or the present context."""


def _outgrows(context_tokens: int, bucket: int, limits: Sequence[int]) -> int | None:
    """Number of generated tokens at which a turn no longer fits the bucket; None if it always fits."""
    return None if bucket == len(limits) - 1 else limits[bucket] - context_tokens + 1


class AttainedService(Bucketed):
    """The `mlfq` policy: a trajectory starts in the shortest bucket for its prompt. Each time its context exceeds the
    bucket's limit, also in the middle of a turn, the trajectory moves to the next bucket.
    """

    NAME = "mlfq"
    REASON = "bucket of the attained context"

    def _expected(self, request: TurnRequest) -> int:
        return request.context_tokens
