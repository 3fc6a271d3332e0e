"""A slot gets its share of a core, whatever its neighbours do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.alone]

SHARE = 0.45
SECONDS = 1.5
WORKER = """
import sys, time
import numpy
from libra.backends.launch.worker import Pacer

core, share, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
matrix = numpy.ones((96, 96), dtype=numpy.float32)
pacer = Pacer(share, (core,))
print("ready", flush=True)
cpu, wall = time.process_time(), time.monotonic()
while time.monotonic() - wall < seconds:
    for _ in range(64):
        matrix @ matrix
    pacer.pace()
print((time.process_time() - cpu) / (time.monotonic() - wall))
"""


def start(core: int, seconds: float) -> subprocess.Popen[str]:
    """A busy slot, past its imports (which are not paced)."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(core), str(SHARE), str(seconds)],
        env={**os.environ, **one_thread},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def share_of_a_slot(core: int) -> float:
    """CPU seconds a second that a busy slot on `core` gets."""
    return float(start(core, SECONDS).communicate(timeout=60)[0])


def test_busy_neighbours_take_less_than_a_tenth_of_a_slot() -> None:
    cores = sorted(os.sched_getaffinity(0))
    alone, crowded = [], []
    for _ in range(8):  # in turn, so that whatever else the machine does falls on both
        alone.append(share_of_a_slot(cores[0]))
        # All other slots of two on each core; they end by themselves should this test be ended first.
        neighbours = [start(core, 60.0) for core in [*cores, *cores[1:]]]
        try:
            crowded.append(share_of_a_slot(cores[0]))
        finally:
            for neighbour in neighbours:
                neighbour.kill()
                neighbour.communicate()
        # What others do to the machine only ever takes away, so the best of several turns is the slot's own.
        if max(alone) >= 0.9 * SHARE and max(crowded) >= 0.9 * max(alone):
            break
    if max(alone) < 0.9 * SHARE:
        pytest.skip(f"the machine is busy with something else: a slot alone got {max(alone):.2f} of {SHARE} core")
    assert max(crowded) / max(alone) == pytest.approx(1.0, abs=0.1)
