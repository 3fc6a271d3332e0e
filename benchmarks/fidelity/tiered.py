"""Random engines with a host tier. vLLM is not needed for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.fidelity.drafts import drawn_case, stretch
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests


@dataclass(frozen=True, slots=True)
class Tiered:
    """A step takes `step + per_token * tokens` ticks."""

    config: EngineConfig
    step: int
    per_token: int
    store: int  # ticks of a block
    load: int


def random_tier(seed: int, *, ahead: bool = False, drafts: bool = False) -> tuple[Tiered, tuple[Request, ...]]:
    """The random case of a seed with a tier that is small or large, slow or quick; with `ahead` it schedules
    asynchronously, with `drafts` it has some."""
    config, requests = drawn_case(seed, ahead=ahead, drafts=drafts)
    random = Random(f"tier {seed}")
    step, per_token = random.randint(1, 50), random.randint(0, 5)
    stretch(requests, step)
    if drafts:
        per_token = 0  # a row that the budget cuts costs the simulator as much as a whole one
    config, store, load = with_tier(config, random, step)
    return Tiered(config, step, per_token, store, load), requests


def with_tier(config: EngineConfig, random: Random, step: int) -> tuple[EngineConfig, int, int]:
    """An engine with a tier, and the ticks to store and to load a block, drawn relative to those of a `step`."""
    store, load = (random.choice((1, max(1, step // 4), step, 5 * step)) for _ in range(2))
    # A context that is one chunk of one token is loaded, found to lack what is sampled from, and loaded again for ever.
    blocks_per_chunk = random.choice((1, 1, 2, 3) if config.block_size > 1 else (2, 3))
    least = -(-config.max_model_len // (config.block_size * blocks_per_chunk))
    tier = KVTier(
        "host",
        chunks=round(least * random.choice((1, 1.2, 2, 5, 50))),
        block_bytes=1.0,
        store_bandwidth=TICKS / store,
        load_bandwidth=TICKS / load,
        blocks_per_chunk=blocks_per_chunk,
        policy=random.choice(("lru", "arc")),
        offload_prompt_only=random.random() < 0.6,
    )
    return replace(config, enable_prefix_caching=True, kv_tiers=(tier,)), store, load


def tiered_cluster(
    case: Tiered,
    requests: Sequence[Request],
    *,
    exact: bool = False,
    trace: Callable[[Iteration], None] | None = None,
) -> SimCluster:
    """A cluster of the case's one engine. Its run writes the requests."""
    cost = AffineCost(case.step, per_sequence=case.per_token, per_new_token=case.per_token)
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    spec = EngineSpec("engine", case.config, cost)
    return SimCluster([spec], Requests(lambda: ordered, {}), exact=exact, trace=trace)
