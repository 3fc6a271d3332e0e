"""Engines described in a YAML file.

Invariant: an accepted file describes a deployment that can be simulated. A refusal is one line with the key and the
remedy. Lengths are tokens, times are seconds. Keys have vLLM's names where vLLM has the option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from libra.config.yaml_file import read_section, refusal
from libra.cost.quantization import Quantization
from libra.hardware.cluster_file import gpu_of
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.hardware.stored_weights import NumberFormat
from libra.route.catalogue import POLICIES, check_policy, is_path
from libra.route.custom import load_policy
from libra.sim.afd_ranks import afd_cost, check_afd
from libra.sim.deployment import DEFAULT_DECODE_ROUTE, Deployment, WeightUpdate
from libra.sim.described_config import described_config
from libra.sim.described_engine import DescribedEngine, described_engine
from libra.sim.described_times import check_host, described_grid, drafter_grid, host_cost
from libra.sim.engine.afd import attention_ranks
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engines_keys import EngineSection, EnginesFile, KVTransferSection, UpdatesSection
from libra.sim.expert_ranks import check_ranks, ranks_cost
from libra.sim.kv_network import RESERVED_DECODE_TOKENS, KVNetwork
from libra.sim.rank_balancer import RankBalancer


def load_engines(path: Path | str, note: Callable[[str], None] = lambda _: None) -> Deployment:
    """Read a file such as `examples/engines.yaml`. `note` gets a line on unusual parts, such as the source of times.
    Raises `ConfigError`."""
    path = Path(path)
    file = read_section(path, EnginesFile, "examples/engines.yaml")
    try:
        engines = []
        for index, section in enumerate(file.engines):
            key = f"engines.{index}"
            section = _reserving(section, key, file.kv_transfer)
            engines += _specs(described_engine(section, key, path.parent, note), key)
        _check_models(file)
        transfer = file.kv_transfer
        _check_route(file.route, "route", RankBalancer.NAME, sticky=file.sticky)
        if transfer is not None:
            _check_route(transfer.route, "kv_transfer.route", sticky=file.sticky)
            if transfer.push and "lease" in transfer.model_fields_set:
                raise ValueError(f"kv_transfer.lease is {transfer.lease}; pushed KV has no lease: leave it out")
        return Deployment(
            tuple(engines),
            file.limits,
            file.turn_tokens,
            file.route,
            file.sticky,
            _updates(file.weight_updates),
            file.time_limit,
            None if transfer is None else KVNetwork(**transfer.model_dump(exclude={"route"})),
            DEFAULT_DECODE_ROUTE if transfer is None else transfer.route,
        )
    except ValueError as error:
        raise refusal(path, str(error)) from None


def load_lender(path: Path | str, note: Callable[[str], None] = lambda _: None) -> tuple[EngineSpec, ModelSpec, str]:
    """Read the one serving engine of an engines file. Returns the engine, its model and its hardware (such as "2 x
    A100"). Raises `ConfigError`, also for a file with several engines, since each engine needs its own certificate."""
    path = Path(path)
    engines = load_engines(path, note).engines
    section = read_section(path, EnginesFile, "examples/engines.yaml").engines[0]
    if len(engines) > 1:
        raise refusal(
            path, f"engines has {len(engines)} entries; a certificate is for one engine: give a file with one engine"
        )
    gpus = section.tensor_parallel_size * section.pipeline_parallel_size
    return engines[0], load_model(section.model), f"{gpus} x {gpu_of(section.gpu, 'gpu').name}"


def _reserving(section: EngineSection, key: str, transfer: KVTransferSection | None) -> EngineSection:
    """The section with the default of `num_reserved_decode_tokens` filled in. Raises ValueError that begins with the
    key."""
    given, decodes = section.num_reserved_decode_tokens, section.role == "decode"
    if given and not decodes:
        raise ValueError(
            f"{key}.num_reserved_decode_tokens is {given}, but role is {section.role}: only engines with role decode"
            " have this key; leave it out"
        )
    if given is None:
        given = RESERVED_DECODE_TOKENS if decodes and transfer is not None and transfer.push else 0
    return section.model_copy(update={"num_reserved_decode_tokens": given})


def _specs(engine: DescribedEngine, key: str) -> list[EngineSpec]:
    """Make the engines of a section, or their ranks. Raises ValueError that begins with the key."""
    section = engine.section
    numbers = range(section.count)
    names = [section.name] if section.count == 1 else [f"{section.name}-{number}" for number in numbers]

    def spec(name: str, config: EngineConfig, cost: IterationCost) -> EngineSpec:
        role = ROLES[section.role]
        return EngineSpec(name, config, cost, section.bucket, devices=engine.gpus, role=role, kv_bytes=engine.kv_bytes)

    try:
        check_host(engine)
        check_ranks(engine)
        if section.afd is not None:
            check_afd(engine, section.afd)
        config = described_config(engine)
        if section.data_parallel_size > 1:
            cost = ranks_cost(engine, config)
            alone = spec(section.name, config, cost.rank(Graph("NONE")))
            groups = [GroupSpec(name, cost, section.dp_sync_interval) for name in names]
            ranks = range(section.data_parallel_size)
            return [replace(alone, name=f"{it.name}-dp{rank}", group=it) for it in groups for rank in ranks]
        if section.afd is not None:
            apart = afd_cost(engine, section.afd, config)
            first = spec(section.name, config, apart.own)
            return [it for name in names for it in attention_ranks(replace(first, name=name), apart)]
        grid = described_grid(engine)
        drafter, host = drafter_grid(engine, grid), host_cost(engine, grid.host)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    try:
        own = GridCost(grid, config, host, drafter)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; lower the keys that exceed it") from None
    return [spec(name, config, own) for name in names]


def _check_route(route: str, key: str, *others: str, sticky: bool) -> None:
    """Raises ValueError, which begins with the key, unless `route` can be loaded. `others` are policies that only this
    key allows."""
    try:
        if not is_path(route):
            check_policy(route, (*POLICIES, *others))
        if route not in others:
            load_policy(route, sticky=sticky)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _updates(given: UpdatesSection | None) -> tuple[WeightUpdate, ...]:
    """The weight updates of a section. Raises ValueError that begins with the key."""
    if given is None:
        return ()
    try:
        return WeightUpdate.every(given.every, given.times, given.pause, refresh=given.refresh)
    except ValueError as error:
        raise ValueError(f"weight_updates.every: {error}") from None


def _check_models(file: EnginesFile) -> None:
    """Raises ValueError if engines exchange KV but cannot use each other's KV."""
    engines = [(f"engines.{index}", it) for index, it in enumerate(file.engines)]
    apart = [it for it in engines if it[1].role != "colocated"]
    _check_alike(apart)
    _check_drafters(apart)
    for name in sorted({tier.name for _, it in engines for tier in it.kv_tiers if tier.shared}):
        sharing = [it for it in engines if any(tier.name == name and tier.shared for tier in it[1].kv_tiers)]
        _check_alike(sharing, "block_size", "tensor_parallel_size")
        tiers = [(key, next(tier for tier in it.kv_tiers if tier.name == name)) for key, it in sharing]
        for key, tier in tiers:
            if tier != tiers[0][1]:
                raise ValueError(
                    f"{key}.kv_tiers: {name} is shared, but differs from that of {tiers[0][0]}: make both equal"
                )


def _check_drafters(engines: Sequence[tuple[str, EngineSection]]) -> None:
    """Raises ValueError unless the engines' drafters store the same KV; vLLM's connectors refuse different drafters."""
    kept = [(key, _drafter(it)) for key, it in engines]
    for key, drafter in kept:
        if drafter != kept[0][1]:
            raise ValueError(
                f"{key}.speculative has {drafter} in the KV cache, but {kept[0][0]}.speculative has {kept[0][1]}: give"
                " both roles the same drafts"
            )


def _drafter(section: EngineSection) -> str:
    """Description of the drafter whose KV is stored with the model's KV."""
    drafts = section.speculative
    if drafts is None or drafts.method == "ngram":
        return "no drafter"
    return drafts.method if drafts.model is None else f"{drafts.method} {drafts.model}"


def _check_alike(engines: Sequence[tuple[str, EngineSection]], *options: str) -> None:
    """Raises ValueError unless the engines have the same model, KV format and `options`."""
    for key, section in engines:
        first = engines[0][1]
        same = {
            "model": load_model(section.model) == load_model(first.model),
            "kv_cache_dtype": _kv_number(section) == _kv_number(first),
            **{option: getattr(section, option) == getattr(first, option) for option in options},
        }
        for option, alike in same.items():
            if not alike:
                here, there = getattr(section, option), getattr(first, option)
                raise ValueError(
                    f"{key}.{option} is {here}, but {engines[0][0]}.{option} is {there}, so their KV differs: make both"
                    " equal"
                )


def _kv_number(section: EngineSection) -> NumberFormat:
    return Quantization(kv_cache_dtype=section.kv_cache_dtype).kv_number(load_model(section.model))
