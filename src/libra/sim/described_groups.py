"""KV cache groups of an engine in a file: the file's groups, or the groups that vLLM forms from the model's layers.

Invariant: a model whose layers all read the whole context has no groups, and uses the simulator's own blocks.
"""

from __future__ import annotations

from libra.hardware.kv_layers import GroupedLayers, group_layers
from libra.hardware.latent import CompressedAttention
from libra.hardware.model_groups import kv_layers, whole_layers
from libra.sim.described_engine import DescribedEngine

_REMEDY = "leave it out, or set disable_hybrid_kv_cache_manager to true"


def grouped_layers(engine: DescribedEngine) -> GroupedLayers | None:
    """Groups of an engine's model; None: the model needs no groups, or the section lists groups. Raises ValueError, for
    a key that the simulator does not support together with groups."""
    section, model = engine.section, engine.model
    if section.kv_groups or model.even:
        return None
    if any(isinstance(kind.mixer, CompressedAttention) for kind in model.kinds):
        return None  # vLLM packs this model's pages differently; its KV per token is that at the longest context
    layers = kv_layers(model, engine.quantization.kv_number(model).bytes, engine.tp)
    if section.disable_hybrid_kv_cache_manager:
        return group_layers(whole_layers(layers), section.block_size)
    for key, given in (
        ("kv_tiers", bool(section.kv_tiers)),
        ("speculative", section.speculative is not None),
        ("pipeline_parallel_size", section.pipeline_parallel_size > 1),
        ("role", section.role != "colocated"),
    ):
        if given:
            raise ValueError(
                f"{key} is not simulated with KV cache groups, in which vLLM puts the layers of {model.name}: {_REMEDY}"
            )
    return group_layers(layers, section.block_size)


def told(engine: DescribedEngine, grouped: GroupedLayers) -> str:
    """A note on the groups that were formed."""
    groups = [
        f"{layers} x {group.kind}{f' {group.tokens}' if group.tokens else ''}"
        for group, layers in zip(grouped.groups, grouped.layers, strict=True)
    ]
    return f"{engine.model.name}: layers in {len(groups)} KV cache groups: {', '.join(groups)}"
