"""Engines that were measured on a GPU, as files: what they are, single batches on a grid, and whole workloads.

Invariant: a grid's iterations hold nothing of a workload. A file that is not of this format is refused by its name and
the field.

A folder has, for each model, `MODEL.json` with `facts` (of the engine), `grid` (points) and `cases` (a row for each
request of each workload), and where every iteration was kept `MODEL_steps.csv.gz`: the rows of the case `grid` tell
more than the points do, what admissions take among it. Instead of a grid it may have `layers`, tables of single layers.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fidelity.layer_tables import LayerTables, read_layers
from libra.config.yaml_file import ConfigError
from libra.cost.lines import least_squares
from libra.cost.sources.engine_fit import MeasuredIteration
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.engine.config import EngineConfig

_CLOSE = 64  # tokens by which contexts of one point of a grid may differ
_MAX_MODEL_LEN = 40_960  # of engines whose facts do not say it
_LAST = 16  # tokens of a prompt that a decode point computes: all before them is cached


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
class Intake:
    """Seconds of an engine to take in a request: `request + token * tokens`."""

    request: float
    token: float


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

    @property
    def gpu(self) -> GPU:
        """Raises ValueError where Libra does not know it: prices are those of `layers` then."""
        words = self.device.casefold().replace("-", " ").split()
        known = [gpu for gpu in GPUS.values() if gpu.name.casefold() in words]
        if not known:
            raise ValueError(f"facts.gpu is {self.device}; Libra knows {', '.join(GPUS)}")
        return known[0]


def read_runs(folder: Path) -> tuple[EngineRun, ...]:
    """Every engine of a folder, by name. Raises `ConfigError` where a file is not of the format."""
    runs = []
    for path, document in documents(folder):
        if isinstance(document, dict) and {"facts", "grid", "cases"} <= set(document):
            try:
                runs.append(_run(path, document))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}: {error!r}; it is no file of a measured engine, measure again") from None
    return tuple(runs)


def documents(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The JSON files of a folder, by name. Raises `ConfigError` for one that is not JSON."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error}); measure again, or take it out of the folder") from None


def _run(path: Path, document: Mapping[str, Any]) -> EngineRun:
    facts = document["facts"]
    model = load_model(facts["model"])
    sizes = tuple(facts["capture_sizes"])
    config = EngineConfig(
        max_model_len=facts.get("max_model_len", min(model.max_context, _MAX_MODEL_LEN)),
        kv_blocks=facts["num_gpu_blocks"] - 1,  # vLLM keeps one for itself
        block_size=facts["block_size"],
        max_num_seqs=facts["max_num_seqs"],
        max_num_batched_tokens=facts["max_num_batched_tokens"],
        enable_chunked_prefill=facts["chunked_prefill"],
        async_scheduling=facts["async_scheduling"],
        capture_sizes=tuple(size for size in sizes if size <= facts["max_num_batched_tokens"]),
    )
    steps = path.with_name(f"{path.stem}_steps.csv.gz")
    rows: list[dict[str, str]] = []
    if steps.is_file():
        with gzip.open(steps, "rt", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["case"] == "grid"]
    if rows:
        grid, intake = _iterations(rows, config.block_size, config.max_num_batched_tokens), _intake(rows)
    else:
        grid, intake = _points(document["grid"], config.block_size), None
    cases = {name: tuple(_request(row) for row in case["requests"]) for name, case in document["cases"].items()}
    empty = [name for name, case in cases.items() if not case]
    if empty:
        raise ValueError(f"cases: no request of {empty[0]} has ended")
    layers = document.get("layers")
    tp = facts.get("tensor_parallel_size", 1)
    run = EngineRun(
        path.stem,
        facts["gpu"],
        model,
        tp,
        f"vLLM {facts['vllm']}, torch {facts['torch']}, {facts['cudagraph_mode']}",
        config,
        grid,
        None if layers is None else read_layers(layers, tp),
        intake,
        cases,
        facts.get("data_parallel_size", 1),
    )
    if layers is None:
        run.gpu  # noqa: B018 - it has to be known
    return run


def _request(row: Mapping[str, Any]) -> CaseRequest:
    return CaseRequest(
        *(float(row["arrival"]), float(row["first"]), float(row["end"])),
        *(int(row["prompt"]), int(row["out"]), int(row["cached"])),
        *(row.get("group"), row.get("session"), row.get("turn", 0)),
    )


def _points(points: Sequence[Mapping[str, Any]], block: int) -> tuple[MeasuredIteration, ...]:
    """The medians of a grid's points."""
    found: list[MeasuredIteration] = []

    def add(decodes: int, held: int, chunks: tuple[tuple[int, int], ...], us: float, times: int, new: bool) -> None:
        cached = sum(before for _, before in chunks)
        admitted = (len(chunks), sum(tokens for tokens, _ in chunks) + cached, cached) if new else (0, 0, 0)
        shared = max(0, decodes - 1) * (held // block * block)
        found.append(MeasuredIteration(decodes, decodes * held, chunks, admitted, shared, us / 1e6, times))

    for point in points:
        kind = point["kind"]
        if kind == "decode":
            add(point["batch"], point["ctx"], (), point["us"], point["n"], False)
        elif kind in ("prefill", "prefills"):
            chunks = ((point["tokens"], point.get("ctx", 0)),) * point.get("parts", 1)
            add(0, 0, chunks, point["us"], point["n"], True)
        elif kind == "mixed":
            for tokens, us in point["samples"]:  # the rest of a prompt that was cut is no admission
                before = point["tokens"] - tokens if tokens < point["tokens"] / 2 else 0
                add(point["batch"], point["ctx"], ((tokens, before),), us, 1, not before)
        else:
            raise ValueError(f"grid has a point of kind {kind}; it is decode, prefill, prefills or mixed")
    return tuple(found)


def _iterations(rows: Sequence[Mapping[str, str]], block: int, budget: int) -> tuple[MeasuredIteration, ...]:
    """The means of a grid's iterations that are alike. Prompts of one iteration are of one length there."""
    alike: dict[tuple[object, ...], list[MeasuredIteration]] = {}
    before: MeasuredIteration | None = None
    for row in rows:
        decodes, context, prompts = int(row["decodes"]), int(row["decode_ctx"]), int(row["prefills"])
        chunks: tuple[tuple[int, int], ...] = ()
        admitted = (0, 0, 0)
        if prompts:
            new = int(row["prefill_tokens"]) // prompts
            cached = max(0, round(int(row["prefill_ctx"]) / int(row["prefill_tokens"]) - new / 2))
            chunks = ((new, cached),) * prompts
            if not (before and before.tokens == budget and prompts == 1 and sum(before.chunks[-1]) == cached):
                admitted = (prompts, prompts * (new + cached), prompts * cached)
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


def _intake(rows: Sequence[Mapping[str, str]]) -> Intake | None:
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
    columns = [[float(context == one) for one in contexts] + [n, n * context] for context, n, _ in taken]
    trust = np.ones(len(taken))
    for _ in range(20):  # a gap that is far off had something else in it: its weight falls
        weights = trust / gaps
        fitted = least_squares(np.array(columns) * weights[:, None], gaps * weights)
        off = np.abs(np.array(columns) @ fitted / gaps - 1)
        usual = max(float(np.median(off)), 1e-6)
        trust = usual / np.maximum(off, usual)
    return Intake(float(fitted[-2]), float(fitted[-1]))
