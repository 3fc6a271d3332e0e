"""Experts and their exchange from the tables of aiconfigurator-core.

Invariant: that of `tables`: what they do not have is an error, never a neighbour's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra.cost.quantization import UNQUANTIZED, Quantization
from libra.cost.sources.tables import NoTablesError, quietly, table_modes, table_system
from libra.hardware.cluster import GPU
from libra.hardware.model import ModelSpec

_DEEPEP_GPUS = 8  # among which DeepEP was measured


def expert_tables(
    gpu: GPU, model: ModelSpec, ranks: int, each: Sequence[int], quantization: Quantization = UNQUANTIZED
) -> tuple[float, ...]:
    """Seconds of one layer's experts on each of `ranks` GPUs that divide them, of `each` tokens of every GPU, where all
    experts are asked for alike. Raises `NoTablesError`."""
    from aiconfigurator_core.sdk.common import MoEQuantMode
    from aiconfigurator_core.sdk.operations.moe import MoE

    experts = model.experts
    assert experts is not None
    shape = (model.hidden, experts.intermediate, experts.active, experts.count, 1, ranks)
    mode = MoEQuantMode[table_modes(quantization, model).get("moe_quant_mode", "bfloat16")]
    operator = MoE("experts", 1.0, *shape, mode, "balanced", 1)
    return tuple(_operator(gpu, model, operator, ranks * tokens) for tokens in each)


def exchange_tables(gpu: GPU, model: ModelSpec, way: str, ranks: int, each: Sequence[int]) -> tuple[float, ...]:
    """Seconds of dispatch and combine of one layer, of `each` tokens of every GPU, in bf16. Raises `NoTablesError`."""
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
                f"the tables for {gpu.name} lack {operator._name} of {model.name}; use a roofline"
                f" ({str(error).partition(' at /')[0]})"
            ) from None
    (_, milliseconds, *_), *_ = told
    return float(milliseconds) / 1e3
