"""Experts and their exchange from the tables of aiconfigurator-core.

Invariant: as in `tables`, a missing entry is an error, and no other entry replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from libra.cost.grid import Array, EngineProfile
from libra.cost.quantization import AS_STORED, Quantization
from libra.cost.sources.tables import NoTablesError, quietly, table_modes, table_system
from libra.hardware.cluster import GPU
from libra.hardware.model import ModelSpec

_DEEPEP_GPUS = 8  # among which DeepEP was measured
_EXPONENT = 1.2  # of the power law by which tokens choose experts in a whole engine's tables


def expert_tables(
    gpu: GPU, model: ModelSpec, ranks: int, each: Sequence[int], quantization: Quantization = AS_STORED
) -> tuple[float, ...]:
    """Seconds of one layer's experts on each of `ranks` GPUs that divide the experts. `each` lists numbers of tokens
    per GPU, spread evenly over all experts. Raises `NoTablesError`.
    """
    operator = _experts(gpu, model, 1, ranks, quantization, "balanced")
    return tuple(_operator(gpu, model, operator, ranks * tokens) for tokens in each)


def routed_evenly(gpu: GPU, model: ModelSpec, profile: EngineProfile, quantization: Quantization) -> EngineProfile:
    """The profile of `tables`, corrected for tokens that choose all experts equally often, as with untrained routers.
    The profile of a dense model is unchanged.
    """
    if model.experts is None:
        return profile
    engines = []
    for grid in profile.engines:
        decode, prefill = (
            (model.sparse_layers * _evenly(gpu, model, grid.tp, axis, quantization))[:, None] + np.array(table)
            for axis, table in ((grid.batches, grid.decode), (grid.chunks, grid.prefill))
        )
        decode, prefill = (tuple(map(tuple, table.tolist())) for table in (decode, prefill))
        engines.append(replace(grid, decode=decode, prefill=prefill))
    return replace(profile, source=f"{profile.source}; experts chosen evenly", engines=tuple(engines))


def _evenly(gpu: GPU, model: ModelSpec, tp: int, each: Sequence[int], quantization: Quantization) -> Array:
    """[tokens] seconds of a layer's equally frequent experts, minus the seconds with the tables' power law.

    "Balanced" tables give all experts equal numbers of tokens, so few tokens touch as many experts as possible. Tokens
    that choose independently touch fewer experts, as many as a smaller number of balanced tokens.
    """
    experts = model.experts
    assert experts is not None
    skewed, even = (
        _experts(gpu, model, tp, 1, quantization, routing) for routing in (f"power_law_{_EXPONENT}", "balanced")
    )
    all_touched = math.ceil(experts.count / experts.active)  # tokens
    few = range(1, all_touched + 1)
    reading = [_operator(gpu, model, even, tokens) for tokens in few]
    seconds = []
    for tokens in each:
        touched = experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
        found = float(np.interp(touched / experts.active, few, reading))
        if tokens > all_touched:
            found += _operator(gpu, model, even, tokens) - reading[-1]
        seconds.append(found - _operator(gpu, model, skewed, tokens))
    return np.array(seconds)


def _experts(gpu: GPU, model: ModelSpec, tp: int, ep: int, quantization: Quantization, routing: str) -> Any:
    """The operator of one layer's experts on each of `tp` or `ep` GPUs."""
    from aiconfigurator_core.sdk.common import MoEQuantMode
    from aiconfigurator_core.sdk.operations.moe import MoE

    experts = model.experts
    assert experts is not None
    if not experts.gated or experts.latent:
        raise NoTablesError(f"the tables have no times for the experts of {model.name}")
    shape = (model.hidden, experts.intermediate, experts.active, experts.count, tp, ep)
    mode = MoEQuantMode[table_modes(gpu, quantization, model).get("moe_quant_mode", "bfloat16")]
    return MoE("experts", 1.0, *shape, mode, routing, 1)


def exchange_tables(gpu: GPU, model: ModelSpec, way: str, ranks: int, each: Sequence[int]) -> tuple[float, ...]:
    """Seconds of dispatch and combine of one layer in bf16; `each` lists numbers of tokens per GPU. Raises
    `NoTablesError`.
    """
    from aiconfigurator_core.sdk.operations.moe_comm import MoEAllToAll

    backends = {"deepep_high_throughput": "deepep_ht", "deepep_low_latency": "deepep_ll"}
    if way not in backends or ranks != _DEEPEP_GPUS:
        raise NoTablesError(f"the tables have DeepEP among {_DEEPEP_GPUS} GPUs, not {way} among {ranks}")
    experts = model.experts
    assert experts is not None
    operators = [
        MoEAllToAll(
            phase,
            1.0,
            comm_backend=backends[way],
            phase=phase,
            hidden_size=model.hidden,
            topk=experts.active,
            num_experts=experts.count,
            moe_ep_size=ranks,
            node_num=1,
            comm_dtype="default",
        )
        for phase in ("dispatch", "combine")
    ]
    return tuple(sum(_operator(gpu, model, it, tokens) for it in operators) for tokens in each)


def _operator(gpu: GPU, model: ModelSpec, operator: Any, tokens: int) -> float:
    from aiconfigurator_core.sdk.engine import EngineHandle, build_ops_json
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError
    from aiconfigurator_core.sdk.perf_database import get_database

    system = table_system(gpu)
    with quietly():
        try:
            handle = EngineHandle.for_database(get_database(system.name, "vllm", system.vllm))
            told = handle.evaluate_ops_json(
                build_ops_json([operator]), is_context=False, batch_size=tokens, s=1, x=tokens
            )
        except PerfDataNotAvailableError as error:
            raise NoTablesError(
                f"the tables for {gpu.name} lack {operator._name} of {model.name} ({str(error).partition(' at /')[0]})"
            ) from None
    (_, milliseconds, *_), *_ = told
    return float(milliseconds) / 1e3
