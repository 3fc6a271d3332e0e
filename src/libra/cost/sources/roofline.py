"""Engine times of a model on a GPU from its data sheet: grids of iterations, with a roofline for every kernel.

Invariant: an iteration is all layers and the output head. The host's work is assumed to overlap with the device (CUDA
graphs, asynchronous scheduling), as in the tables from which the rates come.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from libra.config.recipe import Recipe
from libra.cost.adapters import engine_bytes
from libra.cost.afd import StageGrid, token_copies
from libra.cost.engine_memory import kv_tokens
from libra.cost.grid import Array, EngineGrid, EngineProfile, Table
from libra.cost.quantization import ACTIVATION_BYTES, AS_STORED, Quantization, rollout_quantization
from libra.cost.sources.layer_kernels import LayerKernels, StoredNumbers
from libra.cost.sources.rates import Calibration, Rates, rates
from libra.cost.transfer import Fabric, fabric
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.model import ModelSpec

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = tuple(2**power for power in range(8, 18))
CHUNKS = tuple(2**power for power in range(4, 15))
PREFIXES = (0, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
TOKENS = tuple(2**power for power in range(21))  # of a micro-batch on all attention ranks


def tensor_degrees(model: ModelSpec, nodes: NodeClass) -> tuple[int, ...]:
    """Tensor-parallel degrees of an engine: powers of two that divide the node's GPUs and the model's heads."""
    powers = [2**k for k in range(nodes.gpus.bit_length()) if nodes.gpus % 2**k == 0]
    return tuple(tp for tp in powers if model.tp_refusal(tp) is None)


def engine_degrees(model: ModelSpec, nodes: NodeClass, recipe: Recipe) -> tuple[int, ...]:
    """Tensor-parallel degrees of an engine on these nodes: all degrees inside a node. If none of them holds a
    trajectory of `max_length`, and the framework can start larger engines, also the two smallest degrees of whole nodes
    that hold one.
    """
    inside, quantization = tensor_degrees(model, nodes), rollout_quantization(recipe)

    def holds(tp: int) -> bool:
        held = kv_tokens(
            *(model, nodes.gpu.usable, recipe.gpu_memory_utilization, tp),
            batched_tokens=recipe.max_batched_tokens,
            quantization=quantization,
            taken=engine_bytes(recipe, model, tp),
            switched=nodes.gpu.switched,
        )
        return held >= recipe.max_length

    fits = any(holds(tp) for tp in inside if quantization.tp_refusal(model, tp) is None)
    if fits or not recipe.carried_by.engines_over_nodes:
        return inside
    over = (2**k * nodes.gpus for k in range(1, nodes.count.bit_length()) if 2**k <= nodes.count)
    able = (tp for tp in over if model.tp_refusal(tp) is None and quantization.tp_refusal(model, tp) is None)
    return inside + tuple(islice(filter(holds, able), 2))


def node_roofline(
    nodes: NodeClass, model: ModelSpec, recipe: Recipe, calibration: Calibration | None = None
) -> EngineProfile:
    """The roofline of all engine degrees on these nodes, with measured rates if there is a calibration."""
    return roofline(
        nodes.gpu,
        model,
        engine_degrees(model, nodes, recipe),
        quantization=rollout_quantization(recipe),
        intra_bandwidth=nodes.intra_bandwidth,
        between=fabric(nodes),
        calibration=calibration,
    )


def roofline(
    gpu: GPU,
    model: ModelSpec,
    tps: Iterable[int],
    *,
    quantization: Quantization = AS_STORED,
    intra_bandwidth: float | None = None,
    between: Fabric | None = None,
    calibration: Calibration | None = None,
) -> EngineProfile:
    """The profile of a model at the given degrees, from constants or from a calibration of the device.

    Quantised matrices are multiplied at the rate of their type if the GPU has tensor cores for it, otherwise at the
    rate of bf16. Attention always uses bf16. `intra_bandwidth` is bytes/s of a GPU to its neighbours in one direction,
    by default the GPU's own link; `between` connects nodes if a degree exceeds one node. Raises ValueError if a degree
    does not divide the model.
    """
    link = gpu.link if intra_bandwidth is None else intra_bandwidth
    if not link > 0:
        raise ValueError(f"intra_bandwidth is {link}; give bytes/s in one direction, above 0")
    reached = rates(gpu, calibration)
    stored = StoredNumbers.on(gpu, quantization, model)
    engines = tuple(_grid(reached, model, tp, stored, link, between) for tp in sorted(set(tps)))
    kind = "roofline" if calibration is None else "calibration"
    return EngineProfile(gpu.name, model.name, quantization.name(model), f"{kind}: {reached.source}", engines)


def stage_roofline(
    gpu: GPU,
    model: ModelSpec,
    tp: int,
    ffn: int,
    *,
    ffn_gpu: GPU | None = None,
    quantization: Quantization = AS_STORED,
    calibration: Calibration | None = None,
) -> StageGrid:
    """Stage times with attention on ranks of `tp` GPUs and FFN on `ffn` GPUs, which may be of another type. Raises
    ValueError like `roofline`.
    """
    require_degree(model, tp)
    reached = rates(gpu, calibration)
    layers = LayerKernels(reached, model, tp, StoredNumbers.on(gpu, quantization, model), gpu.link)
    sparse = model.sparse_layers
    batch, context = np.array(BATCHES, dtype=float)[:, None], np.array(CONTEXTS, dtype=float)
    chunk, prefix = np.array(CHUNKS, dtype=float)[:, None], np.array(PREFIXES, dtype=float)
    decode = layers.decode_beside_experts(batch, batch * context)
    prefill = layers.prefill_beside_experts(chunk, prefix)
    tokens = np.array(TOKENS, dtype=float)
    other = reached if ffn_gpu is None or ffn_gpu == gpu else rates(ffn_gpu)
    stored = StoredNumbers.on(ffn_gpu or gpu, quantization, model)
    experts = LayerKernels(other, model, 1, stored, gpu.link).experts_of(tokens, ffn)
    source = f"{'roofline' if calibration is None else 'calibration'}: {reached.source}"
    return StageGrid(
        attention=EngineGrid(tp, BATCHES, CONTEXTS, _table(decode), CHUNKS, PREFIXES, _table(prefill)),
        layers=sparse,
        dense=model.dense_layers,
        tokens=TOKENS,
        outside=tuple(layers.outside(tokens).tolist()),
        head=tuple(layers.head(tokens).tolist()),
        experts=tuple(experts.tolist()),
        ffn=ffn,
        token_bytes=ACTIVATION_BYTES * layers.expert_width * token_copies(model, ffn),
        source=source if other is reached else f"{source}; FFN: {other.source}",
    )


def require_degree(model: ModelSpec, tp: int) -> None:
    """Raise ValueError if engines cannot divide the model over `tp` GPUs."""
    refusal = model.tp_refusal(tp)
    if refusal is not None:
        raise ValueError(f"{model.name}: {refusal}")


def _grid(
    reached: Rates, model: ModelSpec, tp: int, stored: StoredNumbers, link: float, between: Fabric | None
) -> EngineGrid:
    require_degree(model, tp)
    layers = LayerKernels(reached, model, tp, stored, link, between)
    batch, context = np.array(BATCHES, dtype=float)[:, None], np.array(CONTEXTS, dtype=float)
    chunk, prefix = np.array(CHUNKS, dtype=float)[:, None], np.array(PREFIXES, dtype=float)
    decode = layers.decode_attention(batch, batch * context) + layers.rest(batch, batch)
    prefill = layers.prefill_attention(chunk, prefix) + layers.rest(chunk, np.ones_like(chunk))
    return EngineGrid(tp, BATCHES, CONTEXTS, _table(decode), CHUNKS, PREFIXES, _table(prefill))


def _table(seconds: Array) -> Table:
    return tuple(tuple(row) for row in seconds.tolist())
