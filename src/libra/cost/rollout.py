"""What trajectories cost on rollout engines, in engine seconds (work) and in waiting (residence).

Invariant: every price is linear in the trajectories given to an engine, so shares of them add up. An engine is short
of seats (as many sequences decode together) or short of KV memory; it needs time for whichever asks for more, under
every affine lower bound of its iterations, so all of them are priced. `C / K` below reads: C token-iterations of
context, at most K of them in one iteration.

Where a step waits for its whole batch, all of it starts at once on empty engines, and seats that are taken one after
the other are not what bounds it. Then an engine that generates in I iterations takes `step * I + per_sequence * G +
per_context_token * C`, and I is what its longest trajectory generates. So a batch takes what all its trajectories ask
of the engines (`batch_work`, which engines share), and its longest trajectory alone (`Longest`, which they cannot).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from libra.cost.corrections import BatchFactors
from libra.cost.device import EngineCost
from libra.cost.grid import EngineGrid
from libra.cost.lines import IterationLine
from libra.lengths import TrajectoryClass

_NEAR = 0.05  # relative: lines from below that come as near need no help from secants
_EIGHTH = 8  # between the ends of a secant
_WIDEST = 1e150  # times its mean that the deviation of tool times counts as: its square is a number


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of one engine: decode iterations from below, prefill, and what each turn costs besides."""

    lines: tuple[IterationLine, ...]  # each holds for up to the seats that it was made for
    per_prefill_token: float
    per_prefill_context: float  # for each pair of a new token and a token before it
    per_turn: float
    per_admitted_token: float = 0.0  # of the context that a turn is admitted with, mostly cached

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


def work(timing: EngineTiming, cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int) -> tuple[float, ...]:
    """Engine seconds per trajectory, from below: for each line, short of seats and short of memory.

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

    They come spread over its growing context, so a prefilled token has half the final context before it on average, and
    so has a turn that is admitted.
    """
    seconds = cls.prefill * (timing.per_prefill_token + timing.per_prefill_context * cls.mean_context / 2)
    return seconds + timing.per_admitted_token * cls.turns * cls.mean_context / 2


def refill_seconds(timing: EngineTiming, cls: TrajectoryClass) -> float:
    """Engine seconds to prefill the whole context of a trajectory again, at a random token of its generation."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    return context * (timing.per_prefill_token + timing.per_prefill_context * context / 2)


def residence(timing: EngineTiming, cls: TrajectoryClass, max_num_seqs: int, kv_tokens: int, draws: float) -> float:
    """Seconds from the first token to the last of the longest of `draws` trajectories of the class.

    The other seats are taken by trajectories of the same class, as many as memory holds. Generation and tools are as
    much longer than the class's mean as the largest of so many draws of a normal distribution is expected to be.
    """
    beyond = expected_largest(draws)
    longer = 1 + beyond * cls.generated_std / cls.generated if cls.generated else 1.0
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    together = min(float(max_num_seqs), max(1.0, kv_tokens / context)) if context else float(max_num_seqs)
    decode = longer * cls.generated * timing.iteration_seconds(together, together * context)
    apart = prefill_seconds(timing, cls) + timing.per_turn * cls.turns
    return decode + apart + cls.tool_seconds + beyond * cls.tool_seconds_std


def batch_work(timing: EngineTiming, cls: TrajectoryClass, kv_tokens: int, factors: BatchFactors) -> tuple[float, ...]:
    """Engine seconds per trajectory of a batch that starts at once, for each line; besides, there is `Longest`."""
    apart = factors.prefill * prefill_seconds(timing, cls) + timing.per_turn * cls.turns
    return tuple(
        factors.decode * (line.per_sequence * cls.generated + line.per_context_token * cls.context_sum)
        + factors.memory * line.step * cls.context_sum / kv_tokens
        + apart
        for line in timing.lines
    )


def refills(timing: EngineTiming, cls: TrajectoryClass, factors: BatchFactors) -> float:
    """Engine seconds per trajectory if every turn after the first finds its context gone, and prefills it again."""
    return factors.eviction * max(0.0, cls.turns - 1) * refill_seconds(timing, cls)


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest of some trajectories of a class, if no other were beside it.

    Tokens are taken to be normal and limited by the class's peak; seconds of tools have longer tails: log-normal. Who
    generates most is seldom who waits longest: beyond their means the two add up like independent deviations.
    """

    generates: float  # seconds in which the mean trajectory generates
    waits: float  # seconds in which its tools run
    generates_more: float  # the longest by itself, beyond the mean
    waits_more: float

    def seconds(self, slowed: float = 1.0) -> float:
        """Where others make generation take `slowed` times as long. Convex: the longest is another one then."""
        more = math.hypot(slowed * self.generates_more, self.waits_more)
        return slowed * self.generates + self.waits + more


def longest_of(timing: EngineTiming, cls: TrajectoryClass, draws: float, factors: BatchFactors) -> Longest:
    """The longest of `draws` trajectories of the class."""
    beyond = expected_largest(draws)
    longest = min(float(cls.peak_context), cls.generated + beyond * cls.generated_std)
    mean, most = (factors.generation * _alone(timing, cls, tokens) for tokens in (cls.generated, longest))
    waits_more = factors.tools * max(0.0, _longest_tools(cls, beyond) - cls.tool_seconds)
    return Longest(mean, factors.tools * cls.tool_seconds, max(0.0, most - mean), waits_more)


def longest_upto(seconds: Sequence[float], draws: Sequence[float]) -> tuple[float, ...]:
    """[class] seconds to expect of the longest trajectory of all classes up to each one, given the longest of each.

    `draws` trajectories of each class are expected; as many as a Poisson distribution says come. So a class that is
    rarely met counts by how often it is.
    """
    order = np.argsort(-np.asarray(seconds), kind="stable")
    ranked, counts = np.asarray(seconds)[order], np.asarray(draws)[order]
    counted = counts[:, None] * (order[:, None] <= np.arange(len(order)))  # [rank, class]
    longer = np.cumsum(counted, axis=0) - counted
    found: list[float] = (np.exp(-longer) * -np.expm1(-counted) * ranked[:, None]).sum(axis=0).tolist()
    return tuple(found)


def _longest_tools(cls: TrajectoryClass, beyond: float) -> float:
    """Seconds of tools that are `beyond` standard deviations longer than the class's, in the logarithm."""
    if not cls.tool_seconds:
        return 0.0
    variance = math.log1p(min(cls.tool_seconds_std / cls.tool_seconds, _WIDEST) ** 2)
    return cls.tool_seconds * math.exp(beyond * math.sqrt(variance) - variance / 2)


def secant_timings(
    timing: EngineTiming, grid: EngineGrid, most: int, contexts: tuple[float, float]
) -> tuple[EngineTiming, ...]:
    """Timings that each come near the grid for some numbers of sequences up to `most` >= 1: any of them may be used.

    A mixture of experts reads the more experts the more tokens there are, so its iterations are concave in the
    sequences, and lines from below are far from them. Each timing adds the line through `most`, an eighth of it, ...
    and an eighth of that, at the mean context (the first of `contexts`; the other is the longest). The cheapest timing
    is the nearest one. Where lines from below are near, there is only the timing itself.
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


def _alone(timing: EngineTiming, cls: TrajectoryClass, generated: float) -> float:
    """Engine seconds of a trajectory with no other beside it, tools left out."""
    context = cls.context_sum / cls.generated if cls.generated else 0.0
    decode = generated * timing.iteration_seconds(1.0, context)
    return decode + prefill_seconds(timing, cls) + timing.per_turn * cls.turns


def expected_largest(draws: float) -> float:
    """Expected largest of `draws` standard normal numbers, in standard deviations; 0 for one draw or fewer.

    Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958), within 2 % from two draws on.
    """
    return 0.0 if draws <= 1 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
