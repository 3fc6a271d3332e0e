"""Time and memory that the planner needs, and how far from the optimum its plans may be.

Invariant: the questions are the same on every machine; only the seconds and the memory are the machine's.

    python -m benchmarks.planning [--quick] [--json FILE]

A case is a cluster and a step's worth of trajectories, Qwen3-14B, contexts up to 40,960 tokens. Time is from the
request to the plan: pricing, solving with proof, and placement. The engines' profile is there already, as in a run that
plans every period; planning again with the last plan as a hint, while lengths drift, is a case of its own. Each case
has a process of its own, whose peak memory is reported.
"""

from __future__ import annotations

import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.command import apart, command_line, peak_mib, processor_seconds, show
from benchmarks.rows import Row, at_most, below
from libra import LengthTracker, Plan, Recipe, load_model
from libra.cost.sources.roofline import roofline, tensor_degrees
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.plan.planner import CLASSES, Planner
from libra.trajectory import Trajectory, Turn, write_trajectories

MODEL = "Qwen/Qwen3-14B"
MAX_LENGTH = 40960
LARGEST_GAP = 1e-3

_ETHERNET = 25e9  # bytes/s of a node: 200 Gb/s
_OBSERVED = 2000  # trajectories behind each plan
_FIVE_TYPES = ("L40S", "A800", "H800", "H200", "B200")
_DRIFT = 1.15  # factor on the median length from plan to plan


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    nodes: tuple[tuple[str, int], ...]  # GPU and number of nodes of eight
    trajectories: int  # of one step
    goal: float  # seconds of CPU: a plan takes one core, which a busy machine shares
    hint: bool = False  # whether each plan starts from the last one


CASES = (
    Case("48 A800, 512 trajectories", (("A800", 6),), 512, 0.2),
    Case("128 A800, 512 trajectories", (("A800", 16),), 512, 0.3),
    Case("1,024 A800, 4,096 trajectories", (("A800", 128),), 4096, 1.0),
    Case("10,240 of three types, 16,384", (("A800", 427), ("H800", 427), ("H200", 426)), 16384, 0.5),
    Case("100,000 of five types, 160,000", tuple((gpu, 2500) for gpu in _FIVE_TYPES), 160000, 5.0),
    Case("48 A800, with the last plan as hint", (("A800", 6),), 512, 0.1, hint=True),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One entry of each list a plan."""

    seconds: list[float]
    cpu_seconds: list[float]
    gaps: list[float]
    peak_mib: float


def rows(options: Namespace) -> Iterator[Row]:
    plans = 3 if options.quick else 10
    for case in CASES:
        yield from rows_of(case, apart(measure, case, plans))
    yield _cold_start_row(plans)


def measure(case: Case, plans: int) -> Measured:
    """Make one plan after the other in this process; the first is not counted, it warms libraries up."""
    model = load_model(MODEL)
    recipe = Recipe(batch=case.trajectories, samples_per_prompt=16, max_length=MAX_LENGTH)
    nodes = tuple(NodeClass(gpu.lower(), count, 8, GPUS[gpu], GPUS[gpu].link, _ETHERNET) for gpu, count in case.nodes)
    cluster = Cluster(nodes)
    profiles = tuple(roofline(n.gpu, model, tensor_degrees(model, n), intra_bandwidth=n.intra_bandwidth) for n in nodes)
    planner = Planner(cluster, model, recipe, profiles)
    seconds, cpu_seconds, gaps = [], [], []
    current: Plan | None = None
    for number in range(plans + 1):
        classes = make_tracker(number % 10).classes(CLASSES)
        began, cpu = time.perf_counter(), time.process_time()
        plan = planner.plan(classes, current)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu)
        gaps.append(plan.proof.gap)
        current = plan if case.hint else None
    return Measured(seconds[1:], cpu_seconds[1:], gaps[1:], peak_mib())


def rows_of(case: Case, measured: Measured) -> list[Row]:
    return [
        Row(case.name, "median time of a plan", median(measured.seconds), "s"),
        Row(case.name, "longest time of a plan", max(measured.seconds), "s"),
        below(case.name, "median CPU time", median(measured.cpu_seconds), "s", case.goal),
        Row(case.name, "longest CPU time", max(measured.cpu_seconds), "s"),
        at_most(case.name, "largest gap to the proven bound", 100 * max(measured.gaps), "%", 100 * LARGEST_GAP),
        below(case.name, "peak memory", measured.peak_mib, "MiB", 1024),
    ]


def make_tracker(number: int) -> LengthTracker:
    """Statistics before plan `number`: log-normal lengths that grow from plan to plan."""
    rng = random.Random(number)
    tracker = LengthTracker(half_life=_OBSERVED / 2)
    for trajectory in make_trajectories(rng, _OBSERVED, _DRIFT**number):
        tracker.observe(trajectory)
    return tracker


def make_trajectories(rng: random.Random, count: int, scale: float) -> list[Trajectory]:
    """Turns of 150 tokens that each get 250 back, as many as a log-normal length has room for."""
    made = []
    for index in range(count):
        length = min(MAX_LENGTH - 400, 4000 * scale * rng.lognormvariate(0.0, 0.9))
        calls = max(0, math.floor((length - 900) / 400))
        turns = tuple(Turn(150, "tool", "ok", 250, round(rng.expovariate(1.0), 3)) for _ in range(calls))
        name = f"t{index}"
        made.append(Trajectory(name, name, "made", 700, (*turns, Turn(150, None, None, 0)), None, 0, True))
    return made


def _cold_start_row(plans: int) -> Row:
    """The command line, from start to exit, on the first case, without the simulations that a plan is tried in."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_trajectories(log, make_trajectories(random.Random(0), 512, 1.0))
        command = [sys.executable, "-m", "libra.cli.app", "plan", "examples/cluster_48_a800.yaml", "--model", MODEL]
        command += ["-t", str(log), "-r", "examples/request.yaml", "-o", str(Path(folder) / "plan.json")]
        command.append("--no-simulation")
        seconds = []
        for _ in range(plans):
            began = processor_seconds(resource.RUSAGE_CHILDREN)
            subprocess.run(command, cwd=root, check=True, capture_output=True)
            seconds.append(processor_seconds(resource.RUSAGE_CHILDREN) - began)
    return below(
        "48 A800, 512 trajectories", "median CPU time of `libra plan --no-simulation`", median(seconds), "s", 3
    )


if __name__ == "__main__":
    show(command_line("planning", __doc__, quick="few plans a case: a first look, not a verdict"), rows)
