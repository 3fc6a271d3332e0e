"""Duration of an iteration of data-parallel ranks that divide the experts of a model over all their GPUs.

Invariant: in each layer all ranks wait for the GPU whose experts get most tokens: most in expectation, or in a draw
for that iteration. The expert load depends only on the iteration's number, so no schedule changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from libra.cost.expert_grid import ExpertGrid
from libra.cost.experts import (
    Balancing,
    Shares,
    arrivals,
    initial_placement,
    rank_shares,
    rebalanced,
)
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST, HostCost
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, Together
from libra.sim.engine.iteration_cost import UNLIMITED, IterationCost


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Load of each expert: `shares` lists the phases in their order, each of `phase` iterations."""

    shares: Callable[[int], Shares]
    active: int  # experts of a token
    phase: int | None = None  # None: there is only one phase
    drawn: int | None = None  # seed, if each iteration has its own draw; None: expected loads

    def at(self, iteration: int) -> Shares:
        return self.shares(0 if self.phase is None else iteration // self.phase)

    def until(self, iteration: int) -> int:
        """The iteration at which the shares next change."""
        return UNLIMITED if self.phase is None else (iteration // self.phase + 1) * self.phase

    def mean(self, begin: int, end: int) -> Shares:
        """Mean shares of the iterations from `begin` up to `end`."""
        total, at = np.zeros_like(self.at(begin)), begin
        while at < end:
            following = min(end, self.until(at))
            total += self.at(at) * (following - at)
            at = following
        mean: Shares = total / (end - begin)
        return mean


class ExpertCost:
    """`GroupCost` of ranks that divide experts. An iteration in which experts move takes longer, as with vLLM's
    balancer without `use_async`: each GPU receives its new experts over its network. `drafter` has the times of the
    drafter on a rank. With `draft_experts` the drafter is a layer whose experts are divided, too: its first pass has
    all tokens of the iteration, and each further pass one token per request, padded to the fullest rank. Raises
    ValueError if the grid is too small."""

    def __init__(
        self,
        grid: ExpertGrid,
        config: EngineConfig,
        load: ExpertLoad,
        balancing: Balancing | None = None,
        host: HostCost = NO_HOST,
        drafter: EngineGrid | None = None,
        *,
        draft_experts: bool = False,
    ) -> None:
        self._drafter, self._passes = drafter, config.tokens_each - 1 if draft_experts else 0
        self._grid, self._config, self._load, self._balancing, self.host = grid, config, load, balancing, host
        experts = load.at(0).shape[1]
        slots = experts + (0 if balancing is None else balancing.num_redundant_experts)
        if slots % grid.gpus:
            raise ValueError(
                f"num_redundant_experts is {slots - experts}: {slots} experts are not a multiple of {grid.gpus} GPUs"
            )
        self._placements = [initial_placement(experts, slots, grid.layers)]  # one for each number of moves before it
        self._pauses = [0]  # ticks of the move to each placement
        self._ranks: dict[Graph, GridCost] = {}
        self.rank(Graph("NONE"))
        self._shares = lru_cache(64)(self._rank_shares)
        self._expected = lru_cache(1 << 14)(self._layer_ticks)

    def rank(self, graph: Graph) -> IterationCost:
        graph = Graph("NONE" if graph.kind == "NONE" else "FULL", graph.size)
        cost = self._ranks.get(graph)
        if cost is None:
            sizes = (graph.size,) if graph.size else self._config.capture_sizes
            cost = GridCost(self._grid.own, replace(self._config, capture_sizes=sizes), NO_HOST, self._drafter)
            self._ranks[graph] = cost
        return cost

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        load, balancing = self._load, self._balancing
        moves = 0 if balancing is None else balancing.moves(iteration)
        phase = 0 if load.phase is None else iteration // load.phase
        until = load.until(iteration)
        more = 0
        if balancing is not None:
            self._move(moves)
            until = min(until, balancing.next_move(iteration))
            if moves > balancing.moves(iteration - 1):
                more, until = self._pauses[moves], iteration + 1
        if load.drawn is None:
            more += self._expected(tokens, moves, phase)
        else:
            more += self._drawn(tokens, moves, phase, iteration)
            until = iteration + 1
        if self._passes:
            each = self._grid.gpus // self._grid.own.tp * requests
            passed = self._expected(tokens, moves, phase) + (self._passes - 1) * self._expected(each, moves, phase)
            more += passed // self._grid.layers
        host = self.host
        lines = [(1, more + (0 if host.overlapped else ticks(cpu)))]
        least = ticks(host.beside(host.launching(graph.kind), cpu))
        if least:
            lines.append((0, least))
        return Together(tuple(lines), until - iteration if until < UNLIMITED else UNLIMITED)

    def fullest(self, iteration: int) -> float:
        """Tokens of the fullest GPU in an iteration, divided by the mean over all GPUs and averaged over the layers."""
        balancing, load = self._balancing, self._load
        moves = 0 if balancing is None else balancing.moves(iteration)
        self._move(moves)
        phase = 0 if load.phase is None else iteration // load.phase
        return float(self._shares(moves, phase).max(axis=1).mean()) * self._grid.gpus

    def _layer_ticks(self, tokens: int, moves: int, phase: int) -> int:
        fullest = self._shares(moves, phase).max(axis=1)  # [layers], as shares of all tokens
        return ticks(float(self._grid.layer_seconds(fullest * tokens).sum()))

    def _drawn(self, tokens: int, moves: int, phase: int, iteration: int) -> int:
        """Ticks if the GPU of each copy of a token is drawn independently in each layer."""
        random = np.random.default_rng((self._load.drawn or 0, iteration))
        copies = tokens * self._load.active
        fullest = random.multinomial(copies, self._shares(moves, phase)).max(axis=1)
        return ticks(float(self._grid.layer_seconds(fullest / self._load.active).sum()))

    def _rank_shares(self, moves: int, phase: int) -> Shares:
        shares = rank_shares(self._load.shares(phase), self._placements[moves], self._grid.gpus)
        exact: Shares = shares / shares.sum(axis=1, keepdims=True)
        return exact

    def _move(self, moves: int) -> None:
        """Find the placement of experts after each of the first `moves` moves, and the ticks of each."""
        balancing, grid = self._balancing, self._grid
        while balancing is not None and len(self._placements) <= moves:
            before = after = self._placements[-1]
            end = balancing.moved_at(len(self._placements))
            if len(self._placements) == 1 or self._load.phase is not None:  # otherwise nothing has changed
                begin = max(0, end - balancing.window_size)
                after = rebalanced(self._load.mean(begin, max(end, begin + 1)), before, grid.gpus)
            come = int(arrivals(before, after, grid.gpus).sum(axis=0).max())
            self._placements.append(after)
            self._pauses.append(ticks(come * grid.expert_bytes / grid.link))
