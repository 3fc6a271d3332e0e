"""The simulator against vLLM: its schedules step by step, and its times against engines that run.

Invariant: workloads, seeds and repeats are fixed before anything is measured; what is printed, written and put on the
page is one set of findings.

    python -m benchmarks.fidelity [--quick] [--schedule-cases N] [--models small,tiny] [--repeats N]
                                  [--save FOLDER | --measured FOLDER] [--json FILE] [--markdown FILE]
    python -m benchmarks.fidelity --schedule KIND [--schedule-cases N] [--json FILE]
    python -m benchmarks.fidelity --graphs [--json FILE]
    python -m benchmarks.fidelity --gpu-runs FOLDER [--save FOLDER] [--json FILE]

The second compares schedules of one kind, and no times; the third which CUDA graph runs a batch. The last predicts
engines that were measured on GPUs, from the files of a folder (see `gpu_data`). Leave the machine alone for the first.
Exits with 1 if a schedule or a graph differs, or a bar of an engine on a GPU is missed; with 2 if a file of measured
engines cannot be read.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from benchmarks.command import command_line
from benchmarks.fidelity.comparison import Comparison, compare
from benchmarks.fidelity.comparison import rows as rows_of_times
from benchmarks.fidelity.measured import Measured, read_measured
from benchmarks.fidelity.models import ModelName
from benchmarks.page import with_tables
from benchmarks.rows import report
from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.cost.sources.files import save_fit
from libra.hardware.cluster import GPUS

if TYPE_CHECKING:  # it imports vLLM
    from benchmarks.fidelity.schedule import Kind

SEED = 0  # of the first random schedule
# As `schedule.Kind`, which imports vLLM
SCHEDULES = (
    *("sync", "async", "pull", "pull-async", "pd", "pd-async", "pd-fails", "pd-fails-async"),
    *("pd-drafts", "pd-tiers"),
    *("hybrid", "hybrid-async", "drafts", "drafts-async", "both", "dp", "dp-async", "dp-drafts", "dp-drafts-async"),
    *("tiers", "tiers-async", "tiers-drafts"),
)
KIND_CASES = 1000
_SAID_EVERY = 100  # schedules


@dataclass(frozen=True, slots=True)
class Effort:
    """Defaults of the command line for the amount of work."""

    schedule_cases: int
    models: str
    repeats: int


FULL = Effort(schedule_cases=600, models="small,tiny", repeats=3)
QUICK = Effort(schedule_cases=60, models="tiny", repeats=2)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if options.graphs:
        from benchmarks.fidelity import graphs

        compared_graphs = graphs.rows(graphs.GOAL)
        report(compared_graphs, options.json)
        return int(any(row.met is False for row in compared_graphs))
    if options.gpu_runs is not None:
        return _gpu_runs(options.gpu_runs, options.save, options.json)
    environment = dict(os.environ)  # before vLLM is imported: it sets variables that other processes inherit
    from benchmarks.fidelity import page, schedule

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    compared = []
    kind: Kind = options.schedule or "sync"
    for done, case in enumerate(schedule.compare(range(SEED, SEED + options.schedule_cases), kind)):
        if done % _SAID_EVERY == 0:
            say(f"schedules: {done} of {options.schedule_cases}")
        compared.append(case)
    schedules = schedule.summary(compared)
    if options.schedule is not None:
        report(schedule.rows(schedules), options.json)
        if schedules.difference is not None:
            print(schedules.difference)
        return int(schedules.difference is not None)
    comparisons: list[Comparison] = []
    for model in options.models:
        measured = _measured(model, options, environment)
        say(f"{model} model: {len(measured.runs)} workloads to predict")
        comparisons.append(compare(measured))
    generated = page.generated_part(shown_command(given), schedules, comparisons)
    print(f"\n{generated}")
    if options.markdown is not None:
        text = options.markdown.read_text(encoding="utf-8")
        options.markdown.write_text(with_tables(text, {"fidelity/all": generated}), encoding="utf-8")
    report([*schedule.rows(schedules), *(row for one in comparisons for row in rows_of_times(one))], options.json)
    differences = [schedules.difference, *(one.difference for one in comparisons)]
    return int(any(difference is not None for difference in differences))


def _gpu_runs(folder: Path, save: Path | None, json_path: Path | None) -> int:
    """Predict engines that ran on GPUs. Returns 1 where a bar is missed, 2 where a file cannot be read: the others are
    predicted all the same."""
    from benchmarks.fidelity import gpu_runs, gpu_training

    predicted, unread = gpu_runs.predict_all(folder)
    known = [one.run.gpu for one in predicted if one.fitted is not None]
    gpu = known[0] if known else GPUS["H100"]  # training steps do not say which
    steps, unpriced = gpu_training.price_steps(folder, gpu)
    refused = list(dict.fromkeys(map(str, (*unread, *unpriced))))
    if not predicted and not steps and not refused:
        there = "no file in it has facts, grid and cases" if folder.is_dir() else "there is no such folder"
        refused = [f"{folder}: {there}; give a folder of measured engines"]
    if refused:
        print("\n".join(refused), file=sys.stderr)
    if not predicted and not steps:
        return 2
    gpu_runs.show(predicted, Console(width=200))
    if save is not None:
        for one in predicted:
            if one.fitted is not None:
                save_fit(save / f"{one.run.name}.host.json", one.fitted.fit)
    gpu_training.show(steps, gpu, Console(width=200))
    found = [*gpu_runs.rows(predicted), *gpu_training.rows(steps)]
    report(found, json_path)
    return 2 if refused else int(any(row.met is False for row in found))


def _parse(given: list[str]) -> argparse.Namespace:
    parser = command_line("fidelity", __doc__, quick="the tiny model and few cases: a first look, not a verdict")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--schedule", choices=SCHEDULES, help="compare schedules of this kind only")
    parts.add_argument("--graphs", action="store_true", help="compare which CUDA graph runs a batch")
    parts.add_argument("--gpu-runs", type=Path, metavar="FOLDER", help="predict the measured engines of a folder")
    parser.add_argument(
        "--schedule-cases",
        type=int,
        metavar="N",
        help=f"random schedules ({FULL.schedule_cases}; {KIND_CASES} with --schedule)",
    )
    parser.add_argument("--models", help=f"of {', '.join(get_args(ModelName))}, with commas ({FULL.models})")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"of each workload, 2 or more ({FULL.repeats})")
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--save", type=Path, metavar="FOLDER", help="keep what is measured, or fitted, a file for each model"
    )
    files.add_argument("--measured", type=Path, metavar="FOLDER", help="take what --save kept, and measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the part of FILE between the markers")
    options = parser.parse_args(given)
    effort = QUICK if options.quick else FULL
    if options.schedule is not None and options.schedule_cases is None:
        options.schedule_cases = KIND_CASES
    for name in ("schedule_cases", "models", "repeats"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(effort, name))
    options.models = options.models.split(",")
    unknown = sorted(set(options.models) - set(get_args(ModelName)))
    if unknown:
        parser.error(f"--models: there is no {', '.join(unknown)}; choose of {', '.join(get_args(ModelName))}")
    if options.schedule_cases < 1:
        parser.error(f"--schedule-cases is {options.schedule_cases}; give 1 or more")
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; an engine is compared with itself over 2 or more")
    if options.markdown is not None and not options.markdown.is_file():
        parser.error(f"--markdown: {options.markdown} is no file; it must exist and hold the markers")
    if options.measured is not None:
        kept = [options.measured / _file_name(model) for model in options.models]
        missing = [str(path) for path in kept if not path.is_file()]
        if missing:
            parser.error(f"--measured: there is no {', '.join(missing)}; measure with --save {options.measured}")
    return options


def _measured(model: str, options: argparse.Namespace, environment: dict[str, str]) -> Measured:
    """From the folder of an earlier run, or by a process that is set up for one thread."""
    name = _file_name(model)
    if options.measured is not None:
        return read_measured(options.measured / name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.save or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.fidelity.measure", model, str(folder / name)]
        command += ["--repeats", str(options.repeats), *(["--quick"] if options.quick else [])]
        environment = {**environment, **WORKER_ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)
        return read_measured(folder / name)


def _file_name(model: str) -> str:
    return f"{model}.json.gz"


def shown_command(given: Sequence[str]) -> str:
    """Without what only says where to put or find things."""
    kept, skip = [], False
    for word in given:
        if not skip and word.partition("=")[0] not in ("--save", "--measured", "--json"):
            kept.append(word)
        skip = word in ("--save", "--measured", "--json")
    return shlex.join(["python", "-m", "benchmarks.fidelity", *kept])


if __name__ == "__main__":
    sys.exit(main())
