"""Iteration prices fitted to the steps of a calibration: one price list for decodes, prefills and both at once.

Invariant: no coefficient is negative, and none belongs to a workload. An iteration is priced by all its tokens
together, which share the linear layers, by what each part attends to, and by the requests that come and go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.fidelity.step import Step
from libra.cost.grid import EngineGrid
from libra.cost.lines import fit_linear
from libra.sim.clock import seconds, ticks
from libra.sim.engine.iteration_cost import NONE_ADMITTED, UNLIMITED, Admitted, Chunk, DecodeBatch

# A step's tokens, between which its linear layers are linear. Below 8, kernels differ from one number to the next.
TOKEN_KNOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CONTEXT_KNOTS = (0, 8192)  # attended tokens, after each of which one more has a price of its own


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds. `error` is the mean relative error of calibration steps, each predicted from all others."""

    tokens: tuple[float, ...]  # of a step with as many tokens as each of TOKEN_KNOTS, before what they attend to
    per_context_token: tuple[float, ...]  # attended to by decodes, added from each of CONTEXT_KNOTS on
    per_pair: float  # of a new token of a chunk and one it attends to
    per_chunk_token: float  # of the context that a chunk attends to, its own tokens included
    per_sequence: float
    per_admitted: float
    per_finished: float
    per_change: float  # of the batch, in the step after it: when a chunk was computed, or a request ended
    per_added: float  # taking in a request that has arrived
    per_added_token: float  # of its prompt
    error: float

    def iteration(self, decoding: int, context: int, chunks: Sequence[Chunk]) -> float:
        """Seconds of an iteration in which no request comes or goes."""
        features = _features(decoding, context, chunks)
        return sum(price * amount for price, amount in zip(self._coefficients(), features, strict=True))

    def step(self, step: Step) -> float:
        """Seconds of a whole step, with the requests that come and go."""
        return (
            self.iteration(step.decodes, step.attended, step.chunks)
            + self.per_admitted * step.admitted
            + self.per_finished * step.finished
            + self.per_change * step.changed
            + self.per_added * step.added
            + self.per_added_token * step.added_tokens
        )

    def _coefficients(self) -> tuple[float, ...]:
        return (*self.tokens, *self.per_context_token, self.per_pair, self.per_chunk_token, self.per_sequence)


def fit_prices(rounds: Sequence[Sequence[Step]]) -> Prices:
    """Non-negative least squares of relative errors. `rounds` are repeats of the same steps, of which means count: what
    is predicted are sums of steps, and what disturbs a step of a machine in use only makes it longer.

    Raises ValueError where the rounds differ in more than their times.
    """
    rows, times, arrivals, adding = [], [], [], []
    for repeats in zip(*rounds, strict=True):
        step = repeats[0]
        if any(_work(other) != _work(step) for other in repeats):
            raise ValueError("the rounds are of different steps: calibrate them on one engine, with one grid")
        features = _features(step.decodes, step.attended, step.chunks)
        rows.append((*features, float(step.admitted), float(step.finished), float(step.changed)))
        times.append(fmean(seconds(repeat.duration) for repeat in repeats))
        if step.added:
            arrivals.append((float(step.added), float(step.added_tokens)))
            adding.append(fmean(seconds(repeat.adding) for repeat in repeats))
    fitted = fit_linear(rows, times)
    prices = list(fitted.coefficients)
    knots, bends = len(TOKEN_KNOTS), len(CONTEXT_KNOTS)
    pair, chunk_token, sequence, admitted, finished, change = prices[knots + bends :]
    added, added_token = fit_linear(arrivals, adding).coefficients
    return Prices(
        tokens=tuple(prices[:knots]),
        per_context_token=tuple(prices[knots : knots + bends]),
        per_pair=pair,
        per_chunk_token=chunk_token,
        per_sequence=sequence,
        per_admitted=admitted,
        per_finished=finished,
        per_change=change,
        per_added=added,
        per_added_token=added_token,
        error=fitted.heldout_error,
    )


def engine_grid(prices: Prices, batches: Sequence[int], contexts: Sequence[int], prefixes: Sequence[int]) -> EngineGrid:
    """The same as a grid, which planner and simulator read: decodes by batch and context, prefills by chunk and prefix.

    What an iteration pays for requests that come and go is left out.
    """
    return EngineGrid(
        tp=1,
        batches=tuple(batches),
        contexts=tuple(contexts),
        decode=tuple(tuple(prices.iteration(b, b * c, ()) for c in contexts) for b in batches),
        chunks=TOKEN_KNOTS,
        prefixes=tuple(prefixes),
        prefill=tuple(tuple(prices.iteration(0, 0, [(chunk, p)]) for p in prefixes) for chunk in TOKEN_KNOTS),
    )


class FittedCost:
    """`Prices` as the simulator asks for them, in whole ticks.

    It asks for no price of requests that come and go. Each has one first chunk, so a chunk pays for them, and for the
    change that its end is: a prompt that is cut in several, or prefilled again after a preemption, pays too much by as
    many times as that happens. The change that a chunk is, an iteration with chunks pays itself, not the next one.
    """

    def __init__(self, prices: Prices) -> None:
        self._tokens = tuple(ticks(price) for price in prices.tokens)
        self._context = tuple(ticks(price) for price in prices.per_context_token)
        self._pair = ticks(prices.per_pair)
        self._chunk_token = ticks(prices.per_chunk_token + prices.per_added_token)
        self._sequence = ticks(prices.per_sequence)
        self._change = ticks(prices.per_change)
        self._request = ticks(prices.per_admitted + prices.per_finished + prices.per_change + prices.per_added)

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        """(base, slope, limit), as `IterationCost` says."""
        base, slope, limit = self._linear(batch.requests) + self._sequence * batch.requests, 0, UNLIMITED
        for knot, price in zip(CONTEXT_KNOTS, self._context, strict=True):
            if context < knot:
                limit = knot
                break
            base -= price * knot
            slope += price
        return base, slope, limit

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        """Ticks of an iteration with one prefill chunk or more, as `IterationCost` says."""
        decoding = batch.requests
        total = self._linear(decoding + sum(new for new, _ in chunks)) + self._sequence * (decoding + len(chunks))
        for knot, price in zip(CONTEXT_KNOTS, self._context, strict=True):
            total += price * max(0, context - knot)
        for new, before in chunks:
            total += self._pair * (new * before + new * (new + 1) // 2) + self._chunk_token * (before + new)
        return total + self._request * len(chunks) + self._change

    def _linear(self, tokens: int) -> int:
        left = min(max(bisect_right(TOKEN_KNOTS, tokens) - 1, 0), len(TOKEN_KNOTS) - 2)
        low, high = TOKEN_KNOTS[left], TOKEN_KNOTS[left + 1]
        return ((high - tokens) * self._tokens[left] + (tokens - low) * self._tokens[left + 1]) // (high - low)


@dataclass(frozen=True, slots=True)
class Residual:
    """Error of the prices for steps of one kind, relative to the time that those took."""

    kind: str  # decode, prefill, several prefills, mixed
    steps: int
    seconds: float  # that all of them took
    bias: float  # of the sum of predictions; above 0: too long
    error: float  # mean of the absolute errors


def residuals(prices: Prices, steps: Sequence[Step]) -> tuple[Residual, ...]:
    """Residuals of all steps, by kind."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        pair = prices.step(step), seconds(step.adding + step.duration)
        kinds.setdefault(_kind(step), []).append(pair)
    return tuple(
        Residual(
            kind=kind,
            steps=len(pairs),
            seconds=sum(taken for _, taken in pairs),
            bias=sum(predicted for predicted, _ in pairs) / sum(taken for _, taken in pairs) - 1,
            error=fmean(abs(predicted / taken - 1) for predicted, taken in pairs),
        )
        for kind, pairs in sorted(kinds.items())
    )


def _features(decoding: int, context: int, chunks: Sequence[Chunk]) -> list[float]:
    """In the order of the coefficients of `Prices`."""
    tokens = decoding + sum(new for new, _ in chunks)
    left = min(max(bisect_right(TOKEN_KNOTS, tokens) - 1, 0), len(TOKEN_KNOTS) - 2)
    part = (tokens - TOKEN_KNOTS[left]) / (TOKEN_KNOTS[left + 1] - TOKEN_KNOTS[left])
    linear = [0.0] * len(TOKEN_KNOTS)
    linear[left], linear[left + 1] = 1 - part, part
    return [
        *linear,
        *(float(max(0, context - knot)) for knot in CONTEXT_KNOTS),
        float(sum(new * before + new * (new + 1) // 2 for new, before in chunks)),
        float(sum(before + new for new, before in chunks)),
        float(decoding + len(chunks)),
    ]


def _work(step: Step) -> tuple[object, ...]:
    coming_and_going = (step.added, step.added_tokens, step.admitted, step.finished, step.changed)
    return step.decodes, step.attended, step.chunks, *coming_and_going


def _kind(step: Step) -> str:
    if not step.chunks:
        return "decode"
    if step.decodes:
        return "mixed"
    return "prefill" if len(step.chunks) == 1 else "several prefills"
