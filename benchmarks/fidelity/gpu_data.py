"""Engines that were measured on a GPU, as files: what they are, single batches on a grid, and whole workloads.

Invariant: a grid's iterations hold nothing of a workload. A file that is not of this format is refused by its name and
the field.

A folder has, for each model, `MODEL.json` with `facts` (of the engine), `grid` (points) and `cases` (a row for each
request of each workload), and where every iteration was kept `MODEL_steps.csv.gz`: the rows of the case `grid` tell
more than the points do, what admissions take among it. Instead of a grid it may have `layers`, tables of single layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fidelity.fields import Fields
from benchmarks.fidelity.gpu_grid import Intake, read_grid
from benchmarks.fidelity.layer_tables import LayerTables, read_layers
from libra.config.yaml_file import ConfigError, refusal
from libra.cost.quantization import AS_STORED, Quantization
from libra.cost.sources.engine_fit import MeasuredIteration
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.engine.config import EngineConfig

_PARTS = {"facts", "grid", "cases"}
_MODES = ("FULL_AND_PIECEWISE", "NONE")
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")
_OTHERS = {"pcie", "nvl"}  # GPUs of one name whose memory and clocks are others than what is known of it
_MAX_MODEL_LEN = 40_960  # of engines whose facts do not say it


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """One request, as it was measured. Times are seconds from the beginning of the case."""

    arrival: float
    first: float
    end: float
    prompt: int
    output: int
    cached: int
    group: int | None = None  # of requests with one prompt
    session: str | None = None  # of turns, each of which extends the prompt of the one before
    turn: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """An engine that ran: its GPU, model and settings, its grid, and the workloads that it served."""

    name: str
    device: str
    model: ModelSpec
    tp: int
    software: str
    config: EngineConfig
    grid: tuple[MeasuredIteration, ...]
    layers: LayerTables | None  # instead of a grid
    intake: Intake | None  # None: the grid does not show it
    cases: Mapping[str, tuple[CaseRequest, ...]]
    dp: int = 1  # ranks that divide the experts
    quantization: Quantization = AS_STORED
    left_out: tuple[str, ...] = ()  # cases that failed

    @property
    def gpu(self) -> GPU:
        """Raises ValueError where Libra does not know it: prices are those of `layers` then."""
        words = self.device.casefold().replace("-", " ").split()
        known = [gpu for gpu in GPUS.values() if gpu.name.casefold() in words]
        if not known or _OTHERS & set(words):
            known_here = f"Libra knows {', '.join(GPUS)}, of SXM where there are several"
            raise ValueError(f"facts.gpu is {self.device}; {known_here}: measure again on one of them")
        return known[0]


def read_runs(folder: Path) -> tuple[EngineRun, ...]:
    """Every engine of a folder, by name. Raises `ConfigError` where a file is not of the format."""
    read = ((path, document(path)) for path in files(folder))
    return tuple(read_run(path, found) for path, found in read if is_run(found))


def files(folder: Path) -> tuple[Path, ...]:
    """The JSON files of a folder, by name."""
    return tuple(sorted(folder.glob("*.json")))


def document(path: Path) -> Any:
    """Contents of a JSON file. Raises `ConfigError` where it cannot be read as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise refusal(path, f"not JSON ({error}); measure again, or take it out of the folder") from None


def is_run(document: object) -> bool:
    """Whether it means to be a file of a measured engine."""
    return isinstance(document, dict) and len(_PARTS & set(document)) > 1


def read_run(path: Path, document: Mapping[str, Any]) -> EngineRun:
    """Raises `ConfigError` that names the file and the field."""
    try:
        return _run(path, Fields(document))
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(path, str(error) if isinstance(error, ValueError) else f"{error!r}; measure again") from None


def _run(path: Path, document: Fields) -> EngineRun:
    facts = document.section("facts")
    model = _model(facts)
    layers = document.section("layers").data if document.given("layers") else None
    cases, left_out = _cases(document.section("cases"))
    config = _config(facts, model, max((it.prompt + it.output for case in cases.values() for it in case), default=1))
    tp = facts.count("tensor_parallel_size", 1)
    if facts.count("pipeline_parallel_size", 1) > 1:
        raise facts.refusal("pipeline_parallel_size", "is more than 1, which is not predicted")
    dp = facts.count("data_parallel_size", 1)
    if dp > 1 and layers is None:
        raise facts.refusal("data_parallel_size", "is more than 1, which is predicted from `layers` alone")
    steps = path.with_name(f"{path.stem}_steps.csv.gz")
    grid, intake = read_grid(document, steps, config.block_size, config.max_num_batched_tokens)
    run = EngineRun(
        path.stem,
        facts.text("gpu"),
        model,
        tp,
        f"vLLM {facts.text('vllm', '?')}, torch {facts.text('torch', '?')}, {facts.text('cudagraph_mode')}",
        config,
        grid,
        None if layers is None else read_layers(layers, tp),
        intake,
        cases,
        dp,
        _quantization(facts, model),
        left_out,
    )
    if layers is None:
        run.gpu  # noqa: B018 - it has to be known
    return run


def _model(facts: Fields) -> ModelSpec:
    try:
        return load_model(facts.text("model"))
    except ConfigError as error:
        raise ValueError(f"facts.model: {error}") from None


def _config(facts: Fields, model: ModelSpec, longest: int) -> EngineConfig:
    """Facts need not say `max_model_len`: it is the model's then, as far as blocks hold that, and lets the `longest`
    request pass, which was served."""
    mode = facts.text("cudagraph_mode").rpartition(".")[2]
    if mode not in _MODES:
        raise facts.refusal("cudagraph_mode", f"is {mode}; of others than {' and '.join(_MODES)} nothing is priced")
    sizes = () if mode == "NONE" else facts.counts("capture_sizes")
    budget, block = facts.count("max_num_batched_tokens"), facts.count("block_size")
    blocks = facts.count("num_gpu_blocks", least=2) - 1  # vLLM keeps one for itself
    unsaid = max(longest, min(model.max_context, _MAX_MODEL_LEN, blocks * block))
    context = facts.count("max_model_len", unsaid)
    if context < longest:
        raise facts.refusal("max_model_len", f"is {context}, and a request of {longest} tokens was served")
    return EngineConfig(
        max_model_len=context,
        kv_blocks=blocks,
        block_size=block,
        max_num_seqs=facts.count("max_num_seqs"),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=facts.flag("chunked_prefill"),
        async_scheduling=facts.flag("async_scheduling"),
        capture_sizes=tuple(size for size in sizes if size <= budget),
    )


def _quantization(facts: Fields, model: ModelSpec) -> Quantization:
    """Facts of an engine that stores weights and KV in 16 bits need not say so."""
    dtype = facts.text("dtype", "auto").removeprefix("torch.")
    if dtype not in _SIXTEEN_BITS:
        raise facts.refusal("dtype", f"is {dtype}; engines compute in {', '.join(_SIXTEEN_BITS)} here")
    weights = facts.text("quantization", "none").removesuffix("_marlin").casefold()
    try:
        found = Quantization(None if weights == "none" else weights, facts.text("kv_cache_dtype", "auto"))
    except ValueError as error:
        raise ValueError(f"facts.{error}") from None
    refused = found.refusal(model)
    if refused is not None:
        raise ValueError(f"facts.{refused}")
    return found


def _cases(cases: Fields) -> tuple[dict[str, tuple[CaseRequest, ...]], tuple[str, ...]]:
    """The cases, and the names of those that failed."""
    read, left_out = {}, []
    for name in cases.data:
        case = cases.section(name)
        if case.given("error"):
            left_out.append(name)
            continue
        read[name] = tuple(map(_request, case.sections("requests")))
        if not read[name]:
            raise ValueError(f"cases: no request of {name} has ended; measure again, or take it out of the cases")
        if len({request.session is None for request in read[name]}) > 1:
            raise ValueError(f"cases.{name}: some requests have a session and some have none; measure them apart")
    return read, tuple(left_out)


def _request(row: Fields) -> CaseRequest:
    arrival, first, end = row.number("arrival"), row.number("first"), row.number("end")
    if not arrival < first <= end:
        raise row.refusal("first", f"is {first}, not between arrival {arrival} and end {end}")
    for key in ("group", "session"):
        if not isinstance(row.data.get(key), str | int | None):
            raise row.refusal(key, "is neither text nor a number")
    return CaseRequest(
        *(arrival, first, end),
        *(row.count("prompt"), row.count("out"), row.count("cached", 0, least=0)),
        *(row.data.get("group"), row.data.get("session"), row.count("turn", 0, least=0)),  # type: ignore[arg-type]
    )
