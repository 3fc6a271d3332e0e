"""Agentic tasks whose attempts grow longer as the policy is trained.

Invariant: a group follows from its number, its version, the seed and the shape alone. Causes come first: a prompt has
a difficulty, an attempt a length, and a tool return is drawn by what then remains; nothing depends on where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.sim.training_run.episodes import Episodes, generator_of, prompt_at
from libra.trajectory import Trajectory, Turn, truncate
from tests.oracles.workloads.task_shape import TaskShape, ToolOutcome

_PROMPTS, _GROUP = 0x70726F6D707473, 0x67726F7570  # streams of one seed

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]


class _Prompts(NamedTuple):
    """Properties of the prompts of the data set, as [prompt] arrays."""

    task: Indices
    difficulty: Numbers  # the prompt's part of an attempt's difficulty, where attempts have variance 1
    tokens: Indices


class _Lengths(NamedTuple):
    """Parameters of the length classes, as [class] arrays."""

    log_median: Numbers
    sigma: Numbers
    turns_log_median: Numbers
    turns_sigma: Numbers


class _Tools(NamedTuple):
    """Parameters of the tool outcomes, in the order of `typical_until`. A level has all outcomes with the same.

    Choices compare a standard normal with cuts, its quantiles, so that one kind of draw serves for all.
    """

    outcomes: tuple[ToolOutcome, ...]
    bounds: Numbers  # [level - 1] tokens up to which each level but the last is typical
    level_cuts: Numbers  # [level - 1] of a level by its share
    first: Indices  # [level] index of its first outcome
    outcome_cuts: Numbers  # [level, most outcomes of one - 1] of an outcome by its share of its level; +inf: no more
    tells_cut: float  # below it, a return is typical
    returned: Numbers  # [outcome, 2] log median and sigma
    seconds: Numbers


@dataclass(frozen=True, slots=True)
class DriftingTasks:
    """`Episodes` of one shape: the drift takes `steps` versions; after that, lengths stay as they are.

    An attempt at prompt p has the difficulty sqrt(`task_share`) T + sqrt(`prompt_share`) P + sqrt(rest) E, with T of
    p's task and P of p itself, each of mean 0 and variance 1. Its length class is the one that its rank by difficulty
    falls into, by the classes' shares at this version. The tokens that it generates are split over its turns. After
    each turn but the last a tool returns, and with probability `tool_signal` its outcome is one that is typical of the
    tokens that then remain to be generated. A trajectory that would outgrow `max_context` ends there.

    The number of a group gives its draws and its version scales them: equal numbers are attempts at the same prompt.
    """

    shape: TaskShape
    seed: int
    steps: int
    _prompts: _Prompts = field(init=False, repr=False, compare=False)
    _lengths: _Lengths = field(init=False, repr=False, compare=False)
    _tools: _Tools = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Derived once, as `group` is called thousands of times.
        object.__setattr__(self, "_prompts", _make_prompts(self.shape, self.seed))
        object.__setattr__(self, "_lengths", _make_lengths(self.shape))
        object.__setattr__(self, "_tools", _make_tools(self.shape))

    @property
    def samples_per_prompt(self) -> int:
        return self.shape.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.shape.max_context

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        prompt = prompt_at(number, self.shape.prompts, self.seed)
        drifted = min(version / self.steps, 1.0)
        generator = generator_of(self.seed, _GROUP, number)
        generated, turns = self._sizes(prompt, drifted, generator)
        # Turn by turn, so that the first ones are the same however many there are.
        draws = generator.standard_normal((int(turns.max()), 6, self.samples_per_prompt))
        size, tells, level, pick, returned, seconds = draws.swapaxes(0, 1)
        taken = np.arange(len(size))[:, None] < turns
        weights = np.exp(self.shape.turn_sigma * size) * taken
        tokens = generated * weights / weights.sum(axis=0)
        remaining = generated - tokens.cumsum(axis=0)
        tools = self._tools
        outcome = _outcomes(tools, remaining, tells, level, pick)
        payload = _lognormal(tools.returned, outcome, returned, self.shape.returned_limit)
        # Whole milliseconds: the last bits of an exponential depend on the machine.
        duration = np.round(_lognormal(tools.seconds, outcome, seconds, self.shape.seconds_limit), 3)
        task, prompt_tokens = self.shape.tasks[self._prompts.task[prompt]], int(self._prompts.tokens[prompt])
        whole = np.maximum(np.rint(tokens), 1).astype(np.int64)
        counts = np.maximum(np.rint(payload), 1).astype(np.int64)
        # This also counts a return of the last turn, which has none; that does no harm: `truncate` keeps what fits.
        total = prompt_tokens + ((whole + counts) * taken).sum(axis=0)
        columns = (column.T.tolist() for column in (whole, outcome, counts, duration))
        made = (
            Trajectory(
                id=f"{number}/{sample}",
                prompt_id=str(prompt),
                task=task,
                prompt_tokens=prompt_tokens,
                turns=_turns(tools.outcomes, count, *of_sample),
                reward=None,
                policy_version=version,
                finished=True,
            )
            for sample, (count, *of_sample) in enumerate(zip(turns.tolist(), *columns, strict=True))
        )
        return tuple(
            truncate(trajectory, self.max_context) if long else trajectory
            for trajectory, long in zip(made, (total > self.max_context).tolist(), strict=True)
        )

    def _sizes(self, prompt: int, drifted: float, generator: np.random.Generator) -> tuple[Numbers, Indices]:
        """(generated tokens, turns) of each sample."""
        shape, lengths = self.shape, self._lengths
        own, length, many = generator.standard_normal((3, self.samples_per_prompt))
        unexplained = math.sqrt(max(1 - shape.task_share - shape.prompt_share, 0.0))
        difficulty = self._prompts.difficulty[prompt] + unexplained * own
        its = np.searchsorted(_cuts(shape.class_shares(drifted)), difficulty)
        log_generated = lengths.log_median[its] + lengths.sigma[its] * length + math.log(shape.growth) * drifted
        # Tokens are limited to what the context can hold, so that the exponent does not overflow a float.
        generated = np.exp(np.minimum(log_generated, math.log(shape.max_context)))
        turns = np.rint(np.exp(lengths.turns_log_median[its] + lengths.turns_sigma[its] * many))
        most = np.minimum(shape.max_turns, np.maximum(np.rint(generated), 1))  # a turn generates a token or more
        return generated, np.clip(turns, 1, most).astype(np.int64)


def _turns(
    outcomes: Sequence[ToolOutcome],
    count: int,
    generated: list[int],
    outcome: list[int],
    returned: list[int],
    seconds: list[float],
) -> tuple[Turn, ...]:
    """The first `count` of these turns; the last one calls no tool."""
    calls = [
        Turn(tokens, its.tool, its.status, payload, duration)
        for tokens, its, payload, duration in zip(
            generated[: count - 1], map(outcomes.__getitem__, outcome), returned, seconds, strict=False
        )
    ]
    return (*calls, Turn(generated[count - 1], None, None, 0))


def _make_prompts(shape: TaskShape, seed: int) -> _Prompts:
    generator = generator_of(seed, _PROMPTS)
    # Normal quantiles in random order: a data set of few prompts has the same mean and spread as one of many.
    task = generator.permutation(np.arange(shape.prompts) % len(shape.tasks))
    of_task = generator.permutation(_standard(len(shape.tasks)))
    own = generator.permutation(_standard(shape.prompts))
    length = generator.standard_normal(shape.prompts)
    difficulty = math.sqrt(shape.task_share) * of_task[task] + math.sqrt(shape.prompt_share) * own
    known = math.sqrt(shape.task_share + shape.prompt_share)
    standardised = difficulty / known if known > 0 else np.zeros(shape.prompts)
    noise = math.sqrt(1 - shape.prompt_correlation**2)
    exponent = math.log(shape.prompt_median) + shape.prompt_sigma * (
        shape.prompt_correlation * standardised + noise * length
    )
    tokens = np.exp(np.minimum(exponent, math.log(shape.max_context)))
    return _Prompts(task, difficulty, np.clip(np.rint(tokens), 1, shape.max_context - 1).astype(np.int64))


def _standard(count: int) -> Numbers:
    """`count` quantiles of a normal distribution, scaled to mean 0 and variance 1; a single one is 0."""
    quantiles = np.array([_quantile((rank + 0.5) / count) for rank in range(count)])
    return quantiles / quantiles.std() if count > 1 else quantiles


def _make_lengths(shape: TaskShape) -> _Lengths:
    return _Lengths(
        np.log([each.median for each in shape.lengths]),
        np.array([each.sigma for each in shape.lengths]),
        np.log([each.turns_median for each in shape.lengths]),
        np.array([each.turns_sigma for each in shape.lengths]),
    )


def _make_tools(shape: TaskShape) -> _Tools:
    outcomes = tuple(sorted(shape.tools, key=lambda outcome: outcome.typical_until))
    bounds = sorted({outcome.typical_until for outcome in outcomes})
    levels = [[outcome for outcome in outcomes if outcome.typical_until == bound] for bound in bounds]
    shares = [sum(outcome.share for outcome in level) for level in levels]
    widest = max(len(level) for level in levels)
    outcome_cuts = np.full((len(levels), widest - 1), math.inf)
    for row, level, share in zip(outcome_cuts, levels, shares, strict=True):
        row[: len(level) - 1] = _cuts([outcome.share / share for outcome in level])
    counts = np.array([len(level) for level in levels])
    return _Tools(
        outcomes,
        np.array(bounds[:-1]),
        np.array(_cuts(shares)),
        counts.cumsum() - counts,
        outcome_cuts,
        _quantile(shape.tool_signal),
        np.array([(math.log(each.returned_median), each.returned_sigma) for each in outcomes]),
        np.array([(math.log(each.seconds_median), each.seconds_sigma) for each in outcomes]),
    )


def _outcomes(tools: _Tools, remaining: Numbers, tells: Numbers, level: Numbers, pick: Numbers) -> Indices:
    """Index of each return's outcome, chosen by three standard normals."""
    typical = np.searchsorted(tools.bounds, remaining)
    by_share = np.searchsorted(tools.level_cuts, level)
    chosen = np.where(tells < tools.tells_cut, typical, by_share)
    return np.asarray(tools.first[chosen] + (pick[..., None] > tools.outcome_cuts[chosen]).sum(axis=-1))


def _lognormal(parameters: Numbers, outcome: Indices, draws: Numbers, limit: float) -> Numbers:
    log_median, sigma = parameters[outcome, 0], parameters[outcome, 1]
    return np.asarray(np.exp(np.minimum(log_median + sigma * draws, math.log(limit))))


def _cuts(shares: tuple[float, ...] | list[float]) -> list[float]:
    """Quantiles that divide a standard normal into pieces of these probabilities: one fewer than there are shares."""
    return [_quantile(float(below)) for below in np.cumsum(shares)[:-1]]


def _quantile(probability: float) -> float:
    if 0 < probability < 1:
        return NormalDist().inv_cdf(probability)
    return -math.inf if probability <= 0 else math.inf


class Around:
    """`Episodes` made of other ones, with the same sizes."""

    __slots__ = ()
    episodes: Episodes

    @property
    def samples_per_prompt(self) -> int:
        return self.episodes.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.episodes.max_context
