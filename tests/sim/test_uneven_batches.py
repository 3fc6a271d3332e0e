"""What batches say of their contexts: how far apart they are, what they share. In jumps it is what it is in visits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import simulate
from test_batching_equality import GRID, longest_iteration, seeds, timed

from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.cost.kernels import KernelTerms
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import NONE_ADMITTED, UNLIMITED, Admitted, Chunk, DecodeBatch
from tests.oracles.fidelity.random_workloads import async_case, random_case


@st.composite
def host_costs(draw: st.DrawFn, config: EngineConfig) -> GridCost:
    seconds = st.sampled_from([0.0, 3e-7, 2e-6])
    host = HostCost(
        *(draw(seconds), draw(seconds) / 10, draw(st.booleans()), draw(seconds), draw(seconds) / 10),
        *(draw(seconds) / 10, draw(seconds), draw(seconds)),
    )
    terms = KernelTerms(
        draw(st.sampled_from([0.0, 0.75, 2.0])),
        draw(st.sampled_from([0.0, 0.5, 0.9])),
        draw(st.sampled_from([None, 1.0, 1.3])),
        draw(st.sampled_from([0.0, 1e-8])),
    )
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= config.max_num_batched_tokens)
    config = replace(config, capture_sizes=draw(st.sampled_from([(), sizes])))
    grid = EngineGrid(
        1, GRID.batches, GRID.contexts, GRID.decode, GRID.chunks, GRID.prefixes, GRID.prefill, terms, host
    )
    return GridCost(grid, config)


@settings(max_examples=100, deadline=None)
@given(st.data(), seeds)
def test_jumps_take_as_long_as_visits(data: Any, seed: int) -> None:
    config, _ = random_case(seed)
    config = replace(config, async_scheduling=data.draw(st.booleans()))
    cost = data.draw(host_costs(config))
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())
    jumped = simulate(config, cost, lambda: timed(seed, ticks, generic))
    visited = simulate(config, cost, lambda: timed(seed, ticks, generic), exact=True)
    assert jumped.iterations == visited.iterations
    assert jumped.result == visited.result


@dataclass
class Listening:
    """A cost that compares what batches say with what their engine holds, one block and one request after the other."""

    engine: SimEngine | None = None
    heard: list[tuple[int, int]] = field(default_factory=list)
    stalled: int = 0  # iterations that went without some of the requests

    @property
    def uneven(self) -> bool:
        return True

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        self._compare(batch, context)
        return 5, 0, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        assert admitted.requests <= len(chunks)
        assert admitted.cached <= admitted.tokens
        assert sum(before for _, before in chunks[len(chunks) - admitted.requests :]) == admitted.cached
        return 7

    def _compare(self, batch: DecodeBatch, context: int) -> None:
        assert self.engine is not None
        generation = self.engine.flight.generation
        running = [it for it in self.engine.running if self.engine.generation_of(it) is not None]
        contexts = [generation.computed(request) for request in running if request not in generation.stalled]
        count = len(contexts)
        if count != batch.requests:  # its first token is under way
            return
        self.stalled += bool(generation.stalled)
        assert batch.spread == isqrt(count * sum(it * it for it in contexts) - sum(contexts) ** 2)
        assert batch.shared <= (context if count > 1 else 0) or not generation.stalled
        self.heard.append((batch.spread, batch.shared))


def _computed(engine: SimEngine, request: Any) -> int:
    generation = engine.generation_of(request)
    return request.computed if generation is None else generation.computed(request)


def test_batches_tell_their_spread_and_blocks_their_holders() -> None:
    told: list[tuple[int, int]] = []
    stalled = 0
    for seed in range(160):
        random = Random(seed)
        config, requests = (random_case if seed < 80 else async_case)(seed)
        cost = Listening()
        cost.engine = engine = SimEngine(config, cost, exact=True)
        waiting = sorted(requests, key=lambda it: (it.arrival, it.number))
        now = 0
        while waiting or engine.busy:
            if engine.busy:
                now = engine.end
                engine.commit()
                references = sum(config.blocks(_computed(engine, it)) for it in engine.running)
                assert config.async_scheduling or engine.pool.shared == references - engine.pool.held
            else:
                now = max(now, waiting[0].arrival)
            while waiting and waiting[0].arrival <= now:
                engine.submit(waiting.pop(0), now)
            if engine.running and random.random() < 0.1:
                engine.cancel(random.choice(list(engine.running)), now)
            engine.plan(now)
        assert engine.pool.shared == 0
        told += cost.heard
        stalled += cost.stalled
    assert max(spread for spread, _ in told) > 0
    assert max(shared for _, shared in told) > 0
    assert stalled > 0
