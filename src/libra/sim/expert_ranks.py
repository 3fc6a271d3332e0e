"""Data-parallel ranks with expert parallelism, from an engines file.

Invariant: ranks that cannot run are refused in a line that begins with the key.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from libra.config.input_file import read_input
from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import expert_rank_bytes
from libra.cost.expert_grid import ExpertGrid
from libra.cost.experts import Balancing, Shares, measured, power_law
from libra.cost.host import NO_HOST
from libra.cost.kernels import NO_TERMS
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.profiles import calibration_of, host_part
from libra.cost.sources.tables import NoTablesError
from libra.cost.transfer import fabric
from libra.hardware.model import ModelSpec
from libra.sim.described_engine import DescribedEngine
from libra.sim.described_times import drafter_grid, host_cost, of_profile
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engines_keys import EplbSection, ExpertLoadSection, RanksSection

_FREQUENCIES = TypeAdapter(tuple[tuple[float, ...], ...])


def check_ranks(engine: DescribedEngine) -> None:
    """Raises ValueError unless the engine's ranks can divide the model's experts."""
    section, model = engine.section, engine.model
    dp, gpus = section.data_parallel_size, section.data_parallel_size * engine.tp
    if dp == 1:
        for key, given in RanksSection():
            if getattr(section, key) != given:
                raise ValueError(
                    f"{key} is given, but data_parallel_size is 1: set data_parallel_size to 2 or more, or leave {key}"
                    " out"
                )
        return
    if model.experts is None:
        raise ValueError(
            f"data_parallel_size is {dp}, but {model.name} has no experts, and ranks without experts are separate"
            " engines: use count"
        )
    if not section.enable_expert_parallel:
        raise ValueError(
            f"enable_expert_parallel is false with data_parallel_size {dp}: experts cut by tensor parallelism over"
            " ranks are not simulated, so set it to true"
        )
    redundant = section.eplb_config.num_redundant_experts
    if not section.enable_eplb and section.eplb_config != EplbSection():
        raise ValueError("eplb_config is given, but enable_eplb is false: set enable_eplb to true")
    slots = model.experts.count + redundant
    if slots % gpus:
        key = "eplb_config.num_redundant_experts" if redundant else "data_parallel_size"
        remedy = f"{-model.experts.count % gpus}" if redundant or section.enable_eplb else "a divisor"
        raise ValueError(
            f"{key} is {redundant or dp}: {slots} experts of {model.name} cannot be divided by {gpus} GPUs; give"
            f" {remedy}"
        )
    load = section.expert_load
    if load.frequencies is not None and (load.power_law or load.drift_interval):
        raise ValueError("expert_load: frequencies exclude power_law and drift_interval: leave one of them out")
    if load.drift_interval is not None and not load.power_law:
        raise ValueError(
            "expert_load.drift_interval is given, but power_law is 0: raise power_law, or leave drift_interval out"
        )


def expert_bytes(engine: DescribedEngine) -> float:
    """Bytes per GPU of routed experts, including redundant experts, and of the buffers for their exchange."""
    section, model, quantization = engine.section, engine.model, engine.quantization
    assert model.experts is not None
    dp, gpus = section.data_parallel_size, section.data_parallel_size * engine.tp
    held = expert_rank_bytes(
        *(model, gpus),
        tokens=dp * section.max_num_batched_tokens,
        way=section.all2all_backend,
        internode=gpus > engine.nodes.gpus,
        quantization=quantization,
        profiling=engine.profiling,
    )
    more = section.eplb_config.num_redundant_experts / model.experts.count
    return held + more * quantization.matrix_bytes(model, "experts") * model.routed_parameters / gpus


def ranks_cost(engine: DescribedEngine, config: EngineConfig) -> ExpertCost:
    """The cost of data-parallel ranks together. Raises ValueError that begins with the key."""
    section, model = engine.section, engine.model
    if section.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size with data_parallel_size is not simulated: leave one of them out")
    try:
        added = host_part(engine.host, model, engine.note)
        host, terms = (NO_HOST, NO_TERMS) if added is None else added
        host, grid = host_cost(engine, host), _expert_grid(engine)
        engine.note(f"times of data-parallel ranks: {grid.source}")
        grid = replace(grid, own=replace(grid.own, terms=terms))
        eplb = section.eplb_config
        balancing = None
        if section.enable_eplb:
            balancing = Balancing(eplb.num_redundant_experts, eplb.window_size, eplb.step_interval)
        load, drafts = _load(section.expert_load, model, engine.beside), section.speculative
        drafter = drafter_grid(engine, grid.own)
        alike = drafts is not None and drafts.method != "ngram" and drafts.model is None
    except NoTablesError as error:
        raise of_profile(ConfigError(error.asked)) from None
    except ConfigError as error:
        raise of_profile(error) from None
    try:
        return ExpertCost(grid, config, load, balancing, host, drafter, draft_experts=alike)
    except ValueError as error:
        raise ValueError(f"profile: {error}") from None


def _expert_grid(engine: DescribedEngine) -> ExpertGrid:
    section, gpu, tp, source = engine.section, engine.gpu, engine.tp, engine.source
    calibration = calibration_of(engine.nodes, source, engine.note)
    return expert_grid(
        gpu,
        engine.model,
        tp,
        section.data_parallel_size,
        section.all2all_backend,
        fabric(engine.nodes),
        source=source if calibration is None else "roofline",
        quantization=engine.quantization,
        calibration=calibration,
        note=engine.note,
    )


def _load(section: ExpertLoadSection, model: ModelSpec, beside: Path) -> ExpertLoad:
    experts, layers = model.experts, model.sparse_layers
    assert experts is not None
    drawn = section.seed if section.skew == "drawn" else None
    if section.frequencies is not None:
        path = beside / section.frequencies
        try:
            counts = _FREQUENCIES.validate_json(read_input(path))
            shares = measured(counts, experts.count, experts.active, layers)
        except OSError as error:
            raise ValueError(f"expert_load.frequencies: {path}: {error.strerror}") from None
        except ValidationError:
            raise ValueError(f"expert_load.frequencies: {path} is not a JSON list of rows of counts") from None
        except ValueError as error:
            raise ValueError(f"expert_load.{error}") from None
        return ExpertLoad(lambda _: shares, experts.active, None, drawn)

    @lru_cache(maxsize=64)
    def law(phase: int) -> Shares:
        return power_law(experts.count, experts.active, section.power_law, layers, section.seed + phase)

    return ExpertLoad(law, experts.active, section.drift_interval, drawn)
