"""Cost of trajectories on rollout engines: engine seconds (work) and elapsed seconds (residence).

Invariant: every price is linear in the trajectories given to an engine, so prices of shares add up. An engine is
limited by `max_num_seqs`, the sequences that decode together, or by KV memory. The tighter limit counts, under each
affine lower bound of the iterations, so all combinations are priced. `C / K` below means: C token-iterations of
context, with at most K tokens in one iteration.

If a step waits for its whole batch, the batch starts at once on empty engines, and `max_num_seqs` is no bound. An
engine that generates in I iterations then takes `step * I + per_sequence * G + per_context_token * C`, where I is the
number of tokens of its longest trajectory. So a batch takes the work of all its trajectories (`batch_work`), which
engines share, plus the work of its longest trajectory (`libra.cost.longest`), which they cannot share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.cost.corrections import BatchFactors
from libra.cost.device import EngineCost
from libra.cost.grid import EngineGrid
from libra.cost.lines import IterationLine
from libra.lengths import TrajectoryClass

_NEAR = 0.05  # relative distance between lower bounds and grid up to which no secants are needed
_EIGHTH = 8  # ratio between the ends of a secant


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of one engine: lower bounds of decode iterations, prefill, and other costs of a turn."""

    lines: tuple[IterationLine, ...]  # each is valid up to the number of sequences that it was made for
    per_prefill_token: float
    per_prefill_context: float  # for each pair of a new token and a token before it
    per_turn: float
    per_admitted_token: float = 0.0  # for each token of an admitted context, most of them cached

    def iteration_seconds(self, sequences: float, context_tokens: float) -> float:
        return max(
            line.step + line.per_sequence * sequences + line.per_context_token * context_tokens for line in self.lines
        )


def measured_timing(cost: EngineCost) -> EngineTiming:
    """The timing of an engine whose measured iterations are affine."""
    line = IterationLine(cost.step, cost.per_sequence, cost.per_context_token)
    return EngineTiming((line,), cost.per_prefill_token, 0.0, cost.per_turn)


def concurrency(max_num_seqs: int, in_flight: int, engines: int) -> int:
    """Sequences that decode together on one of `engines` engines with `in_flight` trajectories; at least 1."""
    return max(1, min(max_num_seqs, in_flight // engines))


def work(timing: EngineTiming, cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int) -> tuple[float, ...]:
    """Lower bounds of engine seconds per trajectory: for each line, one bound by `max_num_seqs` and one by memory.

    With I iterations, the sum of `step + per_sequence*b + per_context_token*S` over them is `step*I + per_sequence*G +
    per_context_token*C`. Generating G tokens, at most `max_num_seqs` at a time, takes I >= G / max_num_seqs iterations.
    Reading C tokens of context, at most K at a time, takes I >= C / K.
    """
    rows = []
    for line in timing.lines:
        busy = (
            line.per_sequence * cls.generated
            + line.per_context_token * cls.context_sum
            + prefill_seconds(timing, cls)
            + timing.per_turn * cls.turns
        )
        rows.append(busy + line.step * cls.generated / max_num_seqs)
        rows.append(busy + line.step * cls.context_sum / kv_tokens)
    return tuple(rows)


def prefill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill a trajectory's prompt and tool returns once each.

    Prompt and tool returns are spread over the growing context, so on average half of the final context precedes a
    prefilled token or an admitted turn.
    """
    token, admission = prompt_seconds(timing, cls.mean_context)
    return cls.prefill * token + cls.turns * (admission - timing.per_turn)


def prompt_seconds(timing: EngineTiming, final_context: float) -> tuple[float, float]:
    """Engine seconds per prefilled token, and per turn, of a trajectory with this final context."""
    half = final_context / 2
    return (
        timing.per_prefill_token + timing.per_prefill_context * half,
        timing.per_turn + timing.per_admitted_token * half,
    )


def refill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill a trajectory's whole context again, at a random moment of its generation."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return context * (timing.per_prefill_token + timing.per_prefill_context * context / 2)


def seats_taken(cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int) -> float:
    """Sequences of the class that decode together on an engine, limited by `max_num_seqs` and by memory."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return min(float(max_num_seqs), max(1.0, kv_tokens / context)) if context else float(max_num_seqs)


def batch_work(timing: EngineTiming, cls: TrajectoryClass, kv_tokens: int, factors: BatchFactors) -> tuple[float, ...]:
    """Engine seconds per trajectory in a batch that starts at once, for each line of the timing. The work of the
    longest trajectory is not included (`libra.cost.longest`).
    """
    apart = factors.prefill * prefill_seconds(timing, cls) + timing.per_turn * cls.turns
    return tuple(
        factors.decode * (line.per_sequence * cls.generated + line.per_context_token * cls.context_sum)
        + factors.memory * line.step * cls.context_sum / kv_tokens
        + apart
        for line in timing.lines
    )


def refills(timing: EngineTiming, cls: TrajectoryClass, factors: BatchFactors) -> float:
    """Engine seconds per trajectory if every turn after the first finds its context evicted and prefills it again."""
    return factors.eviction * max(0.0, cls.turns - 1) * refill_seconds(timing, cls)


def secant_timings(
    timing: EngineTiming, grid: EngineGrid, most: int, contexts: tuple[float, float]
) -> tuple[EngineTiming, ...]:
    """Timings that are each close to the grid for some numbers of sequences up to `most` >= 1.

    A mixture of experts reads more experts with more tokens, so its iterations are concave in the number of sequences,
    and lower bounds are far below. Each timing adds one secant at the mean context (the first of `contexts`; the second
    is the longest). The first secant goes from `most` to an eighth of `most`, the next from there to an eighth again,
    and so on. The cheapest timing is the closest. If the lower bounds are close, only the original timing is returned.
    """
    context, longest = contexts
    found = []
    high = most
    while high > 1:
        low = max(1, high // _EIGHTH)
        if any(_far_below(timing, grid, b, context) for b in (low, high)):
            line = _secant(grid, low, high, context, max(longest, context + 1))
            found.append(replace(timing, lines=(*timing.lines, line)))
        high = low
    return tuple(found) or (timing,)


def _far_below(timing: EngineTiming, grid: EngineGrid, sequences: int, context: float) -> bool:
    below = timing.iteration_seconds(sequences, sequences * context)
    return below < (1 - _NEAR) * grid.decode_seconds(sequences, context)


def _secant(grid: EngineGrid, low: int, high: int, context: float, longest: float) -> IterationLine:
    middle = (low + high) / 2
    rise = grid.decode_seconds(middle, longest) - grid.decode_seconds(middle, context)
    slope = max(0.0, rise / (middle * (longest - context)))
    at_low, at_high = (max(0.0, grid.decode_seconds(b, context) - slope * b * context) for b in (low, high))
    rate = max(0.0, (at_high - at_low) / (high - low))
    return IterationLine(max(0.0, at_low - rate * low), rate, slope)
