"""Errors of rooflines against measured kernel tables, tightness of the planner's bounds, and the time to make both.

Invariant: errors are of whole iterations, against tables that are sampled anew; nothing is fitted here.

    python -m benchmarks.profiles [--quick] [--json FILE]

Needs the extra `aic`. The first rows, and those of experts, are GPUs and shapes whose kernels gave the constants of
`libra.cost.sources.rates`. Those "beyond" had no part in them: another mixture of experts, and a GPU without constants.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.rows import Row, report
from libra.cost.grid import Array, EngineGrid, EngineProfile
from libra.cost.lines import iteration_lines, prefill_line
from libra.cost.sources.roofline import roofline
from libra.cost.sources.tables import tables
from libra.hardware.cluster import GPUS
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec

GOAL = 0.25
TPS = (1, 2, 4, 8)
BATCHES = tuple(2**power for power in range(9))
CONTEXTS = tuple(2**power for power in range(10, 16))  # of the decode, and of the prefill with what is cached
CHUNKS = (256, 1024, 2048, 4096, 8192, 16384)
PREFIXES = (0, 4096, 16384)

QWEN_8B = decoder("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False, 40960, qk_norm=True)
QWEN_14B = decoder("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
QWEN_32B = decoder("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, 40960, qk_norm=True)
QWEN_30B = decoder(
    name="Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=0,
    vocab=151936,
    tied=False,
    max_context=40960,
    qk_norm=True,
    experts=Experts(count=128, active=8, intermediate=768, shared_intermediate=0),
)
MIXTRAL = decoder(
    "Mixtral-8x7B", 32, 4096, 32, 8, 128, 0, 32000, False, 32768, experts=Experts(8, 2, 14336, 0), sparse=32
)
EXPERTS = (("A100", QWEN_30B, (1, 2, 4)), ("H100", QWEN_30B, TPS), ("H200", QWEN_30B, TPS))  # no tables of A100 at tp 8
BEYOND = (("B200", QWEN_14B, TPS), ("A100", MIXTRAL, TPS), ("H100", MIXTRAL, TPS), ("H200", MIXTRAL, TPS))


@dataclass(frozen=True, slots=True)
class Pair:
    """The same engines from both sources."""

    measured: EngineProfile
    modelled: EngineProfile

    def errors(self, phase: str) -> Array:
        """Roofline over table, less one, of every degree and point."""
        return np.concatenate([(at(b, phase) / at(a, phase) - 1).ravel() for a, b in self.grids()])

    def grids(self) -> Iterable[tuple[EngineGrid, EngineGrid]]:
        return zip(self.measured.engines, self.modelled.engines, strict=True)


def at(grid: EngineGrid, phase: str) -> Array:
    if phase == "decode":
        return grid.decode_seconds_at(BATCHES, CONTEXTS)
    return grid.prefill_seconds_at(CHUNKS, PREFIXES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model: a first look, not a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    models = (QWEN_14B,) if options.quick else (QWEN_8B, QWEN_14B, QWEN_32B)
    seconds: dict[str, list[float]] = {"tables": [], "roofline": []}
    pairs = {gpu: [make_pair(gpu, model, TPS, seconds) for model in models] for gpu in ("A100", "H100", "H200")}
    names = "/".join(model.name for model in models)
    rows = [row for phase in ("decode", "prefill") for row in error_rows("roofline against tables", phase, pairs)]
    for case, others in (("experts", EXPERTS), ("beyond", BEYOND)):
        for gpu, model, tps in others[:1] if options.quick else others:
            pair = {gpu: [make_pair(gpu, model, tps, seconds)]}
            for phase in ("decode", "prefill"):
                rows += error_rows(f"{case}: {model.name}", phase, pair)
    rows += line_rows(pair.measured for group in pairs.values() for pair in group)
    rows += [
        Row("one profile, four degrees", f"median time from {source}", median(taken), "s")
        for source, taken in seconds.items()
    ]
    rows.append(Row("one profile, four degrees", "longest time from tables (read first)", max(seconds["tables"]), "s"))
    print(f"tp {TPS}, batch {BATCHES[0]}-{BATCHES[-1]}, context {CONTEXTS[0]}-{CONTEXTS[-1]}, {names}")
    report(rows, options.json)
    return 0


def make_pair(gpu: str, model: ModelSpec, tps: tuple[int, ...], seconds: dict[str, list[float]]) -> Pair:
    began = time.perf_counter()
    measured = tables(GPUS[gpu], model, tps)
    between = time.perf_counter()
    modelled = roofline(GPUS[gpu], model, tps)
    seconds["tables"].append(between - began)
    seconds["roofline"].append(time.perf_counter() - between)
    return Pair(measured, modelled)


def error_rows(case: str, phase: str, pairs: dict[str, list[Pair]]) -> list[Row]:
    """Median and 90 % quantile for each GPU; over all of them, and held to the goal, where there are several."""
    errors = {gpu: np.concatenate([np.abs(pair.errors(phase)) for pair in group]) for gpu, group in pairs.items()}
    rows = [row for gpu, values in errors.items() for row in quantile_rows(f"{case}, {gpu}", phase, values)]
    if len(errors) > 1:
        together = np.concatenate(list(errors.values()))
        middle, high = quantile_rows(f"{case}, all", phase, together)
        goal = f"at most {100 * GOAL:g} %"
        rows += [Row(middle.case, middle.metric, middle.value, "%", goal, middle.value <= 100 * GOAL), high]
        for tp in TPS:
            values = np.concatenate(
                [
                    np.abs(at(b, phase) / at(a, phase) - 1).ravel()
                    for group in pairs.values()
                    for pair in group
                    for a, b in pair.grids()
                    if a.tp == tp
                ]
            )
            rows += quantile_rows(f"{case}, tp {tp}", phase, values)
    return rows


def quantile_rows(case: str, phase: str, values: Array) -> list[Row]:
    return [
        Row(case, f"{phase}, median error", 100 * float(np.median(values)), "%"),
        Row(case, f"{phase}, 90 % of errors below", 100 * float(np.quantile(values, 0.9)), "%"),
    ]


def line_rows(profiles: Iterable[EngineProfile]) -> list[Row]:
    """Loss of the planner's affine bounds against a table, for contexts and memory as they occur, and their time."""
    shortest, longest, memory = 1024, 40960, 500_000
    full, any_batch, prefill, taken = [], [], [], []
    above = 0.0
    for grid in (grid for profile in profiles for grid in profile.engines):
        prefill += [prefill_line(grid, chunk).error for chunk in (2048, 8192)]
        for max_num_seqs in (8, 32, 64, 128, 256):
            began = time.perf_counter()
            lines = iteration_lines(grid, max_num_seqs, contexts=(shortest, longest), kv_tokens=memory)
            taken.append(time.perf_counter() - began)
            batches = np.unique([*(batch for batch in grid.batches if batch < max_num_seqs), max_num_seqs])
            contexts = np.geomspace(shortest, longest, 24)
            tokens = batches[:, None] * contexts
            below = np.max(
                [line.step + line.per_sequence * batches[:, None] + line.per_context_token * tokens for line in lines],
                axis=0,
            )
            loss = 1 - below / grid.decode_seconds_at(batches, contexts)
            held = tokens <= memory
            above = max(above, float(-loss[held].min()))
            any_batch.append(float(loss[held].mean()))
            full.append(float(loss[batches == max_num_seqs][held[batches == max_num_seqs]].mean()))
    case = f"bounds of an iteration, contexts {shortest}-{longest}, {memory} tokens of KV"
    return [
        Row(case, "largest excess over the table", 100 * above, "%", "none but rounding", above < 1e-9),
        Row(case, "mean loss of a full batch", 100 * float(np.mean(full)), "%"),
        Row(case, "90 % of full batches lose less than", 100 * float(np.quantile(full, 0.9)), "%"),
        Row(case, "mean loss of any batch", 100 * float(np.mean(any_batch)), "%"),
        Row(case, "median time", 1e3 * median(taken), "ms", "below 1 ms", median(taken) < 1e-3),
        Row("price of prefill in chunks of 2K and 8K", "largest error of a full chunk", 100 * max(prefill), "%"),
    ]


if __name__ == "__main__":
    sys.exit(main())
