"""The engines of a plan, for the simulator.

Invariant: memory, times, `max_num_seqs` and places are the ones that the planner priced and chose. The simulator adds
no assumptions of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from libra.cost.device import slowed
from libra.cost.engine_memory import BLOCK, BLOCK_TOKENS
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid
from libra.cost.quantization import rollout_quantization
from libra.cost.transfer import fabric
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import batch_kv_tokens, engine_kv_tokens
from libra.plan.options.menu import BorrowedEngine
from libra.plan.options.pairs import kv_rate
from libra.plan.options.request import PlanningRequest
from libra.plan.options.slots import SlotRequest
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import IterationCost, measured_cost
from libra.sim.kv_network import KVNetwork


class PlacementError(ValueError):
    """A plan's placement lacks engines, in total or in a bucket."""


def planned_engines(plan: Plan, *, granted: bool = False) -> tuple[EngineSpec, ...]:
    """Every engine of a plan, shortest bucket first. An engine of a cluster is named after its GPUs: `a800-0/4-7` has
    GPUs 4 to 7 of node 0. Lent engines have the speed of their share of the device, or with `granted` full speed.

    Raises ValueError if a configuration cannot run, and `PlacementError` if a bucket has no engine.
    """
    request = plan.request
    engines = _of_slots(plan, request) if isinstance(request, SlotRequest) else _of_cluster(plan, request, granted)
    if not engines:
        raise PlacementError("placement has no engine: plan again")
    placed = {engine.bucket for engine in engines}
    for bucket, allocated in enumerate(plan.allocation.buckets):
        if bucket not in placed:
            raise PlacementError(
                f"placement has no engine for the bucket of contexts up to {allocated.up_to:,} tokens: plan again"
            )
    return engines


def planned_network(request: ClusterRequest) -> KVNetwork | None:
    """The network from prefill to decode; None if the recipe allows no prefill/decode pairs. Each GPU has an equal
    share of its node's network, and the slowest nodes determine the speed."""
    if not request.recipe.prefill_decode:
        return None
    nodes = request.cluster.nodes
    return KVNetwork(min(map(kv_rate, nodes)), max(fabric(its).network_latency for its in nodes))


def lent_engines(plan: Plan) -> frozenset[str]:
    """Names of the lent engines."""
    pools = {loan.pool for loan in plan.loans}
    return frozenset(_name(group) for group in plan.placement if group.pool in pools)


def beside_lent(plan: Plan) -> dict[str, BorrowedEngine]:
    """The planned options of the lent engines, by engine name."""
    if not plan.loans:
        return {}
    request: PlanningRequest = plan.request
    shapes = {it.shape: it for it in request.menu().lent}
    return {_name(group): shapes[group.name] for group in plan.placement if group.name in shapes}


def _of_slots(plan: Plan, request: SlotRequest) -> tuple[EngineSpec, ...]:
    shapes = {shape.name: shape for shape in request.shapes}
    costs = dict.fromkeys(shapes, measured_cost(request.profile.engine))
    if (lent := request.lent) is not None:
        shapes[lent.shape.name] = lent.shape
        costs[lent.shape.name] = measured_cost(slowed(request.profile.engine, 1 / lent.share))
    engines: list[EngineSpec] = []
    for index, bucket in enumerate(plan.allocation.buckets):
        shape = shapes[bucket.shape]
        config = EngineConfig(
            max_model_len=min(shape.max_model_len, shape.kv_tokens),
            kv_blocks=shape.kv_tokens // BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            max_num_seqs=shape.max_num_seqs,
        )
        engines += [
            EngineSpec(f"{shape.name}-{index}.{number}", config, costs[shape.name], index)
            for number in range(bucket.engines)
        ]
    return tuple(engines)


def _of_cluster(plan: Plan, request: ClusterRequest, granted: bool) -> tuple[EngineSpec, ...]:
    made: dict[tuple[int, str], tuple[EngineConfig, IterationCost]] = {}
    recipe = request.recipe
    kv_bytes = rollout_quantization(recipe).kv_bytes_per_token(request.model, context=recipe.max_length)
    beside = {it.shape: it for it in request.menu().lent} if plan.loans else {}
    engines = []
    for group in plan.placement:
        if group.bucket is None:
            continue
        kind = group.bucket, group.role
        if kind not in made:
            seqs = plan.max_num_seqs[group.bucket]
            lent = beside.get(group.name)
            made[kind] = _engine(request, group, seqs) if lent is None else _lent(request, lent, seqs, granted)
        config, cost = made[kind]
        spec = EngineSpec(_name(group), config, cost, group.bucket, f"{group.pool}-{group.nodes[0]}", group.devices)
        if group.role == "prefill" or group.role == "decode":
            # A change of plan may stop the prefill engine before the KV of a prompt is read.
            its = replace(config, kv_load_failure_policy="recompute")
            spec = replace(spec, config=its, role=ROLES[group.role], kv_bytes=kv_bytes)
        engines.append(spec)
    return tuple(engines)


def _engine(request: ClusterRequest, group: DeviceGroup, max_num_seqs: int) -> tuple[EngineConfig, IterationCost]:
    recipe, nodes = request.recipe, request.cluster.node_class(group.pool)
    kv = batch_kv_tokens(request.model, nodes, recipe, group.devices, request.classes)
    longest = engine_kv_tokens(request.model, nodes, recipe, group.devices)
    config = EngineConfig(
        max_model_len=min(longest, recipe.max_length),
        kv_blocks=kv // BLOCK,
        block_size=BLOCK,
        max_num_seqs=min(max_num_seqs, recipe.max_batched_tokens) if group.role == "prefill" else max_num_seqs,
        max_num_batched_tokens=recipe.max_batched_tokens,
    )
    profile = request.profiles[request.cluster.nodes.index(nodes)]
    return captured(profile.grid(group.devices), config)


def _lent(
    request: ClusterRequest, lent: BorrowedEngine, max_num_seqs: int, granted: bool
) -> tuple[EngineConfig, IterationCost]:
    """A lent engine that always has its share of the device and is never recalled. It has room for one token beyond its
    bucket, since the policy decides about a turn at this token."""
    longest = lent.holds + 1
    config = EngineConfig(
        max_model_len=longest,
        kv_blocks=max(lent.kv_tokens // BLOCK, -(-longest // BLOCK)),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(lent.batched_tokens, max_num_seqs),
    )
    grid = request.lent_profiles[request.lenders.index(lent.lender)].grid(lent.lender.devices)
    return captured(grid if granted else grid.slowed(1 / lent.share), config)


def captured(grid: EngineGrid, config: EngineConfig) -> tuple[EngineConfig, IterationCost]:
    """(configuration, cost), with the CUDA graphs that vLLM captures if the host has a price. Without a price, launches
    cost nothing, and graphs are left out."""
    if grid.host.priced:
        sizes = capture_sizes(config.max_num_seqs, config.max_num_batched_tokens)
        config = replace(config, capture_sizes=sizes)
    return config, _cost(grid, config)


@lru_cache(maxsize=64)
def _cost(grid: EngineGrid, config: EngineConfig) -> GridCost:
    """The cost of an engine. Cached, since plans are simulated one after another and share lookups in a grid."""
    return GridCost(grid, config)


def _name(group: DeviceGroup) -> str:
    nodes = "+".join(map(str, group.nodes))
    first, last = group.gpus[0], group.gpus[-1]
    return f"{group.pool}-{nodes}/{first}" + ("" if first == last else f"-{last}")
