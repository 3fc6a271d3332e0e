"""What trajectories cost on rollout engines, in engine seconds (work) and in waiting (residence).

Invariant: every price is linear in the trajectories given to an engine, so shares of them add up. An engine is short
of seats (`max_num_seqs` decode together) or short of KV memory; it needs time for whichever asks for more, so both
are priced. `C / K` below reads: C token-iterations of context, at most K of them in one iteration.
"""

from __future__ import annotations

from libra.cost.device import EngineCost
from libra.lengths import TrajectoryClass


def concurrency(max_num_seqs: int, in_flight: int, engines: int) -> int:
    """Sequences, at least 1, that decode together on one of `engines` engines with `in_flight` trajectories open."""
    return max(1, min(max_num_seqs, in_flight // engines))


def work_by_seats(cost: EngineCost, cls: TrajectoryClass, seats: int) -> float:
    """Engine seconds per trajectory when `seats` sequences share each iteration."""
    return (
        (cost.step / seats + cost.per_sequence) * cls.generated
        + cost.per_context_token * cls.context_sum
        + _apart(cost, cls)
    )


def work_by_memory(cost: EngineCost, cls: TrajectoryClass, kv_tokens: int) -> float:
    """Engine seconds per trajectory when `kv_tokens` tokens of context share each iteration."""
    return (
        cost.per_sequence * cls.generated
        + (cost.step / kv_tokens + cost.per_context_token) * cls.context_sum
        + _apart(cost, cls)
    )


def residence(cost: EngineCost, cls: TrajectoryClass, seats: int) -> float:
    """Seconds from the first token to the last, with the other seats taken by trajectories of the same class.

    It is `generated` iterations of `seats` sequences at their mean context, multiplied out so that a class that
    generates nothing has no mean context to divide for.
    """
    decode = cls.generated * cost.iteration_seconds(seats, 0) + seats * cost.per_context_token * cls.context_sum
    return decode + _apart(cost, cls) + cls.tool_seconds


def _apart(cost: EngineCost, cls: TrajectoryClass) -> float:
    return cost.per_prefill_token * cls.prefill + cost.per_turn * cls.turns
