"""Engines that were measured on a GPU, as files: what they are, single batches on a grid, and whole workloads.

Invariant: a grid's iterations hold nothing of a workload. A file that is not of this format is refused by its name and
the field; keys that are not read are no error, and null is a key that is not there.

A folder has, for each model, `MODEL.json` with `facts` (of the engine) and `cases` (a row for each request of each
workload), and `MODEL_steps.csv.gz`, a row an iteration, of which those of the case `grid` are read.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from libra.config.yaml_file import checked, refusal
from libra.cost.lines import least_squares
from libra.cost.quantization import Quantization
from libra.cost.sources.engine_fit import MeasuredIteration
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.model_file import load_model
from libra.sim.engine.config import EngineConfig

_MAX_MODEL_LEN = 40_960  # of engines whose facts do not say it
_CLOSE = 64  # tokens by which contexts of one point of a grid may differ
_LAST = 16  # tokens of a prompt that a decode point computes: all before them is cached


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def _known(name: str) -> str:
    load_model(name)
    return name


ModelName = Annotated[str, AfterValidator(_known)]


class Facts(Part):
    model: ModelName
    gpu: str
    vllm: str = "?"
    torch: str = "?"
    cudagraph_mode: str
    capture_sizes: list[PositiveInt] = []
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    num_gpu_blocks: Annotated[int, Field(ge=2)]
    block_size: PositiveInt
    chunked_prefill: bool
    async_scheduling: bool
    max_model_len: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: Literal[1] = 1  # others are not predicted
    data_parallel_size: Literal[1] = 1
    dtype: Literal["auto", "bfloat16", "float16", "half", "torch.bfloat16", "torch.float16"] = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    @field_validator("gpu")
    @classmethod
    def _device(cls, name: str) -> str:
        """PCIe and NVL variants have other memory and clocks than what is known of the name."""
        words = name.casefold().replace("-", " ").split()
        known = [gpu.name for gpu in GPUS.values() if gpu.name.casefold() in words]
        if not known or {"pcie", "nvl"} & set(words):
            raise ValueError(f"{name} is none of {', '.join(GPUS)}, of SXM where there are several: measure on one")
        return known[0]

    @field_validator("cudagraph_mode")
    @classmethod
    def _mode(cls, name: str) -> str:
        mode = name.rpartition(".")[2]
        if mode not in ("FULL_AND_PIECEWISE", "NONE"):
            raise ValueError(f"{mode} is not priced; measure with FULL_AND_PIECEWISE or NONE")
        return mode

    def config(self, longest: int) -> EngineConfig:
        """An unsaid `max_model_len` is the model's, as far as blocks hold that, and lets the `longest` request pass."""
        blocks = self.num_gpu_blocks - 1  # vLLM keeps one for itself
        held = min(load_model(self.model).max_context, _MAX_MODEL_LEN, blocks * self.block_size)
        context = self.max_model_len or max(longest, held)
        if context < longest:
            raise ValueError(f"facts.max_model_len is {context}, and a request of {longest} tokens was served")
        sizes = sorted(set(self.capture_sizes)) if self.cudagraph_mode != "NONE" else []
        return EngineConfig(
            max_model_len=context,
            kv_blocks=blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.chunked_prefill,
            async_scheduling=self.async_scheduling,
            capture_sizes=tuple(size for size in sizes if size <= self.max_num_batched_tokens),
        )

    def stored(self) -> Quantization:
        weights = self.quantization.removesuffix("_marlin").casefold()
        found = Quantization(None if weights == "none" else weights, self.kv_cache_dtype)
        if (refused := found.refusal(load_model(self.model))) is not None:
            raise ValueError(f"facts.{refused}")
        return found


class CaseRequest(Part):
    """One request, as it was measured. Times are seconds from the beginning of the case."""

    arrival: NonNegativeFloat
    first: NonNegativeFloat
    end: NonNegativeFloat
    prompt: PositiveInt
    out: PositiveInt
    cached: NonNegativeInt = 0
    group: int | str | None = None  # of requests with one prompt
    session: int | str | None = None  # of turns, each of which extends the prompt of the one before
    turn: NonNegativeInt = 0

    @model_validator(mode="after")
    def _in_order(self) -> CaseRequest:
        if not self.arrival < self.first <= self.end:
            raise ValueError(f"first is {self.first}, not between arrival {self.arrival} and end {self.end}")
        return self


class _Case(Part):
    requests: Annotated[list[CaseRequest], Field(min_length=1)]

    @model_validator(mode="after")
    def _alike(self) -> _Case:
        if len({request.session is None for request in self.requests}) > 1:
            raise ValueError("some requests have a session and some have none; measure them apart")
        return self


class EngineRun(Part):
    """An engine that ran, its grid, and the workloads that it served."""

    facts: Facts
    cases: dict[str, _Case]

    @field_validator("cases", mode="before")
    @classmethod
    def _ended(cls, cases: Any) -> Any:
        """Without those that failed."""
        if not isinstance(cases, dict):
            return cases
        return {name: it for name, it in cases.items() if not (isinstance(it, dict) and it.get("error"))}

    @property
    def gpu(self) -> GPU:
        return GPUS[self.facts.gpu]

    @property
    def config(self) -> EngineConfig:
        return self.facts.config(
            max((it.prompt + it.out for case in self.cases.values() for it in case.requests), default=1)
        )


def documents(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The JSON files of a folder, by name: what is in each, or the `ConfigError` that says why it cannot be read."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            yield path, refusal(path, f"not JSON ({error}); measure again, or take it out of the folder")


def read_run(path: Path, document: Mapping[str, Any]) -> EngineRun:
    """Raises `ConfigError` that names the file and the field."""
    run = checked(path, EngineRun, document)
    try:
        run.config, run.facts.stored()
    except ValueError as error:
        raise refusal(path, str(error)) from None
    return run


def read_grid(path: Path, run: EngineRun) -> tuple[tuple[MeasuredIteration, ...], tuple[float, float] | None]:
    """Iterations of the grid of an engine's file, and the seconds that it needs to take in a request and a token of it,
    None where the grid does not show them. Raises `ConfigError`."""
    steps = path.with_name(f"{path.stem}_steps.csv.gz")
    try:
        with gzip.open(steps, "rt", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["case"] == "grid"]
        return _iterations(rows, run.config), _intake(rows)
    except Exception as error:  # noqa: BLE001 - gzip, zlib, csv and what a row lacks
        raise refusal(steps, f"cannot be read ({error!r}); measure again") from None


def _iterations(rows: Sequence[Mapping[str, str]], config: EngineConfig) -> tuple[MeasuredIteration, ...]:
    """The means of a grid's iterations that are alike. Prompts of one iteration are of one length there."""
    alike: dict[tuple[object, ...], list[MeasuredIteration]] = {}
    before: MeasuredIteration | None = None
    for row in rows:
        if not int(row["us"]):
            continue
        decodes, context, prompts = int(row["decodes"]), int(row["decode_ctx"]), int(row["prefills"])
        chunks: tuple[tuple[int, int], ...] = ()
        admitted = (0, 0, 0)
        if prompts:
            new = int(row["prefill_tokens"]) // prompts
            cached = max(0, round(int(row["prefill_ctx"]) / int(row["prefill_tokens"]) - new / 2))
            chunks = ((new, cached),) * prompts
            full = before is not None and before.tokens == config.max_num_batched_tokens
            if not (full and before and prompts == 1 and sum(before.chunks[-1]) == cached):
                admitted = (prompts, prompts * (new + cached), prompts * cached)
        block = config.block_size
        shared = (decodes - 1) * ((context // decodes - 1) // block * block) if decodes else 0
        before = MeasuredIteration(decodes, context, chunks, admitted, shared, int(row["us"]) / 1e6)
        alike.setdefault((decodes, context // max(1, decodes) // _CLOSE, chunks, admitted), []).append(before)
    found = []
    for members in alike.values():
        middle = members[len(members) // 2]
        mean = sum(it.seconds for it in members) / len(members)
        shape = (middle.decodes, middle.context, middle.chunks, middle.admitted, middle.shared)
        found.append(MeasuredIteration(*shape, mean, len(members)))
    return tuple(found)


def _intake(rows: Sequence[Mapping[str, str]]) -> tuple[float, float] | None:
    """From the time between two iterations in which the requests of a decode point were taken in. The more of it there
    is with the number of requests; what is the same for all points of a context is the making of its prompt."""
    taken: list[tuple[int, int, float]] = []  # context, requests, seconds
    for last, row in pairwise(rows):
        prompts, tokens = int(row["prefills"]), int(row["prefill_tokens"])
        begun = int(last["waiting"]) > 0  # they were taken in before that iteration
        if prompts and not int(row["decodes"]) and tokens == _LAST * prompts and not begun:
            context = (int(row["prefill_ctx"]) // tokens - _LAST // 2) + _LAST
            gap = float(row["start_s"]) - float(last["start_s"]) - int(last["us"]) / 1e6
            taken.append((context, prompts + int(row["waiting"]), gap))
    contexts = sorted({context for context, _, _ in taken})
    contexts = [one for one in contexts if len({n for context, n, _ in taken if context == one}) > 2]
    taken = [it for it in taken if it[0] in contexts]
    if len(contexts) < 2:
        return None
    gaps = np.array([gap for _, _, gap in taken])
    columns = np.array([[float(context == one) for one in contexts] + [n, n * context] for context, n, _ in taken])
    trust = np.ones(len(taken))
    for _ in range(20):  # a gap that is far off had something else in it: its weight falls
        weights = trust / gaps
        fitted = least_squares(columns * weights[:, None], gaps * weights)
        off = np.abs(columns @ fitted / gaps - 1)
        usual = max(float(np.median(off)), 1e-6)
        trust = usual / np.maximum(off, usual)
    return float(fitted[-2]), float(fitted[-1])
