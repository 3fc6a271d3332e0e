"""C-MLFQ by expected cost: a turn goes to the instance with the least expected cost of serving the trajectory's
remaining tokens.

Invariant: no turn is placed on an instance without room for its context and one more turn. A turn leaves the instance
with its prefix only if it has outgrown the instance, or if the expected saving exceeds the cost of the move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from libra.route.evidence import HALF_LIFE, MAX_CONTEXTS
from libra.route.hierarchy import RECENT, SHRINKAGE, Hierarchy
from libra.route.live import Live, LivePolicy
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.route.remaining import Remaining
from libra.route.service_cost import MigrationCost, cheapest, offers_of
from libra.route.tool_state import ToolState, payload_class, state_of
from libra.trajectory import Trajectory

STAYS = "holds the prefix, and a move would cost more than it saves"
MOVES = "a move saves more than it costs"
OUTGROWN = "has outgrown its instance"
PLACED = "least expected cost"
BLIND = "no evidence: least loaded"
BLIND_STAYS = "no evidence: holds the prefix"

# A turn is placed again when it has generated this factor times the tokens predicted for its trajectory.
_SURPRISE = 2.0


@dataclass(slots=True)
class _Live(Live):
    recent: tuple[ToolState, ...] = ()  # latest tool returns
    returns: int = 0  # number of tool returns
    returned: int = 0  # tokens returned by tools


class CMLFQ(LivePolicy[_Live]):
    """The `cmlfq` policy.

    The remaining tokens of a trajectory are predicted from its tool returns (`Hierarchy`) as a distribution. For each
    bucket, the distribution determines the probability that the trajectory outgrows the bucket's instances, and the
    expected tokens until then. The least loaded eligible instance of each bucket is an offer, and so is the instance
    with the prefix. The cheapest offer wins. The cost of an offer is the sum of the service on the instance, a later
    move, the service after that move, and the move now (`service_cost`).

    A bucket groups the engines that a plan made for a range of lengths. The policy does not enforce the bucket's limit.
    A trajectory goes to, and stays on, the instance that is expected to serve its remaining tokens soonest. The
    expectation uses the instances' reported seconds or, without a report, their loads. So long trajectories gather on
    fast engines if these engines are worth a move. No turn goes to a more crowded bucket, and an idle bucket serves
    turns planned for others. Before any trajectory has finished, a turn stays with its prefix, or goes to the least
    loaded instance with room for it.

    `priority` is the slack in milliseconds: the due time of the group, 0 if unknown, minus the predicted service time
    of the remaining tokens. Among turns due at the same time, the turn with the longest remaining service comes first.
    """

    NAME = "cmlfq"

    def __init__(
        self,
        migration: MigrationCost | None = None,
        *,
        half_life: float = HALF_LIFE,
        max_contexts: int = MAX_CONTEXTS,
    ) -> None:
        """Make an untrained policy. `half_life` is in trajectories; `max_contexts` bounds the memory. See
        `ReturnEvidence`.
        """
        super().__init__()
        self._migration = MigrationCost() if migration is None else migration
        self._hierarchy = Hierarchy(half_life, max_contexts)

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        live = self._live.get(request.trajectory_id)
        if live is not None:
            return self._serve(live, request, 0, fleet)
        live = self._live[request.trajectory_id] = _Live()
        placement = self._serve(live, request, 0, fleet)
        self._hierarchy.started(request)
        return placement

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        live = self._placed(request)
        state = state_of(returned.tool, payload_class(returned.returned_tokens), returned.status)
        live.recent = (*live.recent, state)[-RECENT:]
        live.returns += 1
        live.returned += returned.returned_tokens
        self._hierarchy.reached(request)
        return self._serve(live, request, 0, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        live = self._placed(request)
        self._hierarchy.reached(request, generated_tokens)
        home = live.instance
        placement = self._serve(live, request, generated_tokens, fleet)
        if placement is None or (placement.instance == home and placement.ask_again is None):
            return None
        return placement

    def finished(self, trajectory: Trajectory) -> None:
        self._hierarchy.learn(trajectory)
        super().forget(trajectory.id)

    def forget(self, trajectory_id: str) -> None:
        self._hierarchy.ended(trajectory_id)
        super().forget(trajectory_id)

    @classmethod
    def _made_of(cls, snapshot: dict[str, Any]) -> Self:
        return cls(MigrationCost(*snapshot["migration"]))

    def _learned(self) -> dict[str, Any]:
        migration = [self._migration.fixed_seconds, self._migration.seconds_per_token]
        return {"migration": migration, "hierarchy": self._hierarchy.snapshot()}

    def _resume(self, snapshot: dict[str, Any]) -> None:
        self._hierarchy = Hierarchy.restore(snapshot["hierarchy"])

    def _row(self, live: _Live) -> list[Any]:
        return [live.instance, live.prefix_there, [list(state) for state in live.recent], live.returns, live.returned]

    def _of_row(
        self, instance: str | None, prefix_there: bool, recent: list[Any], returns: int, returned: int
    ) -> _Live:
        return _Live(instance, prefix_there, tuple(state_of(*state) for state in recent), returns, returned)

    def _serve(self, live: _Live, request: TurnRequest, generated: int, fleet: Fleet) -> Placement | None:
        """Place a turn that has generated `generated` tokens, and record its instance."""
        context = request.context_tokens + generated
        needed = request.context_tokens + max(fleet.turn_tokens, generated + 1)
        turn_tokens = self._turn_tokens(live, request)
        offers, home = offers_of(fleet, needed, live.instance if live.prefix_there else None, turn_tokens)
        if not offers:
            return None
        remaining = self._hierarchy.predict_recent(request, live.recent, live.returns)
        if remaining is not None and generated:
            remaining = remaining.after(generated)
        if remaining is not None:
            chosen = cheapest(remaining, context, offers, home, self._migration, turn_tokens)
            if home is None:
                reason = PLACED
            elif chosen is home:
                reason = STAYS
            else:
                reason = MOVES if context <= home.reach else OUTGROWN
        elif home is not None:
            chosen, reason = home, BLIND_STAYS
        else:
            chosen, reason = min(offers, key=lambda offer: (offer.load_tokens, offer.instance.id)), BLIND
        ask_again = None if chosen.onward is None else _ask_again(chosen.reach - context, generated, remaining)
        return self._goes(live, chosen.instance, reason, _slack(request, remaining, chosen.told_seconds), ask_again)

    def _turn_tokens(self, live: _Live, request: TurnRequest) -> float:
        """Expected generated tokens of a turn of this trajectory. Blends the mean of the trajectory's own turns with
        the mean over all trajectories, as the hierarchy blends contexts. 0 before any trajectory has finished.
        """
        usual = self._hierarchy.turn_tokens
        if not usual:
            return 0.0
        generated = max(0, request.context_tokens - request.prompt_tokens - live.returned)
        return (SHRINKAGE * usual + generated) / (SHRINKAGE + live.returns)


def _slack(request: TurnRequest, remaining: Remaining | None, token_seconds: float) -> int:
    """The slack of a turn in milliseconds; see `CMLFQ`."""
    due = 0.0 if request.due is None else request.due
    if remaining is None:
        return round(1000 * due)
    return round(1000 * (due - remaining.mean * token_seconds))


def _ask_again(room: float, generated: int, remaining: Remaining | None) -> int | None:
    """Generated tokens at which to place the turn again: when its context exceeds the reach of its instance, or when it
    exceeds its prediction by the factor `_SURPRISE`.

    The prediction grows with the generated tokens, and the next call comes when they have at least doubled, so calls
    are few. None if the context already exceeds the reach, since no better instance was available.
    """
    if room < 0:
        return None
    more = int(room) + 1
    if remaining is None:
        return generated + more
    surprising = max(1, generated, math.ceil(_SURPRISE * remaining.mean))
    return generated + min(more, surprising)
