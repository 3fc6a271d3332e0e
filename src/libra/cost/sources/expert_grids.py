"""Grids of data-parallel ranks with expert parallelism: from tables that have the shape, otherwise from a roofline.

Invariant: tables are for the requested GPU and shape. They measure the experts of vLLM 0.24, with all tokens on every
GPU and equally frequent experts, and the exchange of DeepEP among eight GPUs of a node. Missing times are modelled, and
the source says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from libra.cost.afd import StageGrid
from libra.cost.collectives import AllToAll, exchange_seconds
from libra.cost.expert_grid import ExpertGrid
from libra.cost.grid import EngineGrid
from libra.cost.quantization import ACTIVATION_BYTES, AS_STORED, Quantization
from libra.cost.sources.expert_tables import exchange_tables, expert_tables
from libra.cost.sources.rates import Calibration
from libra.cost.sources.roofline import TOKENS, stage_roofline
from libra.cost.sources.tables import NoTablesError, stage_tables
from libra.cost.transfer import Fabric
from libra.hardware.cluster import GPU
from libra.hardware.model import ModelSpec

_AXIS = TOKENS[:15]  # tokens of a GPU


def expert_grid(
    gpu: GPU,
    model: ModelSpec,
    tp: int,
    dp: int,
    way: AllToAll,
    fabric: Fabric,
    *,
    source: str = "auto",
    quantization: Quantization = AS_STORED,
    calibration: Calibration | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> ExpertGrid:
    """The grid of `dp` ranks of `tp` GPUs, which divide the experts. `source` is `tables`, `roofline`, or `auto`:
    tables if they have the model, otherwise the roofline with a `note`. Raises `NoTablesError` for `tables`, ValueError
    if a degree does not divide the model.
    """
    gpus = dp * tp
    modelled = stage_roofline(gpu, model, tp, gpus, quantization=quantization, calibration=calibration)
    stages, experts = modelled, tuple(modelled.experts_seconds(gpus * tokens) for tokens in _AXIS)
    experts_source, asked = modelled.source, calibration is None and source != "roofline"
    if asked:
        try:
            stages = stage_tables(gpu, model, tp, gpus, quantization=quantization)
            if way == "allgather_reducescatter":
                experts = expert_tables(gpu, model, gpus, _AXIS, quantization)
                experts_source = "tables"
        except NoTablesError as error:
            if source == "tables":
                raise
            stages, asked = modelled, False
            note(f"engine times are the roofline's: {error}")
    assert model.experts is not None
    exchange, exchange_source = None, "tables"
    if asked:
        try:
            exchange = exchange_tables(gpu, model, way, gpus, _AXIS)
        except NoTablesError:
            pass  # the tables have one shape only; other exchanges are modelled, and the source says so
    far = gpus > fabric.gpus
    if exchange is None:
        size, active = ACTIVATION_BYTES * model.experts.width(model.hidden), model.experts.active
        exchange = tuple(exchange_seconds(way, tokens, size, active, gpus, fabric) for tokens in _AXIS)
        exchange_source = f"modelled at {fabric.link / 1e9:.0f} GB/s in a node"
        if far:
            exchange_source += f" and {fabric.network / fabric.gpus / 1e9:.0f} GB/s of each GPU between nodes"
    told = "" if experts_source == stages.source else f"; experts: {experts_source}"
    return ExpertGrid(
        own=_own(stages),
        layers=stages.layers,
        gpus=gpus,
        tokens=_AXIS,
        experts=experts,
        exchange=exchange,
        expert_bytes=quantization.matrix_bytes(model, "experts") * model.expert_parameters,
        link=fabric.network / fabric.gpus if far else fabric.link,
        source=f"{stages.source}{told}; {way}: {exchange_source}",
    )


def _own(stages: StageGrid) -> EngineGrid:
    """Attention and all work outside the layers with experts. Only the last token of a prompt has logits."""
    grid, few = stages.attention, 1
    decode = tuple(
        tuple(seconds + stages.outside_seconds(batch) for seconds in row)
        for batch, row in zip(grid.batches, grid.decode, strict=True)
    )
    prefill = tuple(
        tuple(seconds + stages.dense_seconds(chunk) + stages.head_seconds(few) for seconds in row)
        for chunk, row in zip(grid.chunks, grid.prefill, strict=True)
    )
    return replace(grid, decode=decode, prefill=prefill)
