"""Memory of a plan's devices, as computed by the planner.

Invariant: the planner used the same numbers to decide which engines and layouts fit. Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.config.recipe import TrainingBytes
from libra.cost.adapters import engine_bytes, reference_of, training_bytes
from libra.cost.engine_memory import held_bytes
from libra.cost.quantization import rollout_quantization
from libra.cost.train_memory import MemoryBreakdown, training_memory
from libra.hardware.parallel import ParallelLayout
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import engine_kv_tokens
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of each device with one duty: training, or engines of one shape."""

    duty: str  # "training", or the shape of the engine
    used: float
    there: float  # memory of the GPU
    parts: tuple[tuple[str, float], ...]  # of `used`, the largest first


def device_memory(plan: Plan) -> tuple[DeviceMemory, ...]:
    """Memory by duty: trainers first, then the engines of each shape. An engine uses all its allowed memory, with the
    remainder as KV cache. Lent engines are left out, since their owners manage the memory. Empty for the plan of a run
    on one machine.
    """
    if plan.layout is None:
        return ()
    request = plan.of_cluster
    lent = {loan.pool for loan in plan.loans}
    alike = {(group.name, group.devices): group for group in plan.placement if group.pool not in lent}
    return tuple(
        _trainer(plan, request, group) if group.role == "train" else _engine(request, group)
        for group in sorted(alike.values(), key=lambda it: it.role != "train")
    )


def host_bytes(plan: Plan) -> float:
    """Bytes of optimiser state in the memory of each trainer's host; 0 if the state is on the devices."""
    if plan.layout is None or not plan.of_cluster.recipe.offload_optimiser:
        return 0.0
    request = plan.of_cluster
    pool = next(group.pool for group in plan.placement if group.role == "train")
    on_device = replace(training_bytes(request.recipe, request.model), offloaded=False)
    each = _training(plan.layout, request, pool, on_device).optimiser
    return each * min(plan.layout.devices, request.cluster.node_class(pool).gpus)


def _training(layout: ParallelLayout, request: ClusterRequest, pool: str, state: TrainingBytes) -> MemoryBreakdown:
    recipe, there = request.recipe, request.cluster.node_class(pool).gpu.memory
    reference = reference_of(recipe)
    return training_memory(request.model, layout, recipe.max_length, there, state, reference, recipe.execution)


def _trainer(plan: Plan, request: ClusterRequest, group: DeviceGroup) -> DeviceMemory:
    assert plan.layout is not None
    there = request.cluster.node_class(group.pool).gpu.memory
    items = _training(plan.layout, request, group.pool, training_bytes(request.recipe, request.model))
    parts = {
        "weights": items.weights + items.gradients + items.optimiser + items.reference,
        "activations": items.activations + items.logits + items.workspace,
        "reserve": items.margin,
    }
    return _memory("training", there, parts)


def _engine(request: ClusterRequest, group: DeviceGroup) -> DeviceMemory:
    recipe, nodes, model = request.recipe, request.cluster.node_class(group.pool), request.model
    quantization, tp = rollout_quantization(recipe), group.devices
    weights, adapters = quantization.weight_bytes(model, tp), engine_bytes(recipe, model, tp)
    held = held_bytes(
        *(model, tp),
        batched_tokens=recipe.max_batched_tokens,
        quantization=quantization,
        switched=nodes.gpu.switched,
    )
    token = quantization.kv_bytes_per_token(model, tp, context=recipe.max_length)
    kv = engine_kv_tokens(model, nodes, recipe, tp) * token
    parts = {"weights": weights + adapters, "KV cache": kv, "activations": held - weights}
    return _memory(group.name, nodes.gpu.memory, parts)


def _memory(duty: str, there: float, parts: dict[str, float]) -> DeviceMemory:
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return DeviceMemory(duty, sum(parts.values()), there, tuple(largest))
