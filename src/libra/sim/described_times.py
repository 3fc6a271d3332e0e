"""Durations of the iterations of an engine in a file: the engine's kernels, its drafter's kernels, and the host.

Invariant: every time has a source. An engine without a time is refused in a line that begins with the key.
"""

from __future__ import annotations

from dataclasses import replace

from libra.config.yaml_file import ConfigError
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.cost.sources.profiles import engine_profiles, host_part
from libra.hardware.cluster import Cluster
from libra.hardware.model_file import load_model
from libra.sim.described_engine import DescribedEngine
from libra.sim.engines_keys import OverheadSection


def check_host(engine: DescribedEngine) -> None:
    """Raises ValueError that begins with the key if the host's times cannot be read."""
    try:
        host_part(engine.host, engine.model, lambda _: None)
    except ConfigError as error:
        raise ValueError(f"host: {str(error).removeprefix('--host ')}") from None


def of_profile(error: ValueError) -> ValueError:
    """The error of the option `--profile`, renamed to the file's key."""
    return ValueError(f"profile: {str(error).removeprefix('--profile ')}")


def described_grid(engine: DescribedEngine) -> EngineGrid:
    """The times of an engine's kernels. Raises ValueError that begins with the key."""
    cluster = Cluster((engine.nodes,))
    try:
        (profile,) = engine_profiles(cluster, engine.model, engine.recipe, engine.source, engine.note, engine.host)
    except ConfigError as error:
        raise of_profile(error) from None
    try:
        return profile.grid(engine.tp)
    except ValueError:
        known = ", ".join(str(grid.tp) for grid in profile.engines)
        raise ValueError(
            f"tensor_parallel_size is {engine.tp}, but engine times ({profile.source}) are known only for {known}: give"
            " one of these"
        ) from None


def drafter_grid(engine: DescribedEngine, grid: EngineGrid) -> EngineGrid | None:
    """The times of the drafter; None without a drafter. The drafter is a model of its own, or one layer of the engine's
    model, whose times are `grid`. Raises ValueError that begins with the key."""
    drafts = engine.section.speculative
    if drafts is None or drafts.method == "ngram":
        return None
    if drafts.model is None:
        return grid.slowed(1 / engine.model.layers)
    try:
        small = load_model(drafts.model)
        if small.max_context < engine.longest:
            raise ValueError(
                f"{small.name} is made for {small.max_context} tokens, fewer than max_model_len: lower max_model_len"
            )
        section = engine.section.model_copy(update={"host": "none", "quantization": None})
        return described_grid(replace(engine, section=section, model=small, note=lambda _: None))
    except ValueError as error:
        raise ValueError(f"speculative.model: {error}") from None


def host_cost(engine: DescribedEngine, host: HostCost) -> HostCost:
    """The host overhead: `host`, from the profile, or the section's overhead if `host` has no price. Raises ValueError
    that begins with the key."""
    section, overhead = engine.section, engine.section.overhead
    if not host.priced:
        return HostCost(overhead.iteration, overhead.request, overhead.overlapped, source="engines file")
    if overhead != OverheadSection():
        raise ValueError(f"host is {section.host}, but overhead is given, too: leave one of them out")
    return replace(host, overlapped=True) if section.async_scheduling else host
