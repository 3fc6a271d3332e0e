"""Expected rates of candidates, from the rates of similar candidates.

Invariant: an expectation decides where a search begins and which candidates come first, but rejects no candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.serving.candidate import EnginePool, ServingCandidate
from libra.serving.draws import ANSWERS, PROMPTS

_SHORT = 0.9  # decode engines limit a pair whose rate is below this share of its prefill engines' rate
_CLOSE = 0.8  # decode engines with this share of the prefill engines' rate probably keep up


@dataclass(frozen=True, slots=True)
class Expectation:
    rate: float  # requests/s
    hardest: str  # name of the draw that probably limits the rate
    sure: bool  # whether all pools of the candidate are known


@dataclass(slots=True)
class Expectations:
    """Rates of known pools: prefill and decode engines in other pairs, and colocated engines with other batches."""

    _prefill: dict[EnginePool, float] = field(default_factory=dict)  # requests/s of pools that limited a pair
    _decode: dict[EnginePool, tuple[float, bool]] = field(default_factory=dict)  # requests/s; whether the pool limited
    _colocated: dict[tuple[object, ...], Expectation] = field(default_factory=dict)

    def learn(self, candidate: ServingCandidate, rate: float, hardest: str, most: float) -> None:
        """Learn the rate of a candidate. `most` is the rate that its prefill engines serve alone."""
        first, last = candidate.pools[0], candidate.pools[-1]
        if candidate.architecture == "colocated":
            self._colocated[_kind(last)] = Expectation(rate, hardest, True)
            return
        limits = hardest == ANSWERS and rate < _SHORT * most
        if not limits:
            self._prefill[first] = rate
        if limits or self._decode.get(last, (0.0, False))[0] < rate:
            self._decode[last] = rate, limits

    def of(self, candidate: ServingCandidate, most: float) -> Expectation | None:
        """The expectation for a candidate, at most `most` requests/s; None for colocated engines of an unknown kind."""
        first, last = candidate.pools[0], candidate.pools[-1]
        if candidate.architecture == "colocated":
            known = self._colocated.get(_kind(last))
            return known if known is None or known.rate <= most else replace(known, rate=most)
        most = min(most, self._prefill.get(first, most))
        alike = [it for it in self._decode if it.shape == last.shape]
        if not alike:
            return Expectation(most, PROMPTS, False)
        near = min(alike, key=lambda it: abs(it.count - last.count))
        rate, limits = self._decode[near]
        rate *= last.count / near.count
        if limits and rate < most:
            return Expectation(rate, ANSWERS, True)
        return Expectation(most, PROMPTS, rate >= _CLOSE * most)


def _kind(pool: EnginePool) -> tuple[object, ...]:
    shape = pool.shape
    size = shape.tensor_parallel_size, shape.pipeline_parallel_size, shape.parallel
    return shape.nodes, *size, shape.drafts
