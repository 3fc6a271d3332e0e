"""Features of the engine of a random case: drafts, KV cache groups, a host tier. vLLM is not needed for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from libra.hardware.kv_groups import KVGroup
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import SEQUENTIAL, Speculative
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.random_workloads import async_case, random_case


def with_drafts(config: EngineConfig, seed: int) -> EngineConfig:
    """The same engine with drafts. Its budget may be enough for all drafts of a full batch, or not; and a pull fits."""
    random = Random(f"drafts {seed}")
    methods = [it for it in SEQUENTIAL if it != "ngram" or not config.async_scheduling]
    drafts, method = random.choice((1, 2, 3, 5)), random.choice(methods)
    if random.random() < 0.3:
        accepted = tuple(random.randint(0, drafts) for _ in range(random.randint(1, 7)))
        speculative = Speculative(method, drafts, accepted=accepted)
    else:
        rates = sorted((random.random() for _ in range(drafts)), reverse=True)
        speculative = Speculative(method, drafts, tuple(rates), seed=seed)
    least = speculative.tokens_each + speculative.input_slots
    budget = max(config.max_num_batched_tokens, least)
    if random.random() < 0.6:
        budget = max(budget, config.max_num_seqs * least)
    config = replace(config, speculative=speculative, max_num_batched_tokens=budget)
    return replace(config, kv_blocks=max(config.kv_blocks, config.blocks(config.max_model_len) + config.draft_blocks))


def drawn_case(seed: int, *, ahead: bool = False, drafts: bool = False) -> tuple[EngineConfig, tuple[Request, ...]]:
    """The random case of a seed; with `ahead` it schedules asynchronously, with `drafts` it has some."""
    config, requests = async_case(seed) if ahead else random_case(seed)
    return with_drafts(config, seed) if drafts else config, requests


def stretch(requests: Iterable[Request], ticks: int) -> None:
    """Let a step, by which requests arrive and are cancelled, take this number of ticks."""
    for request in requests:
        request.arrival *= ticks
        if request.cancel_at is not None:
            request.cancel_at *= ticks


_PLENTY = 1 << 20  # blocks


def with_groups(config: EngineConfig, seed: int) -> EngineConfig:
    """The same engine with one to three KV groups, and about as much room in its pool for its longest context.

    With states, whole prompts are reserved: admitted by first chunks, two prompts may preempt each other for ever, in
    vLLM as here.
    """
    random = Random(f"groups {seed}")
    groups = random.choice((_windows, _windows, _chunks, _states))(random, config)
    states = any(it.kind == "state" for it in groups)
    sizes = [it.block_size for it in groups if it.kind != "state" or config.enable_prefix_caching]
    grouped = replace(
        config,
        kv_groups=groups,
        block_size=max(sizes, default=config.block_size),
        kv_blocks=_PLENTY,
        enable_chunked_prefill=config.enable_chunked_prefill or states,
        reserve_full_prompt=config.reserve_full_prompt or states,
    )
    room = config.kv_blocks / config.blocks(config.max_model_len)
    return replace(grouped, kv_blocks=round(grouped.longest_blocks * max(1.0, room)))


def _windows(random: Random, config: EngineConfig) -> tuple[KVGroup, ...]:
    """Windows of one or two lengths, mostly beside layers that read everything; some with longer blocks."""
    size = config.block_size
    lengths = random.sample(range(2, 80), random.choice((1, 1, 2)))
    groups = [KVGroup("window", size * random.choice((1, 1, 2, 4)), length) for length in lengths]
    if random.random() < 0.4:
        groups.append(groups[0])
    full = [KVGroup("full", size * random.choice((1, 1, 2)))] if random.random() < 0.85 else []
    return _shuffled(random, [*full, *groups][:3])


def _chunks(random: Random, config: EngineConfig) -> tuple[KVGroup, ...]:
    size = config.block_size
    groups = [KVGroup("chunk", size, size * random.randint(2, 6))] * random.choice((1, 2))
    if random.random() < 0.3:
        groups[-1] = KVGroup("window", size, random.randint(2, 60))
    return _shuffled(random, [*([KVGroup("full", size)] if random.random() < 0.85 else []), *groups])


def _states(random: Random, config: EngineConfig) -> tuple[KVGroup, ...]:
    size = config.block_size
    groups = [KVGroup("state", size)] * random.choice((1, 1, 2))
    if random.random() < 0.25:
        groups[-1] = KVGroup("window", size, random.randint(2, 60))
    return _shuffled(random, [KVGroup("full", size), *groups])


def _shuffled(random: Random, groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    return tuple(random.sample(groups, len(groups)))


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
