"""State of a search: points, rejections with their reasons, and candidates left to simulate.

Invariant: a candidate is rejected without a full simulation only if a bound, or the simulation of one of its pools,
shows one of two things: the candidate misses the given rate, or a point serves more and is no slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from libra.report.words import per_second
from libra.serving.answer import By, NearMiss, Point, Rejection, SizingAnswer, pareto, point_of, rival
from libra.serving.bound import Bounds
from libra.serving.candidate import ServingCandidate
from libra.serving.expected import Expectation, Expectations
from libra.serving.holding import Held, checked, held_bounds, surely_serves
from libra.serving.ladder import HIGHEST, LOWEST, STEPS, Asking, rate_of, rung_above
from libra.serving.pools import Pools
from libra.serving.question import SizingQuestion
from libra.serving.verdict import Rival, tenths

_WAVE = 4  # candidates that are simulated before the rest is checked again
_NEXT = 4  # candidates among which the next best is sought
_PROMISING = 0.3  # candidates with at least this share of the best point's bound are often simulated
_SURE = 0.75  # share of the expected rate that a candidate surely serves, if the expectation is right


@dataclass(frozen=True, slots=True)
class Progress:
    candidates: int
    out: int  # candidates rejected by a bound
    simulated: int  # candidates with a simulation, of all engines or of one pool
    best: Point | None
    tried: int  # candidates with a simulation of all engines
    due: int  # other candidates that will probably get such a simulation


class Found:
    """Points, rejections and bounds of a search so far."""

    def __init__(
        self,
        question: SizingQuestion,
        bounds: Bounds,
        candidates: Sequence[ServingCandidate],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.question, self.progress, self.bounds = question, progress, bounds
        self.bounded = held_bounds(bounds, candidates)
        self.pools = Pools(question, bounds, candidates)
        self.points: list[Point] = []
        self.reasons: dict[ServingCandidate, Rejection] = {}
        self.runs = 0
        self.front: list[Point] = []
        self.rivals: dict[ServingCandidate, Point | None] = {}  # the point with the highest value that is no slower
        self.expectations = Expectations()
        self._tenths: dict[ServingCandidate, tuple[int, int]] = {}
        self._left: list[ServingCandidate] = []
        self._tried = 0

    def waves(self) -> Iterator[list[Asking]]:
        """Yield groups of candidates to simulate: first the fastest on idle engines, then the candidates with the best
        bounds. Reports progress before the first group."""
        question = self.question
        left = self._left
        for candidate, bound in self.bounded.items():
            wanted = question.rate
            if bound.rate < (wanted or rate_of(LOWEST)):
                why = bound.reason
                if bound.rate and wanted is not None:
                    why = f"at most {per_second(bound.rate)} ({bound.reason})"
                self._reject(candidate, "bound", why)
            else:
                left.append(candidate)
        self._tell()
        while left:
            # The best candidates come first, so that they can beat the others.
            left.sort(key=self._order)
            wave: list[Asking] = []
            later: list[ServingCandidate] = []
            while left and len(wave) < _WAVE:
                candidate = left.pop(0)
                if question.rate is None and any(_alike(candidate, it.candidate) for it in wave):
                    later.append(candidate)  # the result of the similar candidate will show where to begin
                elif not self._is_out(candidate):
                    wave.append(self._asking(candidate))
            left.extend(later)
            if wave:
                yield wave

    def _order(self, candidate: ServingCandidate) -> tuple[float, float]:
        """Key of the order of simulation, lowest first. With a given rate, the fastest candidates on idle engines come
        first; without one, the candidates with the highest product of expected rate per cost and unused limits."""
        if self.question.rate is not None:
            return sum(self._idle(candidate)), -self._promised(candidate)
        return -self._room(candidate) * self._hoped(candidate), sum(self._idle(candidate))

    def _room(self, candidate: ServingCandidate) -> float:
        """Share of the limits that latencies on idle engines leave unused."""
        return prod(1 - it / 10 for it in self._idle(candidate))

    def _hoped(self, candidate: ServingCandidate) -> float:
        """Expected requests/s per cost; the bound if nothing is expected."""
        if self.question.rate is not None:
            return self._promised(candidate)
        bound = self.bounded[candidate].rate
        expected = self.expectations.of(candidate, min(bound, self.pools.about(candidate, bound)))
        return (bound if expected is None else expected.rate) / self.question.cost(candidate)

    def _due(self) -> int:
        """The number of remaining candidates that will probably be simulated. With a given rate, these are the
        candidates that no point beats by the bounds. Without one, they are the candidates that promise at least
        `_PROMISING` of the best point."""
        if self.question.rate is None:
            best = max((self._room(it.candidate) * it.value for it in self.front), default=0.0)
            return sum(self._room(it) * self._hoped(it) >= _PROMISING * best for it in self._left)
        rivals = ((it, rival(self._idle(it), self.front)) for it in self._left)
        return sum(better is None or better.value <= self._promised(it) for it, better in rivals)

    def _asking(self, candidate: ServingCandidate) -> Asking:
        better, cost, most = self.rivals[candidate], self.question.cost(candidate), self._most(candidate)
        least = 0.0 if better is None else better.value * cost
        if self.question.rate is not None:
            return Asking(candidate, most, least)
        rivals = tuple(Rival(str(it.candidate), it.value * cost, it.tenths) for it in self.front)
        expected = self._expected(candidate)
        if expected is None:
            return Asking(candidate, most, least, rivals=rivals)
        return Asking(candidate, most, least, expected.rate, expected.hardest, expected.sure, rivals)

    def _expected(self, candidate: ServingCandidate) -> Expectation | None:
        return self.expectations.of(candidate, self._most(candidate))

    def _is_out(self, candidate: ServingCandidate) -> bool:
        """Reject the candidate if a bound, or one of its pools, shows that a point is at least as good. Returns whether
        the candidate is rejected."""
        question, bound = self.question, self.bounded[candidate]
        proven = rival(tenths(question, bound.ttft, bound.tpot), self.front)
        if proven is not None and proven.value > self._promised(candidate):
            self._reject(candidate, "bound", f"cannot be better in any respect than {proven.candidate}")
            return True
        better = self._better(candidate, rival(self._idle(candidate), self.front))
        if question.rate is None and candidate not in self.reasons:
            sure = self._surely(candidate, better)
            better = better if sure is None else self._better(candidate, sure)
        self.rivals[candidate] = better
        return candidate in self.reasons

    def _better(self, candidate: ServingCandidate, better: Point | None) -> Point | None:
        """Reject the candidate if it serves less than a point that is no slower, beginning with the point `better`.
        Returns the last such point; None if there is none."""
        question = self.question
        while not self._is_short(candidate, better):
            if better is None or question.rate is not None:
                break
            # At the needed rate, the candidate is slower than on idle engines, so more points are no slower.
            more = self._rival_at(candidate, rate_of(rung_above(better.value * question.cost(candidate))))
            if more is None or more.value <= better.value:
                break
            better = more
        return better

    def _surely(self, candidate: ServingCandidate, better: Point | None) -> Point | None:
        """A point of higher value than `better` that is no slower than the candidate at a rate that the candidate
        surely serves; None if there is no such point."""
        expected = self._expected(candidate)
        rate = None if expected is None else _SURE * expected.rate
        if rate is None or not rate_of(LOWEST) < rate < rate_of(HIGHEST):
            return None
        more = self._rival_at(candidate, rate)
        if more is None or (better is not None and more.value <= better.value):
            return None
        served, runs = surely_serves(self.question, candidate, rate)
        self.runs += runs
        return more if served else None

    def _rival_at(self, candidate: ServingCandidate, rate: float) -> Point | None:
        """The point with the highest value among those that are no slower than the candidate at `rate`."""
        ttft, tpot = self.bounds.idle(candidate)
        most = rival(tenths(self.question, inf, tpot), self.front)
        if most == rival(self._idle(candidate), self.front):
            return most
        return rival(tenths(self.question, max(ttft, self.pools.ttft(candidate, rate)), tpot), self.front)

    def _is_short(self, candidate: ServingCandidate, better: Point | None) -> bool:
        """Reject the candidate if a bound or a pool shows that it serves less than the given rate, or less than
        `better`. Returns whether the candidate is rejected."""
        question, rate = self.question, self.question.rate
        if better is not None and better.value > self._promised(candidate):
            self._reject(candidate, "dominated", f"is slower than {better.candidate}, and cannot serve more")
            return True
        if rate is None and better is not None:
            rate = rate_of(rung_above(better.value * question.cost(candidate)))
        elif rate is None and self._most(candidate) < rate_of(LOWEST):
            rate = rate_of(LOWEST)
        miss = None if rate is None else self.pools.miss(candidate, rate)
        if miss is None:
            return False
        if better is None or question.rate is not None:
            self._reject(candidate, "simulation", str(miss))
        else:
            self._reject(candidate, "dominated", f"serves less than {better.candidate}, which is no slower: {miss}")
        return True

    def _idle(self, candidate: ServingCandidate) -> tuple[int, int]:
        if candidate not in self._tenths:
            self._tenths[candidate] = tenths(self.question, *self.bounds.idle(candidate))
        return self._tenths[candidate]

    def _most(self, candidate: ServingCandidate) -> float:
        """Upper bound on the candidate's requests/s. Without a given rate, the rate of its prefill engines alone is
        also a bound."""
        bound = self.bounded[candidate].rate
        return bound if self.question.rate is not None else min(bound, self.pools.highest(candidate, bound))

    def take(self, simulated: Iterable[tuple[Asking, Held]]) -> None:
        for asking, held in simulated:
            candidate = asking.candidate
            self.runs += held.runs
            self._tried += 1
            point = point_of(self.question, candidate, self.bounded[candidate].rate, held)
            better = self.rivals[candidate]
            if held.rate and self.question.rate is None:
                self.expectations.learn(candidate, held.rate, held.hardest, self._most(candidate))
            if point is not None:
                self.points.append(point)
            elif held.slower is not None:
                self._reject(candidate, "dominated", f"is slower than {held.slower.name}, and serves no more")
            elif held.too_little and better is not None:
                reason = f"serves less than {better.candidate}, which is no slower: misses {held.missed}"
                self._reject(candidate, "dominated", reason)
            else:
                self._reject(candidate, "simulation", f"misses {held.missed}")
        self.front, _ = pareto(self.points)
        self._tell()

    def _tell(self) -> None:
        if self.progress is None:
            return
        simulated = len(self.points) + sum(it.by != "bound" for it in self.reasons.values())
        out = len(self.reasons) + len(self.points) - simulated
        best = self.front[0] if self.front else None
        self.progress(Progress(len(self.bounded), out, simulated, best, self._tried, self._due()))

    def answer(self, candidates: Sequence[ServingCandidate]) -> SizingAnswer:
        front, beaten = pareto(self.points)
        rates = {it.candidate: it.trial.rate for it in self.points}
        for candidate, better in beaten.items():
            self._reject(candidate, "dominated", f"{better.candidate} is no worse in any respect", rates[candidate])
        rejected = tuple(self.reasons[it] for it in candidates if it in self.reasons)
        possible = []
        if front:
            best = front[0]
            possible = [it for it in candidates if it != best.candidate and self._promised(it) > best.value]
            possible = [it for it in possible if self.bounded[it].rate >= (self.question.rate or 0)]
        near = self._near_miss(front[0], possible, rates) if possible else None
        runs = self.runs + self.pools.runs
        return SizingAnswer(self.question, tuple(front), rejected, runs, len(possible), near)

    def _promised(self, candidate: ServingCandidate) -> float:
        """Requests/s per cost that the bound allows."""
        return min(self.bounded[candidate].rate, self.question.rate or inf) / self.question.cost(candidate)

    def _reject(self, candidate: ServingCandidate, by: By, reason: str, rate: float | None = None) -> None:
        cost, bound = self.question.cost(candidate), self.bounded[candidate].rate
        self.reasons[candidate] = Rejection(candidate, cost, by, reason, bound, rate)

    def _near_miss(
        self, best: Point, possible: Sequence[ServingCandidate], rates: Mapping[ServingCandidate, float]
    ) -> NearMiss | None:
        """The next best candidate, and its worst miss of an objective at a rate at which the candidate would beat the
        best point. None if the simulation of no such candidate ends.

        Without a given rate, the next best candidate is the one with the highest goodput. With a given rate, it is the
        one nearest to its objectives, among the few candidates with the highest bounds.
        """
        question = self.question

        def promise(candidate: ServingCandidate) -> tuple[float, float]:
            return rates.get(candidate, 0.0) / question.cost(candidate), self.bounded[candidate].rate

        most = 1 if question.rate is None else _NEXT
        next_best = sorted(possible, key=promise, reverse=True)[:most]
        misses = [it for candidate in next_best if (it := self._worst_miss(best, candidate)) is not None]
        return min(misses, key=lambda it: it.seconds / it.limit, default=None)

    def _worst_miss(self, best: Point, candidate: ServingCandidate) -> NearMiss | None:
        """The miss of the objective that the candidate exceeds most. None if a simulation of the candidate does not
        end."""
        rate = self.question.rate or best.value * self.question.cost(candidate) * 2 ** (1 / STEPS)
        trials = checked(self.question, candidate, rate)
        self.runs += len(trials)
        if not all(it.latency for it in trials.values()):
            return None
        misses = (
            NearMiss(candidate, objective.name, objective.limit, one.latency[objective.name], name)
            for name, one in trials.items()
            for objective in self.question.objectives
        )
        return max(misses, key=lambda it: it.seconds / it.limit)


def _alike(one: ServingCandidate, other: ServingCandidate) -> bool:
    """Whether two candidates have a pool in common, or colocated engines of one size."""
    if one.architecture != other.architecture:
        return False
    if one.architecture == "colocated":
        return one.pools[0].shape.devices == other.pools[0].shape.devices
    return one.pools[0] == other.pools[0] or one.pools[-1].shape == other.pools[-1].shape
