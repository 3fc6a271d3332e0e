"""How long the planner takes, how far from the optimum it may be, and the memory it needs.

Invariant: the questions are the same on every machine; only the seconds and the memory are the machine's.

    python -m benchmarks.planning [--quick] [--json FILE]

A case is a cluster of that many devices, a quarter of them core, a quarter hybrid, the rest rollout, and a sequence of
plans as a run would make them: the lengths of the trajectories drift from plan to plan, and the allocation of one plan
is what runs when the next is made. Each case has a process of its own, whose peak memory is reported.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.rows import Row, report
from libra.cost.engine_facts import BLOCK_TOKENS
from libra.cost.profile_file import load_profile
from libra.lengths import LengthTracker
from libra.plan.cpsat import STEP_TOLERANCE, solve
from libra.plan.problem import Allocation, EngineShape, Fleet, PlanRequest, Workload
from libra.trajectory import Trajectory, Turn

DEVICES = (4, 16, 64)
PROFILE = Path(__file__).parent.parent / "examples" / "profile_2_cores.json"

_LONGEST = 512  # tokens; the longest shape holds it
_SHAPES = tuple(EngineShape(f"up-to-{length}", length, 1024 // length, 1024) for length in (64, 128, 256, _LONGEST))
_TRAJECTORIES_PER_DEVICE = 36  # of one step
_OBSERVED = 1000  # trajectories behind each plan
_DRIFT = 1.15  # factor on the median length from plan to plan


@dataclass(frozen=True, slots=True)
class Measured:
    """One entry of each list a plan."""

    seconds: list[float]
    gaps: list[float]
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few plans a case: a first look, not a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as a JSON list")
    options = parser.parse_args(arguments)
    plans = 3 if options.quick else 10
    rows: list[Row] = []
    for devices in DEVICES:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            rows += rows_of(devices, process.apply(measure, (devices, plans)))
    report(rows, options.json)
    return 0


def measure(devices: int, plans: int) -> Measured:
    """Make one plan after the other in this process."""
    seconds, gaps = [], []
    current: Allocation | None = None
    for number in range(plans):
        request = make_request(devices, number, current)
        began = time.perf_counter()
        plan = solve(request)
        seconds.append(time.perf_counter() - began)
        gaps.append(plan.proof.gap)
        current = plan.allocation
    return Measured(seconds, gaps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def rows_of(devices: int, measured: Measured) -> list[Row]:
    case, worst = f"{devices} devices", max(measured.gaps)
    return [
        Row(case, "median time of a plan", median(measured.seconds), "s"),
        Row(case, "longest minus shortest", max(measured.seconds) - min(measured.seconds), "s"),
        # The planner gives up this much of a step, and no more, to spare a move.
        Row(
            case,
            "largest gap to the bound",
            100 * worst,
            "%",
            f"at most {100 * STEP_TOLERANCE:g} %",
            worst <= STEP_TOLERANCE,
        ),
        Row(case, "peak memory", measured.peak_bytes / 2**20, "MiB"),
    ]


def make_request(devices: int, number: int, current: Allocation | None) -> PlanRequest:
    """The question behind plan `number` of a run on so many devices."""
    rng = random.Random(number)
    tracker = LengthTracker(half_life=_OBSERVED / 2, block_tokens=BLOCK_TOKENS)
    for index in range(_OBSERVED):
        tracker.observe(_trajectory(rng, f"t{index}", scale=_DRIFT**number))
    return PlanRequest(
        fleet=Fleet(core=devices // 4, hybrid=devices // 4, rollout=devices - 2 * (devices // 4)),
        shapes=_SHAPES,
        profile=load_profile(PROFILE),
        workload=Workload(
            trajectories=_TRAJECTORIES_PER_DEVICE * devices,
            group_size=6,
            max_staleness=1,
            max_turn_tokens=16,
            longest_context=_LONGEST,
            train_tokens=tracker.mean_peak,
            router_hit=0.9,
            classes=tracker.classes(),
        ),
        current=current,
    )


def _trajectory(rng: random.Random, name: str, scale: float) -> Trajectory:
    """Turns of 8 tokens that each get 6 back, as many as a log-normal length has room for."""
    length = min(_LONGEST, 40 * scale * rng.lognormvariate(0.0, 0.7))
    calls = max(0, math.floor((length - 20) / 14))
    turns = tuple(Turn(8, "tool", "ok", 6, 0.01) for _ in range(calls))
    return Trajectory(name, name, "made", 12, (*turns, Turn(8, None, None, 0)), None, 0, True)


if __name__ == "__main__":
    sys.exit(main())
