"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): their parameters in training, memory and publication.

An adapter of rank r on a matrix of n inputs and m outputs has r (n + m) parameters. The matrices are frozen: they have
no gradients and no optimiser state, and their backward pass computes only gradients of activations. Engines get only
the adapters as an update. The reference model is the policy without adapters, so it takes no memory.
"""

from __future__ import annotations

from libra.config.recipe import Recipe, TrainingBytes
from libra.cost.quantization import rollout_quantization
from libra.cost.train_memory import Reference
from libra.hardware.layers import LayerKind
from libra.hardware.mlp import MLP
from libra.hardware.model import ModelSpec

_PUBLISHED_BYTES = 2  # of one parameter of an adapter


def adapter_parameters(model: ModelSpec, rank: int, attention_only: bool = False, tp: int = 1) -> float:
    """Parameters of adapters on all matrices of all layers, or only on those of attention and states. Embeddings, the
    output head, norms and routers have no adapters. Each of `tp` devices stores the side of the hidden width whole, and
    a part of the other side.
    """
    return sum(count * _of_layer(kind, model.hidden, rank, attention_only, tp) for kind, count in model.counted)


def _of_layer(kind: LayerKind, hidden: int, rank: int, attention_only: bool, tp: int) -> float:
    mixer = () if kind.mixer is None else kind.mixer.matrices(hidden)
    sides = 0.0
    for matrix in mixer:
        whole = hidden if hidden in (matrix.inputs, matrix.outputs) else 0
        sides += whole + (matrix.inputs + matrix.outputs - whole) / tp
    if attention_only or kind.mlp is None:
        return rank * sides
    if isinstance(kind.mlp, MLP):
        return rank * (sides + kind.mlp.matrices * (hidden + kind.mlp.intermediate / tp))
    experts = kind.mlp
    routed = experts.count * (experts.width(hidden) + experts.intermediate / tp)
    shared = hidden + experts.shared_intermediate / tp if experts.shared_intermediate else 0
    around = 2 * (hidden + experts.latent) if experts.latent else 0
    return rank * (sides + experts.matrices * (routed + shared) + around)


def engine_bytes(recipe: Recipe, model: ModelSpec, tp: int) -> float:
    """Bytes of adapters on each of an engine's `tp` devices. vLLM always reserves memory for adapters of all
    matrices.
    """
    if recipe.lora_rank is None:
        return 0.0
    return _PUBLISHED_BYTES * adapter_parameters(model, recipe.lora_rank, tp=tp)


def trained_parameters(recipe: Recipe, model: ModelSpec) -> int:
    """Number of parameters that a step changes: all, or only those of adapters."""
    if recipe.lora_rank is None:
        return model.trained_parameters
    return int(adapter_parameters(model, recipe.lora_rank, recipe.lora_targets == "attention"))


def training_bytes(recipe: Recipe, model: ModelSpec) -> TrainingBytes:
    """Bytes that training keeps per parameter of the model. With adapters, the bytes of their weights, gradients and
    optimiser state are averaged over all parameters.
    """
    whole = recipe.training_bytes
    if recipe.lora_rank is None:
        return whole
    share = trained_parameters(recipe, model) / model.trained_parameters
    return TrainingBytes(
        weights=whole.weights,
        gradients=share * whole.gradients,
        states=share * (whole.states + whole.weights),
        compute=whole.compute,
        trained=share,
        copies=whole.copies,
        offloaded=whole.offloaded,
    )


def reference_of(recipe: Recipe) -> Reference:
    """The reference model that training stores; with adapters, the frozen weights are the reference."""
    return "base" if recipe.lora_rank is not None and recipe.reference != "none" else recipe.reference


def version_bytes(recipe: Recipe, model: ModelSpec) -> float:
    """Bytes sent by one weight update."""
    if recipe.lora_rank is None:
        return rollout_quantization(recipe).version_bytes(model)
    return float(_PUBLISHED_BYTES * trained_parameters(recipe, model))
