"""The engines of a candidate, as the simulator runs them.

Invariant: memory and times are those of the cost model; nothing is assumed here but what a candidate says, vLLM's
defaults, and that KV goes over the network between nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from libra.cost.engine_memory import BLOCK, kv_tokens
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.cost.transfer import fabric
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.kv_network import KVNetwork
from libra.sizing.candidate import EngineSetup, ServingCandidate
from libra.sizing.question import SizingQuestion

UTILIZATION = 0.9  # vLLM's default `gpu_memory_utilization`
NUMBER_BYTES = 2  # of weights and KV


class NoRoomError(ValueError):
    """An engine cannot be set up like this."""


def configuration(question: SizingQuestion, shape: EngineSetup) -> EngineConfig:
    """Raises `NoRoomError` where it cannot run."""
    model, nodes = question.model, question.cluster.node_class(shape.nodes)
    if shape.pipeline_parallel_size > model.layers:
        raise NoRoomError(f"{model.name} has {model.layers} layers for {shape.pipeline_parallel_size} stages")
    if shape.max_num_batched_tokens < shape.max_num_seqs:
        raise NoRoomError(f"max_num_batched_tokens {shape.max_num_batched_tokens} is below max_num_seqs")
    tokens = kv_tokens(
        model,
        nodes.gpu.memory,
        UTILIZATION,
        shape.tensor_parallel_size,
        weight_bytes=NUMBER_BYTES,
        kv_bytes=NUMBER_BYTES,
        batched_tokens=shape.max_num_batched_tokens,
        pp=shape.pipeline_parallel_size,
    )
    blocks = max(0, tokens // BLOCK - 1)  # vLLM keeps one for itself
    if blocks * BLOCK < question.longest:
        raise NoRoomError(
            f"memory leaves KV for {blocks * BLOCK:,} tokens, less than the longest request ({question.longest:,})"
        )
    host = grid_of(question, shape).host
    sizes = capture_sizes(shape.max_num_seqs, shape.max_num_batched_tokens) if host.priced else ()
    return EngineConfig(
        max_model_len=question.longest,
        kv_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        capture_sizes=sizes,
        pipeline_parallel_size=shape.pipeline_parallel_size,
        async_scheduling=shape.async_scheduling,
    )


def grid_of(question: SizingQuestion, shape: EngineSetup) -> EngineGrid:
    """With its host, which works beside the GPU where scheduling is asynchronous. Raises ValueError where the profile
    lacks the degree."""
    nodes = question.cluster.node_class(shape.nodes)
    grid = question.profiles[question.cluster.nodes.index(nodes)].grid(shape.tensor_parallel_size)
    if shape.async_scheduling and grid.host.priced:
        return replace(grid, host=replace(grid.host, overlapped=True))
    return grid


def engines(question: SizingQuestion, candidate: ServingCandidate) -> tuple[EngineSpec, ...]:
    """Raises `NoRoomError` where one cannot run."""
    made = []
    for place, pool in enumerate(candidate.pools):
        shape = pool.shape
        config = configuration(question, shape)
        grid = grid_of(question, shape)
        cost = _cost(grid, config, grid.host)
        tp = shape.tensor_parallel_size
        kv_bytes = tp * question.model.kv_bytes_per_token(NUMBER_BYTES, tp)
        made += [
            EngineSpec(
                f"{pool.role}-{place}.{number}",
                config,
                cost,
                devices=shape.devices,
                role=ROLES[pool.role],
                kv_bytes=kv_bytes,
            )
            for number in range(pool.count)
        ]
    return tuple(made)


def network(question: SizingQuestion, candidate: ServingCandidate) -> KVNetwork | None:
    """How KV goes from pool to pool, each GPU with its share of its node's network: as fast as the slower side's."""
    if candidate.architecture == "colocated":
        return None
    apart = [pool for pool in candidate.pools if pool.role != "colocated"]
    fabrics = [fabric(question.cluster.node_class(pool.shape.nodes)) for pool in apart]
    return KVNetwork(
        bandwidth=min(it.network / it.gpus for it in fabrics), latency=max(it.network_latency for it in fabrics)
    )


@lru_cache(maxsize=128)
def _cost(grid: EngineGrid, config: EngineConfig, host: HostCost) -> GridCost:
    """Many candidates have the same engines, in other numbers."""
    return GridCost(grid, config, host)
