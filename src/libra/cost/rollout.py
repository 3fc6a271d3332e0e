"""What trajectories cost on rollout engines, in engine seconds (work) and in waiting (residence).

Invariant: every price is linear in the trajectories given to an engine, so shares of them add up. An engine is short
of seats (as many sequences decode together) or short of KV memory; it needs time for whichever asks for more, under
every affine lower bound of its iterations, so all of them are priced. `C / K` below reads: C token-iterations of
context, at most K of them in one iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from libra.cost.device import EngineCost
from libra.cost.grid import IterationLine
from libra.lengths import TrajectoryClass


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of one engine: decode iterations from below, prefill, and what each turn costs besides."""

    lines: tuple[IterationLine, ...]  # each holds for up to the seats that it was made for
    per_prefill_token: float
    per_prefill_context: float  # for each pair of a new token and a token before it
    per_turn: float

    def iteration_seconds(self, sequences: float, context_tokens: float) -> float:
        return max(
            line.step + line.per_sequence * sequences + line.per_context_token * context_tokens for line in self.lines
        )


def measured_timing(cost: EngineCost) -> EngineTiming:
    """The timing of an engine whose iterations were measured to be affine."""
    line = IterationLine(cost.step, cost.per_sequence, cost.per_context_token)
    return EngineTiming((line,), cost.per_prefill_token, 0.0, cost.per_turn)


def concurrency(max_num_seqs: int, in_flight: int, engines: int) -> int:
    """Sequences, at least 1, that decode together on one of `engines` engines with `in_flight` trajectories open."""
    return max(1, min(max_num_seqs, in_flight // engines))


def work(timing: EngineTiming, cls: TrajectoryClass, seats: int, kv_tokens: int) -> tuple[float, ...]:
    """Engine seconds per trajectory, from below: for each line, short of seats and short of memory.

    With I iterations, the sum of `step + per_sequence*b + per_context_token*S` over them is `step*I + per_sequence*G +
    per_context_token*C`. G tokens at most `seats` at a time take I >= G / seats iterations; C at most K at a time take
    I >= C / K.
    """
    rows = []
    for line in timing.lines:
        busy = (
            line.per_sequence * cls.generated
            + line.per_context_token * cls.context_sum
            + prefill_seconds(timing, cls)
            + timing.per_turn * cls.turns
        )
        rows.append(busy + line.step * cls.generated / seats)
        rows.append(busy + line.step * cls.context_sum / kv_tokens)
    return tuple(rows)


def prefill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill a trajectory's prompt and tool returns, each once.

    They come spread over its growing context, so a prefilled token has half the final context before it on average.
    """
    return cls.prefill * (timing.per_prefill_token + timing.per_prefill_context * cls.mean_context / 2)


def refill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill the whole context of a trajectory again, at a random token of its generation."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return context * (timing.per_prefill_token + timing.per_prefill_context * context / 2)


def residence(timing: EngineTiming, cls: TrajectoryClass, seats: int, kv_tokens: int, draws: float) -> float:
    """Seconds from the first token to the last of the longest of `draws` trajectories of the class.

    The other seats are taken by trajectories of the same class, as many as memory holds. Generation and tools are as
    much longer than the class's mean as the largest of so many draws of a normal distribution is expected to be.
    """
    beyond = expected_largest(draws)
    longer = 1 + beyond * cls.generated_std / cls.generated if cls.generated else 1.0
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    together = min(float(seats), max(1.0, kv_tokens / context)) if context else float(seats)
    decode = longer * cls.generated * timing.iteration_seconds(together, together * context)
    apart = prefill_seconds(timing, cls) + timing.per_turn * cls.turns
    return decode + apart + cls.tool_seconds + beyond * cls.tool_seconds_std


def expected_largest(draws: float) -> float:
    """Expected largest of `draws` standard normal numbers, in standard deviations; 0 for one draw or fewer.

    Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958), within 2 % from two draws on.
    """
    return 0.0 if draws <= 1 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def affordable_seats(kv_tokens: int, most: int) -> tuple[int, ...]:
    """Numbers of seats worth telling apart: powers of two up to `most`, and `most` itself, that memory can hold."""
    least = min(most, kv_tokens)
    return tuple(sorted({2**k for k in range(int(math.log2(least)) + 1)} | {least}))
