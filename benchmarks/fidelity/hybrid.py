"""A random case whose engine has KV cache groups: windows, chunks, states, and block sizes that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from libra.hardware.kv_groups import KVGroup
from libra.sim.engine.config import EngineConfig

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
