"""A800 nodes, and the times of engines on them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from libra.config.recipe import Recipe
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec

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


def shape_file(model: str) -> Path:
    """The file that `load_model` reads for a name of the library: an input of every cell that asks for it."""
    return Path(str(files("libra.hardware"))) / "models" / f"{model.replace('/', '--')}.json"
