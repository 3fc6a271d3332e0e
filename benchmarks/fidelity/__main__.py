"""The simulator against vLLM: its schedules step by step, and its times against engines that ran on GPUs.

Invariant: exits with 1 if a schedule or a graph differs, or a bar of an engine on a GPU is missed; with 2 if a file of
measured engines cannot be read: the others are predicted all the same.

    python -m benchmarks.fidelity [--schedule KIND] [--schedule-cases N] [--quick] [--json FILE]
    python -m benchmarks.fidelity --graphs [--json FILE]
    python -m benchmarks.fidelity --gpu-runs FOLDER [--save FOLDER] [--json FILE]

The first compares schedules of one kind, the second which CUDA graph runs a batch. The last predicts engines that were
measured on GPUs, from the files of a folder (see `gpu_data`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from libra.hardware.cluster import GPUS

SCHEDULES = (
    *("sync", "async", "pull", "pull-async", "pd", "pd-async", "pd-fails", "pd-fails-async", "pd-drafts", "pd-tiers"),
    *("hybrid", "hybrid-async", "drafts", "drafts-async", "both", "dp", "dp-async", "dp-drafts", "dp-drafts-async"),
    *("tiers", "tiers-async", "tiers-drafts"),
)
_GRAPHS = 10_000  # batches
_SAID_EVERY = 100  # schedules
_SHOWN = 10  # differences


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("fidelity", __doc__, quick="60 schedules: a first look, not a verdict")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--schedule", choices=SCHEDULES, default="sync", help="compare schedules of this kind (sync)")
    parts.add_argument("--graphs", action="store_true", help="compare which CUDA graph runs a batch")
    parts.add_argument("--gpu-runs", type=Path, metavar="FOLDER", help="predict the measured engines of a folder")
    parser.add_argument("--schedule-cases", type=int, metavar="N", help="random schedules (1000)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep what is fitted, a file for each engine")
    options = parser.parse_args(arguments)
    if options.gpu_runs is not None:
        return _gpu_runs(options.gpu_runs, options.save, options.json)
    if options.graphs:
        rows, differences = _graphs()
    else:
        cases = (60 if options.quick else 1000) if options.schedule_cases is None else options.schedule_cases
        if cases < 1:
            parser.error(f"--schedule-cases is {cases}; give 1 or more")
        rows, differences = _schedules(options.schedule, cases)
    report(rows, options.json)
    for difference in differences[:_SHOWN]:
        print(difference)
    return int(bool(differences))


def _graphs() -> tuple[list[Row], list[str]]:
    from tests.oracles.fidelity.graphs import differences

    found = differences(range(_GRAPHS))
    equal = _GRAPHS - len(found)
    return [Row("CUDA graphs", "kind and size the dispatcher's", equal, "", f"all of {_GRAPHS:,}", not found)], found


def _schedules(kind: str, cases: int) -> tuple[list[Row], list[str]]:
    from tests.oracles.fidelity.schedule import compare, summary

    began, compared = time.monotonic(), []
    for done, one in enumerate(compare(range(cases), kind)):
        if done % _SAID_EVERY == 0:
            print(f"{time.monotonic() - began:5.0f} s  schedules: {done} of {cases}", flush=True)
        compared.append(one)
    found = summary(compared)
    case = "schedule, simulated and vLLM's"
    rows = [
        Row(case, "random workloads", found.cases, "", "500 or more", found.cases >= 500),
        Row(case, "of which every step is equal", found.equal, "", "all", found.equal == found.cases),
        *(Row(case, what, count, "") for what, count in found.counts.items()),
    ]
    return rows, [] if found.difference is None else [found.difference]


def _gpu_runs(folder: Path, save: Path | None, json_path: Path | None) -> int:
    from benchmarks.fidelity.gpu_runs import gpu_rows
    from benchmarks.fidelity.gpu_training import training_rows

    engines, refused, gpu = gpu_rows(folder, save)
    steps, unpriced = training_rows(folder, gpu or GPUS["H100"])  # training steps do not say which
    rows, told = [*engines, *steps], list(map(str, (*refused, *unpriced)))
    if not rows and not told:
        there = "no file in it has facts and cases" if folder.is_dir() else "there is no such folder"
        told = [f"{folder}: {there}; give a folder of measured engines"]
    if told:
        print("\n".join(told), file=sys.stderr)
    if rows:
        report(rows, json_path)
    return 2 if told else int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
