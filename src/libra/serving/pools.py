"""Upper bounds on the rates of the two pools of a pair. Each pool is simulated once for all pairs, with ample engines
of the other role.

Assumption: if a candidate serves a rate, it also meets its objectives one rung of the ladder lower with more or faster
engines of the other role, or with more engines of one shape. At the rate itself such a candidate may miss them, since
ample prefill engines pass on bursts that the pair's own prefill engines would spread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log2

from libra.report.words import per_second
from libra.serving.bound import Bounds
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.draws import ANSWERS, PROMPTS, draws
from libra.serving.idle import SLACK
from libra.serving.ladder import LOWEST, STEPS, around, rate_of, repeated, rung_of, sustained_arrivals
from libra.serving.objective import Objective
from libra.serving.question import SizingQuestion
from libra.serving.trial import Trial, trial
from libra.sim.engine.config import RoleName

AMPLE = 16  # engines of the other role
_FIRST = 2 * STEPS  # first rung to try without a bound
_COARSE = 4  # rungs between the rates at which TTFT is known

_Asked = tuple[RoleName, EngineSetup, EngineSetup | None, int]  # role, shape, shape of ample prefill engines, engines


@dataclass(frozen=True, slots=True)
class PoolMiss:
    pool: EnginePool
    rate: float  # requests/s of the simulation
    objective: str

    def __str__(self) -> str:
        return f"its {self.pool.role} engines alone miss {self.objective} at {per_second(self.rate)}"


class Pools:
    """Pools of the pairs of one question. Prefill engines serve only prompts. Decode engines get prompts from ample
    prefill engines, of the fastest shape with the same class of nodes and the same drafts as the pair's. The requests
    come from the draw that is usually hardest for the role."""

    def __init__(self, question: SizingQuestion, bounds: Bounds, candidates: Iterable[ServingCandidate]) -> None:
        self.question, self.runs = question, 0
        self._missed: dict[_Asked, PoolMiss] = {}  # at the lowest rate of a miss
        self._passed: dict[_Asked, float] = {}
        self._ttft: dict[tuple[EnginePool, float], float] = {}
        self._highest: dict[EnginePool, int] = {}
        self._fastest: dict[EngineSetup, EngineSetup] = {}
        shapes = dict.fromkeys(it.pools[0].shape for it in candidates if it.architecture != "colocated")
        paces = {it: _seconds_of_prompts(bounds, it) for it in shapes}
        for shape in shapes:
            alike = [it for it in shapes if (it.nodes, it.drafts) == (shape.nodes, shape.drafts)]
            self._fastest[shape] = min(alike, key=lambda it: paces[it])

    def highest(self, candidate: ServingCandidate, bound: float) -> float:
        """Highest rate of the ladder, in requests/s, that the prefill engines of a pair serve; infinite for a colocated
        candidate. The search begins below `bound`."""
        if candidate.architecture == "colocated":
            return inf
        pool = candidate.pools[0]
        if pool not in self._highest:
            near = self._near(pool)
            rung = (_FIRST if bound == inf else rung_of(bound) - STEPS // 2) if near is None else near
            passed, _ = around(partial(self._trial, pool, None), rung)
            self._highest[pool] = LOWEST - 1 if passed is None else rung_of(passed.rate)
        return rate_of(self._highest[pool])

    def about(self, candidate: ServingCandidate, bound: float) -> float:
        """As `highest`, but estimated in proportion if another number of the same engines was simulated."""
        near = None if candidate.architecture == "colocated" else self._near(candidate.pools[0])
        return self.highest(candidate, bound) if near is None else rate_of(near)

    def _near(self, pool: EnginePool) -> int | None:
        """The rung of the simulated pool with the nearest number of the same engines, scaled in proportion; None if no
        such pool was simulated."""
        alike = [it for it in self._highest if it.shape == pool.shape]
        if not alike:
            return None
        near = min(alike, key=lambda it: abs(it.count - pool.count))
        return self._highest[near] + round(STEPS * log2(pool.count / near.count))

    def miss(self, candidate: ServingCandidate, rate: float) -> PoolMiss | None:
        """The miss of a pool that misses an objective at one rung below `rate`, or lower; None if no pool does."""
        if candidate.architecture == "colocated":
            return None
        rate /= rate_of(1)
        prefill, decode = candidate.pools
        sides = ((prefill, None), (decode, self._fastest[prefill.shape]))
        found = (self._miss(pool, ample, rate) for pool, ample in sides)
        return next((it for it in found if it is not None), None)

    def ttft(self, candidate: ServingCandidate, rate: float) -> float:
        """Lower bound, in seconds, on the TTFT of a pair at `rate`, as the statistic of `verdict.statistic`. It is the
        TTFT of the prefill engines alone on the record, reduced by `SLACK`, at a rate up to a quarter of an octave
        lower."""
        if candidate.architecture == "colocated":
            return 0.0
        pool, rate = candidate.pools[0], rate_of(int(STEPS * log2(rate) + 1e-6) // _COARSE * _COARSE)
        if (pool, rate) not in self._ttft:
            requests = tuple(replace(it, output_tokens=1) for it in self.question.requests)
            requests = repeated(requests, sustained_arrivals(self.question, rate))
            alone = ServingCandidate((replace(pool, role="colocated"),))
            self.runs += 1
            one = trial(self.question, alone, rate, requests=requests, to_the_end=True)
            self._ttft[pool, rate] = (1 - SLACK) * one.ttft
        return self._ttft[pool, rate]

    def _miss(self, pool: EnginePool, ample: EngineSetup | None, rate: float) -> PoolMiss | None:
        asked = pool.role, pool.shape, ample
        known = (it for (*its, count), it in self._missed.items() if tuple(its) == asked and count >= pool.count)
        if (lower := next((it for it in known if it.rate <= rate), None)) is not None:
            return lower
        passed = (it for (*its, count), it in self._passed.items() if tuple(its) == asked and count <= pool.count)
        if any(it >= rate for it in passed):
            return None
        return self._missed.get((*asked, pool.count)) if not self._trial(pool, ample, rate).passed else None

    def _trial(self, pool: EnginePool, ample: EngineSetup | None, rate: float) -> Trial:
        its = {it.name: it.requests for it in draws(self.question.requests)}
        requests = its.get(PROMPTS if ample is None else ANSWERS, self.question.requests)
        if ample is None:
            alone = ServingCandidate((replace(pool, role="colocated"),))
            requests = tuple(replace(it, output_tokens=1) for it in requests)
        else:
            alone = ServingCandidate((EnginePool("prefill", ample, AMPLE), pool))
        least = 1 if self.question.rate is not None else sustained_arrivals(self.question, rate)
        self.runs += 1
        one = trial(self.question, alone, rate, requests=repeated(requests, least))
        key = pool.role, pool.shape, ample, pool.count
        if one.passed:
            self._passed[key] = max(rate, self._passed.get(key, 0.0))
        elif key not in self._missed or rate < self._missed[key].rate:
            self._missed[key] = PoolMiss(pool, rate, one.missed)
        return one


def _seconds_of_prompts(bounds: Bounds, shape: EngineSetup) -> float:
    return bounds.least(ServingCandidate((EnginePool("colocated", shape, 1),)), Objective("ttft", "mean", 1.0))
