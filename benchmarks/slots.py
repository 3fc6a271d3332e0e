"""Speed of a CPU slot while its neighbours are idle, and while they are busy.

Invariant: both speeds of a configuration are measured in turns on the same processes, so what else the machine does in
the meantime touches both alike. A speed counts finished pieces of work, never a sleep.

    python -m benchmarks.slots [--quick] [--json FILE]

The work is small float32 matrix products on one thread, in pieces of a few milliseconds as engine iterations are.
Slots are as `libra run` makes them: slot n lives on core n modulo the cores, at the share that `cluster.share` defaults
to. The last configuration is a contrast without a goal: whole cores, shared by all processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import psutil

from benchmarks.rows import Row, report
from libra.backends.launch.worker import Pacer
from libra.config.run import ClusterConfig

TOLERANCE = 0.10  # relative; a slot may be this much slower, or faster, when its neighbours are busy
GOAL = "within 10 %"

_MATRIX = 96  # rows and columns
_PRODUCTS = 128  # in one piece, between two calls of the pacer
_QUIET = 0.05  # share of the machine that others may use while this measures
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Configuration:
    """The slot that is measured is slot 0; `neighbours` are the slots that idle or work beside it.

    The case says what share of a core a slot has, and where the neighbours are.
    """

    case: str
    share: float
    neighbours: tuple[int, ...]
    goal: str | None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Matrix products a second."""

    idle: float
    busy: float

    @property
    def ratio(self) -> float:
        return self.busy / self.idle


@dataclass(frozen=True, slots=True)
class _Slot:
    """A process on one core that works while `active` is set; `done` counts its matrix products."""

    process: SpawnProcess
    active: Event
    done: Synchronized[int]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short measurements: a first look, not a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    seconds, repeats = (0.5, 4) if options.quick else (2.0, 5)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    taken = psutil.cpu_percent(interval=1.0) / 100
    rows: list[Row] = []
    for configuration in configurations(len(cores)):
        rows += rows_of(configuration, measure(configuration, cores, seconds, repeats))
    report(rows, options.json)
    if taken > _QUIET:
        print(f"other processes took {taken:.0%} of the machine before the start: measure again when it is quiet")
    return 0


def configurations(cores: int) -> tuple[Configuration, ...]:
    """Configurations with the most slots to a core that the default share allows."""
    share = ClusterConfig().share
    slots = range(1, cores * int(1 / share))
    own_core = tuple(slot for slot in slots if slot % cores == 0)
    others = tuple(slot for slot in slots if slot % cores != 0)
    found = [Configuration(f"slot of {share:g}, same core", share, own_core, GOAL)]
    if others:
        found += [
            Configuration(f"slot of {share:g}, other cores", share, others, GOAL),
            Configuration(f"slot of {share:g}, all slots", share, tuple(slots), GOAL),
        ]
    return (*found, Configuration("no slots, same core", 1.0, own_core, None))


def measure(configuration: Configuration, cores: Sequence[int], seconds: float, repeats: int) -> Speeds:
    """Medians over `repeats` turns of `seconds` each."""
    idle, busy = [], []
    with _slots(configuration, cores) as (measured, *neighbours):
        for _ in range(repeats):
            idle.append(_speed(measured, seconds))
            for neighbour in neighbours:
                neighbour.active.set()
            busy.append(_speed(measured, seconds))
            for neighbour in neighbours:
                neighbour.active.clear()
    return Speeds(median(idle), median(busy))


def rows_of(configuration: Configuration, speeds: Speeds) -> list[Row]:
    goal = configuration.goal
    met = None if goal is None else abs(speeds.ratio - 1) <= TOLERANCE
    return [
        Row(configuration.case, "speed, idle", speeds.idle, "products/s"),
        Row(configuration.case, "speed, busy", speeds.busy, "products/s"),
        Row(configuration.case, "busy / idle", speeds.ratio, "ratio", goal, met),
    ]


def _speed(slot: _Slot, seconds: float) -> float:
    """Products a second, once what the slot and its neighbours had saved up is spent."""
    time.sleep(0.25)
    began, before = time.monotonic(), slot.done.value
    time.sleep(seconds)
    return (slot.done.value - before) / (time.monotonic() - began)


@contextmanager
def _slots(configuration: Configuration, cores: Sequence[int]) -> Iterator[list[_Slot]]:
    """Slot 0, at work, and its neighbours, idle. They are gone afterwards."""
    context = multiprocessing.get_context("spawn")
    for name in _THREADS:
        os.environ[name] = "1"  # inherited; numpy reads it when a slot imports it
    slots = []
    try:
        for number in (0, *configuration.neighbours):
            slots.append(_start(context, configuration.share, cores[number % len(cores)]))
        for slot in slots:
            while slot.done.value == 0:  # each makes one piece to show that it is there
                if not slot.process.is_alive():
                    raise RuntimeError("a slot ended before it had done anything; see its traceback above")
                time.sleep(0.01)
        slots[0].active.set()
        yield slots
    finally:
        for slot in slots:
            slot.process.kill()
            slot.process.join()


def _start(context: SpawnContext, share: float, core: int) -> _Slot:
    active, done = context.Event(), context.Value("q", 0)
    process = context.Process(target=_work, args=(share, core, active, done), daemon=True)
    process.start()
    return _Slot(process, active, done)


def _work(share: float, core: int, active: Event, done: Synchronized[int]) -> None:
    import numpy as np

    left, right = (np.random.default_rng(seed).random((_MATRIX, _MATRIX), dtype=np.float32) for seed in (0, 1))
    out = np.empty_like(left)
    pacer = Pacer(share, (core,))
    while True:
        for _ in range(_PRODUCTS):
            np.matmul(left, right, out=out)
        pacer.pace()
        done.value += _PRODUCTS
        active.wait()


if __name__ == "__main__":
    sys.exit(main())
