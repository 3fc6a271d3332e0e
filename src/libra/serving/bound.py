"""Upper bounds on rates and lower bounds on latencies, from lower bounds on prices and without queueing.

Invariant: a rate refused here also fails in simulation. Work is the demand of the requests on all engines of one pool.
The engines must do this work by the latest times at which the requests may be served. The bound leaves out the most
expensive requests, as many as may miss an objective.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

import numpy as np

from libra.cost.grid import Array
from libra.cost.quantization import AS_STORED
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.engines import NoRoomError, configuration, drafter_of, experts_of, grid_of, group_cost, network
from libra.serving.floor import Prices, group_prices, prices, prices_of_rank
from libra.serving.idle import IdleEngines
from libra.serving.ladder import HIGHEST, LOWEST, rate_of
from libra.serving.objective import Metric, Objective
from libra.serving.priced_work import PricedWork
from libra.serving.question import SizingQuestion
from libra.serving.request_work import RequestWork, WorkDeadline, deadlines
from libra.serving.verdict import SHOWN, statistic
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.speculative import Speculative


@dataclass(frozen=True, slots=True)
class RateBound:
    """Bounds on a candidate: the highest possible rate and the lowest possible latencies."""

    rate: float  # requests/s; 0: not even one request at a time
    ttft: float  # seconds, by the statistic of `trial.statistic`
    tpot: float
    reason: str  # limit that sets the rate


@dataclass(slots=True)
class Bounds:
    """Bounds of all candidates of one question. A pool that several candidates share is computed once. `others` are
    bounds of a question that includes all requests of this question; their prices are used here.
    """

    question: SizingQuestion
    others: Bounds | None = None
    _work: RequestWork = field(init=False)
    _works: dict[tuple[Speculative | None, bool], RequestWork] = field(init=False, default_factory=dict)
    _priced: dict[EngineSetup, PricedWork] = field(init=False, default_factory=dict)
    _pools: dict[EnginePool, tuple[int, str]] = field(init=False, default_factory=dict)
    _deadlines: tuple[WorkDeadline, ...] = field(init=False)
    _idle: IdleEngines = field(init=False)

    def __post_init__(self) -> None:
        self._idle = IdleEngines(self.question)
        self._work = self._work_of(None, loaded=False)
        self._deadlines = tuple(deadlines(self.question, self._work))

    def of(self, candidate: ServingCandidate) -> RateBound:
        try:
            works = [self._on(pool.shape) for pool in candidate.pools]
        except NoRoomError as error:
            return RateBound(0.0, inf, inf, str(error))
        least = self._latency(candidate, works)
        ttft, tpot = (
            statistic(self.question, metric).value(least[metric]) if len(least[metric]) else 0.0 for metric in SHOWN
        )
        for objective in self.question.objectives:
            taken = least[objective.metric]
            value = objective.value(taken) if len(taken) else 0.0
            if value > objective.limit:
                return RateBound(0.0, ttft, tpot, f"{objective.name} is {value:.3g} s or more without any queue")
        limits = [self._pool(pool) for pool in candidate.pools]
        if candidate.architecture in ("prefill-decode", "attention-ffn"):
            limits.append(self._network(candidate))
        rung, reason = min(limits, key=lambda it: it[0])
        rate = inf if rung == HIGHEST else 0.0 if rung < LOWEST else rate_of(rung)
        return RateBound(rate, ttft, tpot, reason)

    def idle(self, candidate: ServingCandidate) -> tuple[float, float]:
        """TTFT and TPOT, in seconds, on idle engines in simulation. They are no less than the bounds of `of`."""
        works = [self._on(pool.shape) for pool in candidate.pools]
        prompt, answer = (self._idle.of(candidate.pools[at].shape, works[at].work) for at in (0, -1))
        least = self._latency(candidate, works, prompt.ttft, answer.tpot)
        ttft, tpot = (
            statistic(self.question, metric).value(least[metric]) if len(least[metric]) else 0.0 for metric in SHOWN
        )
        return ttft, tpot

    def least(self, candidate: ServingCandidate, objective: Objective) -> float:
        """Least value of the objective in seconds, without a queue. Infinite if the candidate's engines cannot run."""
        try:
            taken = self._latency(candidate, [self._on(pool.shape) for pool in candidate.pools])[objective.metric]
        except NoRoomError:
            return inf
        return objective.value(taken) if len(taken) else 0.0

    def _on(self, shape: EngineSetup) -> PricedWork:
        """The work on an engine with these settings."""
        if shape not in self._priced:
            config, its = self._prices(shape)
            work = self._work_of(config.speculative, loaded=bool(config.kv_tiers))
            self._priced[shape] = PricedWork(config, its, work)
        return self._priced[shape]

    def _prices(self, shape: EngineSetup) -> tuple[EngineConfig, Prices]:
        if self.others is not None:
            on = self.others._on(shape)
            return on.config, on.prices
        config, contexts = configuration(self.question, shape), self._work.contexts
        if shape.parallel is not None:
            experts = experts_of(self.question, shape)
            return config, prices_of_rank(experts, config, contexts, drafter_of(self.question, shape, experts.own))
        if shape.apart is not None:
            return config, group_prices(group_cost(self.question, shape), config, contexts)
        grid = grid_of(self.question, shape)
        return config, prices(grid, config, contexts, drafter_of(self.question, shape, grid))

    def _work_of(self, drafts: Speculative | None, *, loaded: bool) -> RequestWork:
        if (drafts, loaded) not in self._works:
            if drafts is None:
                work = RequestWork(self.question, loaded=loaded)
            else:
                work = self._work_of(None, loaded=loaded).with_drafts(drafts)
            self._works[drafts, loaded] = work
        return self._works[drafts, loaded]

    def _latency(
        self,
        candidate: ServingCandidate,
        works: list[PricedWork],
        prompt: Array | float = 0.0,
        token: Array | float = 0.0,
    ) -> dict[Metric, Array]:
        """The lowest latency of each request in seconds, if its prompt takes at least `prompt` and each token at least
        `token`.
        """
        work = self._work
        ttft, tpot = np.maximum(works[0].prompt_seconds, prompt), np.maximum(works[-1].token_seconds, token)
        if len(works) > 1:
            ttft = ttft + self._transfer(candidate) + works[-1].first_seconds
        return {"ttft": ttft, "tpot": tpot[work.decoded > 0], "latency": ttft + work.decoded * tpot}

    def _pool(self, pool: EnginePool) -> tuple[int, str]:
        """The highest rung whose work the pool's engines can do, and the kind of work that limits the rung."""
        if pool not in self._pools:
            work, capacity = self._on(pool.shape), pool.ranks * pool.shape.pipeline_parallel_size
            rung, reason = HIGHEST, "no bound on the rate"
            for deadline in self._deadlines:
                other = "prefill" if deadline.of == "finish" else "decode"
                if pool.role == other:
                    continue
                for price, credit, what in work.demands(pool.role, deadline):
                    highest = self._highest(price, credit, deadline, capacity, rung)
                    if highest < rung:
                        rung, reason = highest, f"{pool.role} engines: {what}"
            self._pools[pool] = rung, reason
        return self._pools[pool]

    def _network(self, candidate: ServingCandidate) -> tuple[int, str]:
        """The highest rung at which the network sends KV from pool to pool in time."""
        net = network(self.question, candidate)
        assert net is not None
        size = self._kv_bytes(candidate)
        rung = HIGHEST
        for deadline in self._deadlines:
            for pool in candidate.pools:
                rung = self._highest(size / net.bandwidth, 0.0, deadline, pool.kv_devices, rung)
        return rung, "network: KV of the prompts"

    def _kv_bytes(self, candidate: ServingCandidate) -> Array:
        tp = candidate.pools[-1].shape.tensor_parallel_size
        size: Array = (
            self._work.new * tp * AS_STORED.kv_bytes_per_token(self.question.model, tp, context=self.question.longest)
        )
        return size

    def _transfer(self, candidate: ServingCandidate) -> Array:
        """Seconds of each request's KV on an idle network."""
        net = network(self.question, candidate)
        assert net is not None
        fewest = min(pool.shape.rank_devices for pool in candidate.pools)
        seconds: Array = self._kv_bytes(candidate) / (net.bandwidth * fewest) + net.latency
        return seconds

    def _highest(self, price: Array, credit: float, deadline: WorkDeadline, capacity: int, below: int) -> int:
        """The highest rung, `below` at most, at which the work can be done in time; LOWEST - 1: no rung."""
        allowance = credit + float(np.sort(price)[max(0, len(price) - deadline.misses) :].sum())

        def possible(rung: int) -> bool:
            due = self._work.arrival / rate_of(rung) + deadline.seconds
            order = np.argsort(due)
            return bool((np.cumsum(price[order]) - allowance <= capacity * due[order] * (1 + 1e-9)).all())

        if possible(below):
            return below
        low, high = LOWEST - 1, below
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if possible(middle) else (low, middle)
        return low


def refuse_impossible(question: SizingQuestion, bounds: Bounds, candidates: Collection[ServingCandidate]) -> None:
    """Raise ValueError if a limit is below the least latency that any candidate has without a queue."""
    for objective in question.objectives:
        least = min(bounds.least(it, objective) for it in candidates)
        if objective.limit < least < inf:
            raise ValueError(
                f"{objective.name} is {objective.limit:g} s; without any queue nothing on the menu is faster than"
                f" {least:.3g} s: raise the limit, or add larger engines"
            )
