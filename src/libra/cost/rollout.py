"""Cost of trajectories on rollout engines, in engine seconds (work) and in waiting (residence).

Invariant: every price is linear in the trajectories given to an engine, so shares of them add up. An engine is limited
by its seats (sequences that decode together) or by KV memory. The tighter limit counts, under every affine lower bound
of its iterations, so all of them are priced. `C / K` below means: C token-iterations of context, at most K of them in
one iteration. If a step waits for its whole batch, all of it starts at once on empty engines, and the number of seats
is no bound. An engine that generates in I iterations then takes `step * I + per_sequence * G + per_context_token * C`,
where I is the number of tokens of its longest trajectory. So a batch takes the work of all its trajectories
(`batch_work`), which engines share, plus that of its longest trajectory (`libra.cost.longest`), which they cannot
share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.cost.corrections import BatchFactors
from libra.cost.device import EngineCost
from libra.cost.grid import EngineGrid
from libra.cost.lines import IterationLine
from libra.lengths import TrajectoryClass

_NEAR = 0.05  # relative distance of lower bounds from the grid up to which there are no secants
_EIGHTH = 8  # ratio between the ends of a secant


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of one engine: lower bounds of decode iterations, prefill, and further costs of each turn."""

    lines: tuple[IterationLine, ...]  # each holds up to the number of seats that it was made for
    per_prefill_token: float
    per_prefill_context: float  # for each pair of a new token and a token before it
    per_turn: float
    per_admitted_token: float = 0.0  # of the context that a turn is admitted with, mostly cached

    def iteration_seconds(self, sequences: float, context_tokens: float) -> float:
        return max(
            line.step + line.per_sequence * sequences + line.per_context_token * context_tokens for line in self.lines
        )


def measured_timing(cost: EngineCost) -> EngineTiming:
    """The timing of an engine with iterations measured to be affine."""
    line = IterationLine(cost.step, cost.per_sequence, cost.per_context_token)
    return EngineTiming((line,), cost.per_prefill_token, 0.0, cost.per_turn)


def concurrency(max_num_seqs: int, in_flight: int, engines: int) -> int:
    """Sequences, at least 1, that decode together on one of `engines` engines with `in_flight` trajectories open."""
    return max(1, min(max_num_seqs, in_flight // engines))


def work(timing: EngineTiming, cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int) -> tuple[float, ...]:
    """Lower bounds of engine seconds per trajectory: for each line, one by seats and one by memory.

    With I iterations, the sum of `step + per_sequence*b + per_context_token*S` over them is `step*I + per_sequence*G +
    per_context_token*C`. G tokens at most `max_num_seqs` at a time take I >= G / max_num_seqs iterations;
    C at most K at a time take I >= C / K.
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
    """Engine seconds to prefill a trajectory's prompt and tool returns, each once.

    They are spread over its growing context, so a prefilled token or an admitted turn has half the final context before
    it on average.
    """
    token, admission = prompt_seconds(timing, cls.mean_context)
    return cls.prefill * token + cls.turns * (admission - timing.per_turn)


def prompt_seconds(timing: EngineTiming, final_context: float) -> tuple[float, float]:
    """Engine seconds of each prefilled token, and of each turn, of a trajectory with this final context."""
    half = final_context / 2
    return (
        timing.per_prefill_token + timing.per_prefill_context * half,
        timing.per_turn + timing.per_admitted_token * half,
    )


def refill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill the whole context of a trajectory again, at a random token of its generation."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return context * (timing.per_prefill_token + timing.per_prefill_context * context / 2)


def seats_taken(cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int) -> float:
    """Sequences of the class that decode together on an engine of `max_num_seqs` seats, as far as memory holds them."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return min(float(max_num_seqs), max(1.0, kv_tokens / context)) if context else float(max_num_seqs)


def batch_work(timing: EngineTiming, cls: TrajectoryClass, kv_tokens: int, factors: BatchFactors) -> tuple[float, ...]:
    """Engine seconds per trajectory of a batch that starts at once, for each line, without its longest trajectory."""
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
    """Timings, each near the grid for some numbers of sequences up to `most` >= 1; any of them may be used.

    A mixture of experts reads more experts when there are more tokens, so its iterations are concave in the number of
    sequences, and lower bounds are far from them. Each timing adds one secant at the mean context (the first of
    `contexts`; the other is the longest): from `most` to an eighth of it, then from there to an eighth of that, and so
    on. The cheapest timing is the nearest one. If lower bounds are near, there is only the timing itself.
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
