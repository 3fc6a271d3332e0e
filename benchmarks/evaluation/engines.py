"""Engines of one tensor-parallel degree on A800 nodes, as the simulator runs them.

Invariant: memory and times are those that a plan for these nodes is priced with.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from libra.config.recipe import Recipe
from libra.cost.engine_memory import BLOCK
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.plan.options.engines import engine_kv_tokens
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.planned_engines import captured

GPUS_OF_NODE = 8
_INTER = 200e9 / 8  # bytes/s of a node: 200 Gb/s, as in Libra (arXiv 2606.03077)


def a800_nodes(count: int) -> Cluster:
    """A cluster of `count` nodes of 8 A800."""
    gpu = GPUS["A800"]
    return Cluster((NodeClass("a800", count, GPUS_OF_NODE, gpu, gpu.link, _INTER),))


def profiles_of(
    cluster: Cluster, model: ModelSpec, recipe: Recipe, source: str = "tables"
) -> tuple[EngineProfile, ...]:
    """Engine times of all systems alike: kernels, and what vLLM's process adds to them.

    `source` is that of `engine_profiles`; the default is no `auto`, so that numbers do not depend on what is installed.
    """
    return engine_profiles(cluster, model, recipe, source, host="default")


def engines_of(
    model: ModelSpec, cluster: Cluster, recipe: Recipe, tp: int, max_num_seqs: int, source: str = "tables"
) -> tuple[EngineSpec, ...]:
    """Engines of `tp` GPUs on the whole cluster, each with at most `max_num_seqs` sequences at once."""
    (nodes,) = cluster.nodes
    (profile,) = profiles_of(cluster, model, recipe, source)
    kv = engine_kv_tokens(model, nodes, recipe, tp)
    config = EngineConfig(
        max_model_len=min(kv, recipe.max_length),
        kv_blocks=kv // BLOCK,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=recipe.max_batched_tokens,
    )
    config, cost = captured(profile.grid(tp), config)
    return tuple(EngineSpec(f"tp{tp}-{number}", config, cost) for number in range(cluster.devices // tp))


def shape_file(model: str) -> Path:
    """The file that `load_model` reads for a name of the library: an input of every cell that asks for it."""
    return Path(str(files("libra.hardware"))) / "models" / f"{model.replace('/', '--')}.json"
