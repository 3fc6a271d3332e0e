"""How fast requests could come at most, and what they would wait at least: without queueing, by prices from below.

Invariant: a rate that is refused here is missed in simulation, too. What is used of an objective is what it says of all
but the requests that may miss it, and of those the dearest are left out. Work is what requests need on one pool,
wherever its engines do it; it must be done by the latest instants at which they may be served.

A request's price has a part for the iterations that it takes part in, of which each has a fixed cost: they are at
least as many as what the engine holds allows (`max_num_seqs`, `max_num_batched_tokens`, KV), and as TPOT allows, for
the mean time of an iteration, weighted by tokens, is no longer than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf
from typing import Literal

import numpy as np

from libra.cost.engine_memory import BLOCK
from libra.cost.grid import Array
from libra.cost.quantization import UNQUANTIZED
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig, RoleName
from libra.sim.engine.speculative import Draws, Speculative
from libra.sizing.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.sizing.engines import NoRoomError, configuration, drafter_of, experts_of, grid_of, group_cost, network
from libra.sizing.floor import Floor, Prices, group_prices, prices, prices_of_rank
from libra.sizing.ladder import HIGHEST, LOWEST, rate_of
from libra.sizing.objective import Metric, Objective
from libra.sizing.question import SizingQuestion
from libra.sizing.trial import SHOWN, statistic


@dataclass(frozen=True, slots=True)
class RateBound:
    """What a candidate cannot better."""

    rate: float  # requests/s; 0: not even one request at a time
    ttft: float  # seconds, by the statistic of `trial.statistic`
    tpot: float
    reason: str  # what sets the rate


@dataclass(frozen=True, slots=True)
class _Deadline:
    """All but `misses` requests have had what they need `seconds` after their arrival; those among them that generate
    do so at `tpot` seconds a token."""

    of: Literal["prompt", "finish"]
    seconds: Array
    misses: int
    tpot: float


class _Work:
    """What the requests are, as columns."""

    def __init__(self, question: SizingQuestion, *, loaded: bool = False) -> None:
        """`loaded`: a tier may have prefixes, and then whole prompts, of which only the last token is computed."""
        requests = question.requests
        first = requests[0].arrival
        # Seconds at one request a second.
        self.arrival = np.array([(it.arrival - first) / TICKS for it in requests]) * question.natural_rate
        prompt = np.array([it.prompt_tokens for it in requests], dtype=float)
        self.output = np.array([it.output_tokens for it in requests], dtype=float)
        known = np.array(
            [it.prefix_tokens if loaded else min(it.prefix_tokens, it.prompt_tokens - 1) for it in requests]
        )
        shared = np.minimum(known // BLOCK * BLOCK, prompt - 1)
        self.new = prompt - shared  # tokens of prompts that no prefix cache has
        self.pairs = self.new * shared + self.new * (self.new + 1) / 2
        self.decoded = self.output - 1  # tokens after the first
        self.own = self.decoded * self.new + self.decoded * (self.decoded + 1) / 2  # tokens of context, all added up
        self.longest = prompt + self.output
        self.contexts = (int(self.new.min()) + 1, int(self.longest.max()))
        self.iterations = self.decoded  # that generate them, at least

    def __len__(self) -> int:
        return len(self.arrival)

    def with_drafts(self, speculative: Speculative) -> _Work:
        """As many verifications as the draws of the simulator take at least: an iteration that has fewer drafts, or
        none, has no more tokens than one that verifies all. How they are spread is not known: a context has grown by
        a token for each iteration before, and lacks at most `tokens_each` for each that is left."""
        drawn, draws, each = copy(self), Draws(speculative), speculative.tokens_each
        drawn.iterations, drawn.own = np.zeros(len(self)), np.zeros(len(self))
        for request, (new, decoded) in enumerate(zip(self.new, self.decoded.astype(int), strict=True)):
            if decoded:
                gains = draws.gains(request, 0, int(decoded)).cumsum()
                count = int(gains.searchsorted(decoded)) + 1
                left = np.arange(count)  # iterations after each
                grown = np.maximum(count - 1 - left, decoded - each * (left + 1))
                drawn.iterations[request] = count
                drawn.own[request] = (new + 1) * count + grown.sum()
        return drawn


@dataclass(slots=True)
class Bounds:
    """Of all candidates of one question; pools that candidates have in common are looked at once."""

    question: SizingQuestion
    _work: _Work = field(init=False)
    _works: dict[tuple[Speculative | None, bool], _Work] = field(init=False, default_factory=dict)
    _shapes: dict[EngineSetup, _ShapeFloor] = field(init=False, default_factory=dict)
    _pools: dict[EnginePool, tuple[int, str]] = field(init=False, default_factory=dict)
    _deadlines: tuple[_Deadline, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._work = self._work_of(None, loaded=False)
        self._deadlines = tuple(_deadlines(self.question, self._work))

    def of(self, candidate: ServingCandidate) -> RateBound:
        try:
            shapes = [self._shape(pool.shape) for pool in candidate.pools]
        except NoRoomError as error:
            return RateBound(0.0, inf, inf, str(error))
        least = self._latency(candidate, shapes)
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

    def least(self, candidate: ServingCandidate, objective: Objective) -> float:
        """Seconds, without any queue; infinite where there is no room for its engines."""
        try:
            taken = self._latency(candidate, [self._shape(pool.shape) for pool in candidate.pools])[objective.metric]
        except NoRoomError:
            return inf
        return objective.value(taken) if len(taken) else 0.0

    def _shape(self, shape: EngineSetup) -> _ShapeFloor:
        if shape not in self._shapes:
            config = configuration(self.question, shape)
            work = self._work_of(config.speculative, loaded=bool(config.kv_tiers))
            contexts = work.contexts
            if shape.parallel is not None:
                experts = experts_of(self.question, shape)
                priced = prices_of_rank(experts, config, contexts, drafter_of(self.question, shape, experts.own))
            elif shape.apart is not None:
                priced = group_prices(group_cost(self.question, shape), config, contexts)
            else:
                grid = grid_of(self.question, shape)
                priced = prices(grid, config, contexts, drafter_of(self.question, shape, grid))
            self._shapes[shape] = _ShapeFloor(config, priced, work)
        return self._shapes[shape]

    def _work_of(self, drafts: Speculative | None, *, loaded: bool) -> _Work:
        if (drafts, loaded) not in self._works:
            if drafts is None:
                work = _Work(self.question, loaded=loaded)
            else:
                work = self._work_of(None, loaded=loaded).with_drafts(drafts)
            self._works[drafts, loaded] = work
        return self._works[drafts, loaded]

    def _latency(self, candidate: ServingCandidate, shapes: list[_ShapeFloor]) -> dict[Metric, Array]:
        """The least seconds that each request can take."""
        work = self._work
        ttft, tpot = shapes[0].prompt_seconds, shapes[-1].token_seconds
        if len(shapes) > 1:
            ttft = ttft + self._transfer(candidate) + shapes[-1].first_seconds
        return {"ttft": ttft, "tpot": tpot[work.decoded > 0], "latency": ttft + work.decoded * tpot}

    def _pool(self, pool: EnginePool) -> tuple[int, str]:
        """The highest rung that its engines do the work of, and what the work is."""
        if pool not in self._pools:
            shape, capacity = self._shape(pool.shape), pool.ranks * pool.shape.pipeline_parallel_size
            rung, reason = HIGHEST, "nothing bounds it"
            for deadline in self._deadlines:
                other = "prefill" if deadline.of == "finish" else "decode"
                if pool.role == other:
                    continue
                for price, credit, what in shape.demands(pool.role, deadline):
                    highest = self._highest(price, credit, deadline, capacity, rung)
                    if highest < rung:
                        rung, reason = highest, f"{pool.role} engines: {what}"
            self._pools[pool] = rung, reason
        return self._pools[pool]

    def _network(self, candidate: ServingCandidate) -> tuple[int, str]:
        """The highest rung at which KV goes from pool to pool in time."""
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
        size: Array = self._work.new * tp * UNQUANTIZED.kv_bytes_per_token(self.question.model, tp)
        return size

    def _transfer(self, candidate: ServingCandidate) -> Array:
        """Seconds of each request's KV on an idle network."""
        net = network(self.question, candidate)
        assert net is not None
        fewest = min(pool.shape.rank_devices for pool in candidate.pools)
        seconds: Array = self._kv_bytes(candidate) / (net.bandwidth * fewest) + net.latency
        return seconds

    def _highest(self, price: Array, credit: float, deadline: _Deadline, capacity: int, below: int) -> int:
        """The highest rung, `below` at most, at which the work can be done in time; LOWEST - 1 where none is."""
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


def _deadlines(question: SizingQuestion, work: _Work) -> Iterator[_Deadline]:
    """What objectives say of when requests are served."""
    several = int((work.decoded > 0).sum())
    tails: dict[Metric, list[tuple[float, int]]] = {"ttft": [], "tpot": [], "latency": []}
    for objective in question.objectives:
        count = several if objective.metric == "tpot" else len(work)
        if count:
            tails[objective.metric] += objective.tails(count)
    for limit, misses in (*tails["ttft"], *tails["latency"]):
        yield _Deadline("prompt", np.full(len(work), limit), misses, inf)
    for limit, misses in tails["latency"]:
        for pace, more in ((inf, 0), *tails["tpot"]):
            yield _Deadline("finish", np.full(len(work), limit), misses + more, pace)
    for (limit, misses), (pace, more) in product(tails["ttft"], tails["tpot"]):
        yield _Deadline("finish", limit + pace * work.decoded, misses + more, pace)


@dataclass
class _ShapeFloor:
    """One engine's prices of the requests."""

    config: EngineConfig
    prices: Prices
    work: _Work

    @cached_property
    def prompt_seconds(self) -> Array:
        """Of each prompt alone: chunk by chunk, each in an iteration that takes what the cheapest such does. The stages
        of a pipeline may have a chunk each."""
        work, most = self.work, self.config.max_num_batched_tokens
        seconds = np.zeros(len(work))
        for least, pair in self.prices.prompt:
            each = np.minimum.accumulate(least[1:] / np.arange(1, len(least)))
            longest = np.minimum(work.new, most).astype(int)
            seconds = np.maximum(seconds, work.new * each[longest - 1] + pair * work.pairs)
        seconds = seconds + self.prices.admission + self.prices.admitted_token * work.new
        stages = self.config.pipeline_parallel_size
        staged: Array = (seconds + (stages - 1) * self.first_seconds) / stages
        return staged

    @cached_property
    def first_seconds(self) -> float:
        """The iteration that makes the first token of a prompt whose KV was pulled."""
        return max((float(least[1]) for least, _ in self.prices.prompt), default=0.0)

    @cached_property
    def token_seconds(self) -> Array:
        """Mean of each request's iterations after the first token."""
        work = self.work
        # Where a chunk may take the place of a verification, it has a token at least.
        rows = 1 if self._preempts else self.config.tokens_each
        seconds = np.zeros(len(work))
        context = np.where(work.decoded > 0, work.own / np.maximum(1, work.iterations), 0.0)
        for least, slope, chunk in self.prices.alone:
            if slope and self._preempts:
                continue
            # Prompts that are completed beside it may take less than nothing in tables, but have tokens.
            prompts = np.arange(1 + (len(least) - 1) // int(work.new.min())) if chunk else np.zeros(1, dtype=int)
            tokens = np.maximum(min(rows, len(least) - 1), prompts * int(work.new.min()))
            cheapest = (least[tokens] - chunk * prompts).min()
            seconds = np.maximum(seconds, max(0.0, float(cheapest)) + slope * context)
        each: Array = seconds * np.divide(work.iterations, np.maximum(1, work.decoded))
        return each

    @cached_property
    def _preempts(self) -> bool:
        """Whether blocks may run out while `max_num_seqs` requests run; with tiers others hold some, too, whose
        KV is loaded."""
        ahead = self.config.lookahead + 2 * (self.config.tokens_each - 1)
        blocks = np.sort(-(-(self.work.longest + ahead) // BLOCK) + 1)
        holders = len(blocks) if self.config.kv_tiers else self.config.max_num_seqs
        return bool(blocks[-holders:].sum() > self.config.kv_blocks)

    def demands(self, role: RoleName, deadline: _Deadline) -> Iterator[tuple[Array, float, str]]:
        """(seconds of each request, seconds that come off all of them together, what they are of): each the dearest of
        its kind."""
        best: dict[str, tuple[float, Array, float]] = {}
        for floor in self.prices.floors:
            price, credit = self._priced(floor, "prefill" if deadline.of == "prompt" else role)
            for what, iterations in self._iterations(floor, role, deadline):
                total = price + floor.iteration * iterations
                left = float(np.sort(total)[: max(0, len(total) - deadline.misses)].sum()) - credit
                if what not in best or left > best[what][0]:
                    best[what] = left, total, credit
        dearest = max(best.items(), key=lambda it: it[1][0], default=None)
        if dearest is not None and dearest[1][0] > 0:
            yield dearest[1][1], dearest[1][2], dearest[0]

    def _priced(self, floor: Floor, role: RoleName) -> tuple[Array, float]:
        """What requests take beyond the fixed cost of iterations.

        A preempted request gets its next token with the chunk that computes its context again: that pays for the token,
        but not for the context. There are no more preemptions than blocks that requests grow by, twice over for a
        prompt that is under way. With drafts they grow by the same block again and again, so every iteration pays only
        what such a chunk does.
        """
        work = self.work
        price = np.full(len(work), floor.output + self.prices.admission)
        credit = 0.0
        if role != "decode":
            price = price + floor.token * work.new + floor.pair * work.pairs - floor.chunk
            price = price + self.prices.admitted_token * work.new
        else:
            price = price - floor.chunk
        if role != "prefill":
            price = price + self._step(floor) * work.iterations
            if not (self._preempts and self.config.speculative):
                price = price + floor.context * work.own
                if self._preempts:
                    grown = float((-(-work.output // BLOCK) + 1).sum())
                    credit = 2 * grown * (floor.chunk + floor.context * float(work.longest.max()))
        return price, credit

    def _step(self, floor: Floor) -> float:
        """What a request takes in each iteration after its first token, beyond its context."""
        replaced = self._preempts and self.config.speculative is not None
        return floor.output + floor.token + (-floor.chunk if replaced else floor.drafts)

    def _iterations(self, floor: Floor, role: RoleName, deadline: _Deadline) -> Iterator[tuple[str, Array]]:
        """How many iterations each request accounts for at least."""
        work, config = self.work, self.config
        seqs, most = config.max_num_seqs, config.max_num_batched_tokens
        prompts = role == "prefill" or deadline.of == "prompt"
        if prompts:
            yield "max_num_batched_tokens", work.new / most
            yield "max_num_seqs", np.full(len(work), 1 / seqs)
            return
        yield "max_num_seqs", (1 + work.iterations) / seqs
        yield "KV memory", work.own / (config.kv_blocks * config.block_size)
        if role == "colocated":
            yield "max_num_batched_tokens", (work.new + work.decoded) / most
            rows = config.tokens_each
            if rows > 1 and not self._preempts:  # a full iteration counts as having room for all drafts
                yield "max_num_batched_tokens", (work.new + rows * work.iterations) / (most + seqs * (rows - 1))
        # Tokens that follow a preemption have no context to pay; prompts must not make an iteration cheaper.
        each = self._step(floor) + (0.0 if self._preempts else floor.context * work.contexts[0])
        if deadline.tpot < inf and each > 0 and floor.token * work.new.min() >= floor.chunk:
            # Of an iteration of d requests, 1 >= (2 - d / together) * d / together; whatever `together` is, and tight
            # where it is d. What all d add up to follows from the time that they may take.
            beyond = (deadline.tpot * work.decoded - floor.iteration * work.iterations) / each
            together = max(1.0, float(beyond.sum() / work.iterations.sum()))
            if together < seqs:
                yield "TPOT", np.minimum(work.iterations, (2 * work.iterations - beyond / together) / together)


def refuse_impossible(question: SizingQuestion, bounds: Bounds, candidates: Collection[ServingCandidate]) -> None:
    """Raises ValueError where an objective is below what anything on the menu takes without a queue."""
    for objective in question.objectives:
        least = min(bounds.least(it, objective) for it in candidates)
        if objective.limit < least < inf:
            raise ValueError(
                f"{objective.name} is {objective.limit:g} s; without any queue nothing on the menu is faster than"
                f" {least:.3g} s: raise it, or add larger engines"
            )
