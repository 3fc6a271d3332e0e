"""Samples ("draws") of a record, which imitate other parts of the same traffic: longer prompts or answers, at a higher
rate.

Invariant: the same record gives the same draws. A draw has the record's first arrivals at a higher rate. Its requests
are drawn from the record, in the record's order, with weights that raise one mean length. A request that is drawn again
has a prefix of its own.

Mean lengths and rates of traffic drift far more than chance explains. The drift is measured between parts of the record
and shrunk towards the drift of a public trace, more strongly for fewer requests. The load is a mean length times a
rate. A draw moves both by `_DEVIATIONS` standard deviations in all, in the direction that raises the load most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from libra.cost.grid import Array
from libra.sim.workload.requests import RecordedRequest

# Standard deviation of the mean lengths of 300 requests and of the mean time between them, as shares:
# `python -m benchmarks.search --only windows` measures it over the hour of Azure's trace of conversations (2023).
PROMPT_DRIFT, ANSWER_DRIFT, GAP_DRIFT = 0.18, 0.25, 0.22
PROMPTS, ANSWERS = "longer prompts", "longer answers"  # names of draws
_DEVIATIONS = 3.0
_PARTS = 8  # parts of a record, between which its own drift is measured
_PRIOR = 1000  # weight of the public trace's drift, in requests
_MOST = 1500  # most requests of a draw
_FEWEST = 0.25  # least effective share of the requests, so that a draw does not repeat only a few


@dataclass(frozen=True, slots=True)
class Draw:
    """Requests of a record, drawn with weights. They arrive `density` times as fast as in the record."""

    name: str
    requests: tuple[RecordedRequest, ...]
    density: float


@lru_cache(maxsize=8)
def draws(record: tuple[RecordedRequest, ...]) -> tuple[Draw, ...]:
    """The draws of a record, usually the hardest to serve first. A length that is equal in all requests has no draw."""
    return tuple(_draws(record))


def _draws(record: tuple[RecordedRequest, ...]) -> Iterator[Draw]:
    arrivals = np.array([it.arrival for it in record], dtype=float)
    gaps, most = np.diff(arrivals), _MOST if arrivals[:_MOST][-1] > arrivals[0] else len(record)
    begun = (arrivals - arrivals[0])[:most]
    for name, lengths, drift in (
        (PROMPTS, [it.prompt_tokens for it in record], PROMPT_DRIFT),
        (ANSWERS, [it.output_tokens for it in record], ANSWER_DRIFT),
    ):
        if len(set(lengths)) > 1:
            tokens = np.array(lengths, dtype=float)
            longer, denser = raised(tokens, drift, gaps)
            places = _drawn(_weights(tokens, longer), len(begun))
            slots = begun * (gaps.mean() * (len(begun) - 1) / (begun[-1] * denser))
            yield Draw(name, _requests(record, slots, places), denser)


def raised(lengths: Array, prior: float, gaps: Array) -> tuple[float, float]:
    """Mean length and rate of a draw, as multiples of the record's.

    The mean lengths of the record and of another part of the traffic both drift. The mean of a short record drifts as
    far as the mean of a part, and the mean of a long record hardly drifts. Since the search chooses the record's rate,
    only the other part's rate drifts.
    """
    own = _PRIOR / (len(lengths) + _PRIOR)
    length, rate = drift_of(lengths, prior) ** 2 * (1 + own), drift_of(gaps, GAP_DRIFT) ** 2
    share = _DEVIATIONS / np.sqrt(length + rate)
    return float(1 + share * length), float(1 + share * rate)


def drift_of(lengths: Array, prior: float) -> float:
    """Standard deviation of a part's mean, as a share of the overall mean. `prior` is this share in other traffic."""
    means = np.array([part.mean() for part in np.array_split(lengths, min(_PARTS, len(lengths)))])
    measured, count = float(means.var() / lengths.mean() ** 2), len(lengths)
    return float(np.sqrt((measured * count + prior**2 * _PRIOR) / (count + _PRIOR)))


def _weights(lengths: Array, target: float) -> Array:
    """[requests] shares, exponential in the length, with a mean length of `target` times the mean; or the longest mean
    at which the effective share of requests is `_FEWEST`. Of all weights with this mean, they change the distribution
    least."""
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
    """[count] rising indices of the record, by systematic resampling."""
    places: Array = np.searchsorted(np.cumsum(weights), (np.arange(count) + 0.5) / count).clip(0, len(weights) - 1)
    return places


def _requests(record: Sequence[RecordedRequest], slots: Array, places: Array) -> tuple[RecordedRequest, ...]:
    drawn: Counter[int] = Counter()
    made = []
    for slot, place in zip(slots.astype(int).tolist(), places.tolist(), strict=True):
        request, copies = record[place], drawn[place]
        drawn[place] += 1
        prefix = request.prefix if request.prefix is None or not copies else f"{request.prefix}, copy {copies + 1}"
        made.append(replace(request, arrival=slot, prefix=prefix))
    return tuple(made)
