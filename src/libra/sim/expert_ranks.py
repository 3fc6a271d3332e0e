"""Data-parallel ranks with expert parallelism, as an engines file describes them.

Invariant: keys that vLLM has are vLLM's; what cannot run is refused in a line that opens with the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from libra.config.yaml_file import Section
from libra.cost.collectives import AllToAll
from libra.cost.engine_memory import CONTEXT, ffn_rank_bytes
from libra.cost.experts import Balancing, Shares, measured, power_law
from libra.cost.host import HostCost
from libra.cost.kernels import KernelTerms
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.files import load_calibration
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.model import ModelSpec
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad

_Count = Annotated[int, Field(strict=True, ge=1)]
_Flag = Annotated[bool, Field(strict=True)]
_NODE = 8  # GPUs: of the nodes over which ranks are spread
_FREQUENCIES = TypeAdapter(tuple[tuple[float, ...], ...])


class EplbSection(Section):
    """vLLM's `eplb_config`."""

    num_redundant_experts: Annotated[int, Field(strict=True, ge=0)] = 0
    window_size: _Count = 1000
    step_interval: _Count = 3000


class ExpertLoadSection(Section):
    """How often experts are asked for."""

    power_law: Annotated[float, Field(ge=0, lt=100)] = 0.0  # exponent; 0: all alike
    frequencies: str | None = (
        None  # instead: a JSON file beside this one, rows of counts, one for each layer or for all
    )
    drift_interval: _Count | None = None  # iterations after which a power law is drawn anew
    skew: Literal["expected", "drawn"] = "expected"
    seed: Annotated[int, Field(strict=True, ge=0)] = 0


class RanksSection(Section):
    """What an engine of a file says of its data-parallel ranks."""

    data_parallel_size: _Count = 1
    enable_expert_parallel: _Flag = False
    all2all_backend: AllToAll = "allgather_reducescatter"
    network_bandwidth: Annotated[float, Field(gt=0)] = (
        50e9  # bytes/s of each GPU between nodes, with expert parallelism
    )
    dp_sync_interval: _Count = 16
    enable_eplb: _Flag = False
    eplb_config: EplbSection = EplbSection()
    expert_load: ExpertLoadSection = ExpertLoadSection()


def check_ranks(section: RanksSection, model: ModelSpec, tp: int) -> None:
    """Raises ValueError unless these ranks can divide the model's experts."""
    dp, gpus = section.data_parallel_size, section.data_parallel_size * tp
    if dp == 1:
        for key, given in RanksSection():
            if getattr(section, key) != given:
                raise ValueError(
                    f"{key} is given, and data_parallel_size is 1: set it to 2 or more, or leave {key} out"
                )
        return
    if model.experts is None:
        raise ValueError(
            f"data_parallel_size is {dp}; {model.name} has no experts, and its ranks would not wait for each other:"
            " use count"
        )
    if not section.enable_expert_parallel:
        raise ValueError(
            f"enable_expert_parallel is false, and data_parallel_size {dp}: experts cut by tensor parallelism over"
            " ranks are not simulated, set it to true"
        )
    redundant = section.eplb_config.num_redundant_experts
    if not section.enable_eplb and section.eplb_config != EplbSection():
        raise ValueError("eplb_config is given, and enable_eplb is false: set it to true")
    slots = model.experts.count + redundant
    if slots % gpus:
        key = "eplb_config.num_redundant_experts" if redundant else "data_parallel_size"
        remedy = f"{-model.experts.count % gpus}" if redundant or section.enable_eplb else "a divisor"
        raise ValueError(
            f"{key} is {redundant or dp}: {slots} experts of {model.name} are not divided by {gpus} GPUs; take {remedy}"
        )
    load = section.expert_load
    if load.frequencies is not None and (load.power_law or load.drift_interval):
        raise ValueError("expert_load: frequencies are given, and power_law or drift_interval: leave one of them out")


def expert_bytes(
    section: RanksSection, model: ModelSpec, tp: int, *, weight_bytes: float, batched_tokens: int
) -> float:
    """Bytes on each GPU of routed experts, and of an MLP's vectors for the tokens that come to them."""
    assert model.experts is not None
    dp = section.data_parallel_size
    held = ffn_rank_bytes(model, dp * tp, weight_bytes=weight_bytes, tokens=dp * batched_tokens) - CONTEXT
    more = section.eplb_config.num_redundant_experts / model.experts.count
    return held + more * weight_bytes * model.routed_parameters / (dp * tp)


def group_cost(
    section: RanksSection,
    model: ModelSpec,
    gpu: GPU,
    tp: int,
    config: EngineConfig,
    *,
    source: str,
    host: HostCost,
    terms: KernelTerms,
    weight_bytes: int,
    beside: Path,
    note: Callable[[str], None],
) -> ExpertCost:
    """`source` is `auto`, `tables`, `roofline` or a calibration file; `beside` is where other files are. Raises
    `ConfigError` or `NoTablesError` where the source does not have it, ValueError that opens with another key."""
    nodes = NodeClass(
        "node", 1, max(_NODE, tp), gpu, intra_bandwidth=gpu.link, inter_bandwidth=_NODE * section.network_bandwidth
    )
    calibration = None
    if source not in ("auto", "tables", "roofline"):
        calibration, source = load_calibration(Path(source)), "roofline"
    dp, way = section.data_parallel_size, section.all2all_backend
    grid = expert_grid(
        gpu,
        model,
        tp,
        dp,
        way,
        fabric(nodes),
        source=source,
        dtype_bytes=weight_bytes,
        calibration=calibration,
        note=note,
    )
    note(f"times of data-parallel ranks: {grid.source}")
    grid = replace(grid, own=replace(grid.own, terms=terms))
    eplb = section.eplb_config
    balancing = None
    if section.enable_eplb:
        balancing = Balancing(eplb.num_redundant_experts, eplb.window_size, eplb.step_interval)
    return ExpertCost(grid, config, _load(section.expert_load, model, beside), balancing, host)


def _load(section: ExpertLoadSection, model: ModelSpec, beside: Path) -> ExpertLoad:
    experts, layers = model.experts, model.sparse_layers
    assert experts is not None
    drawn = section.seed if section.skew == "drawn" else None
    if section.frequencies is not None:
        path = beside / section.frequencies
        try:
            counts = _FREQUENCIES.validate_json(path.read_bytes())
            shares = measured(counts, experts.count, experts.active, layers)
        except OSError as error:
            raise ValueError(f"expert_load.frequencies: {path}: {error.strerror}") from None
        except ValidationError:
            raise ValueError(f"expert_load.frequencies: {path} is no JSON list of rows of counts") from None
        except ValueError as error:
            raise ValueError(f"expert_load.{error}") from None
        return ExpertLoad(lambda _: shares, experts.active, None, drawn)

    @lru_cache(maxsize=64)
    def law(phase: int) -> Shares:
        return power_law(experts.count, experts.active, section.power_law, layers, section.seed + phase)

    return ExpertLoad(law, experts.active, section.drift_interval, drawn)
