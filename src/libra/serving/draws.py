"""Draws of a record that imitate other parts of the same traffic: longer prompts, and longer answers.

Invariant: the same record gives the same draws. A draw has the record's first arrivals, and requests of the record in
their order, drawn with weights that raise one mean length; a request that is drawn again has a prefix of its own.

The mean lengths of traffic drift by far more than chance explains. The drift is measured between parts of the record
and shrunk towards that of a public trace, more strongly for fewer requests. A draw raises the mean by twice the drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from libra.cost.grid import Array
from libra.sim.workload.requests import RecordedRequest

# Standard deviation of the mean lengths of 300 requests, as shares: `python -m benchmarks.search --only windows`
# measures it over the hour of Azure's trace of conversations (2023).
PROMPT_DRIFT, ANSWER_DRIFT = 0.18, 0.25
PROMPTS, ANSWERS = "longer prompts", "longer answers"  # names of draws
_DEVIATIONS = 2.0
_PARTS = 8  # of a record, between which its own drift is measured
_PRIOR = 1000  # weight of the trace's drift, in requests
_MOST = 1500  # requests of a draw
_FEWEST = 0.25  # least effective share of the requests: with fewer, a draw would repeat a few of them


@dataclass(frozen=True, slots=True)
class Draw:
    """Requests of a record, drawn with weights."""

    name: str
    requests: tuple[RecordedRequest, ...]


@lru_cache(maxsize=8)
def draws(record: tuple[RecordedRequest, ...]) -> tuple[Draw, ...]:
    """The draws of a record, usually the hardest to serve first; none for a length that all requests share."""
    return tuple(_draws(record))


def _draws(record: tuple[RecordedRequest, ...]) -> Iterator[Draw]:
    prompts = np.array([it.prompt_tokens for it in record], dtype=float)
    answers = np.array([it.output_tokens for it in record], dtype=float)
    for name, lengths, drift in ((PROMPTS, prompts, PROMPT_DRIFT), (ANSWERS, answers, ANSWER_DRIFT)):
        weights = _weights(lengths, 1 + _DEVIATIONS * drift_of(lengths, drift))
        if len(set(lengths)) > 1:
            most = _MOST if record[:_MOST][-1].arrival > record[0].arrival else len(record)
            places = _drawn(weights, min(len(record), most))
            yield Draw(name, _requests(record, places))


def drift_of(lengths: Array, prior: float) -> float:
    """Standard deviation of a part's mean length, as a share of the overall mean; `prior` is that of other traffic."""
    means = np.array([part.mean() for part in np.array_split(lengths, min(_PARTS, len(lengths)))])
    measured, count = float(means.var() / lengths.mean() ** 2), len(lengths)
    return float(np.sqrt((measured * count + prior**2 * _PRIOR) / (count + _PRIOR)))


def _weights(lengths: Array, target: float) -> Array:
    """[requests] shares, exponential in the length, with a mean length of `target` times the mean, or the longest with
    an effective share of requests of `_FEWEST`. Of all weights with that mean they change the distribution least."""
    low, high = 0.0, 64.0
    scaled = lengths / lengths.mean()

    def tilted(slope: float) -> Array:
        weights = np.exp(slope * (scaled - scaled.max()))
        shares: Array = weights / weights.sum()
        return shares

    for _ in range(50):
        slope = (low + high) / 2
        weights = tilted(slope)
        fits = weights @ scaled <= target and 1 / (weights**2).sum() >= _FEWEST * len(lengths)
        low, high = (slope, high) if fits else (low, slope)
    return tilted(low)


def _drawn(weights: Array, count: int) -> Array:
    """[count] places in the record, rising: systematic resampling."""
    places: Array = np.searchsorted(np.cumsum(weights), (np.arange(count) + 0.5) / count).clip(0, len(weights) - 1)
    return places


def _requests(record: Sequence[RecordedRequest], places: Array) -> tuple[RecordedRequest, ...]:
    drawn: Counter[int] = Counter()
    made = []
    for slot, place in zip(record, places.tolist(), strict=False):
        request, copies = record[place], drawn[place]
        drawn[place] += 1
        prefix = request.prefix if request.prefix is None or not copies else f"{request.prefix}, copy {copies + 1}"
        made.append(replace(request, arrival=slot.arrival, prefix=prefix))
    return tuple(made)
