"""Questions to the planner: clusters, models, recipes and logs of trajectories; and plans that a person, or chance,
would make for the same question.

Invariant: a question is determined by its name, and everything in it is in the repository or drawn from a seed. A rival
fits its problem, and is determined by its name, the problem and the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.evaluation.setting import Setting
from libra import Planner, engine_profiles, load_model, load_recipe
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.plan.allocation import Allocation, Bucket
from libra.plan.model.solve import solve
from libra.plan.options.price import infeasibility
from libra.plan.problem import InfeasiblePlanError, Problem, TrainingOption
from libra.trajectory import Trajectory, read_workload

EXAMPLES = Path(__file__).parents[1] / "examples"
LOG = EXAMPLES / "search_agent.jsonl"
_MIB = 2**20
_H20 = GPU(
    name="H20",
    memory=97_871 * _MIB,
    bandwidth=4.0e12,
    flops=148e12,
    link=450e9,
    source="NVIDIA H20 data sheet (2023): 96 GB HBM3, 4.0 TB/s, 148 TFLOP/s bf16, NVLink 4 900 GB/s",
)


Asked = tuple[Planner, tuple[Trajectory, ...]]  # a planner, and its log


def _nodes(gpu: str, count: int) -> NodeClass:
    kind = _H20 if gpu == "H20" else GPUS[gpu]
    return NodeClass(gpu.lower(), count, 8, kind, kind.link, 400e9 / 8)


def _planned(model: str, nodes: tuple[tuple[str, int], ...], batch: int = 512, **recipe: object) -> Asked:
    changes = {"batch": batch, **recipe}
    if changes.get("mode") in ("sync", "colocated"):
        changes["staleness"] = 0
    asked = load_recipe(EXAMPLES / "request.yaml", changes)
    shape, cluster = load_model(model), Cluster(tuple(_nodes(*it) for it in nodes))
    profiles = engine_profiles(cluster, shape, asked, "roofline", host="default")
    return Planner(cluster, shape, asked, profiles), tuple(read_workload(LOG, asked.max_length, False))


def _workload(workload: str, nodes: int) -> Asked:
    setting = Setting("Qwen/Qwen3-14B", workload, nodes=nodes, staleness=1)
    return setting.planner(), setting.known


_A800, _H100, _MIXED = (("A800", 6),), (("H100", 8),), (("H100", 4), ("H20", 4))
QUESTIONS: dict[str, Callable[[], Asked]] = {  # the most telling first
    "README: 48 A800, 14B": partial(_planned, "Qwen/Qwen3-14B", _A800),
    "64 mixed, 14B": partial(_planned, "Qwen/Qwen3-14B", _MIXED),
    "48 A800, 14B, colocated": partial(_planned, "Qwen/Qwen3-14B", _A800, mode="colocated"),
    "48 A800, 14B, sync": partial(_planned, "Qwen/Qwen3-14B", _A800, mode="sync"),
    "64 H100, 30B-A3B": partial(_planned, "Qwen/Qwen3-30B-A3B", _H100),
    "64 H100, 70B": partial(_planned, "meta-llama/Llama-3.3-70B-Instruct", _H100),
    "64 mixed, 32B, sync": partial(_planned, "Qwen/Qwen3-32B", _MIXED, mode="sync"),
    "16 H100, 8B, staleness 4": partial(_planned, "Qwen/Qwen3-8B", (("H100", 2),), 256, staleness=4),
    **{
        f"{gpus} A800, 14B, {workload}": partial(_workload, workload, gpus // 8)
        for gpus in (48, 128)
        for workload in ("search_r1", "dapo_math", "r2e_gym")
    },
}


RANDOM = 6  # random plans of a question
_TRIES = 2_000


def rivals(problem: Problem, seed: int) -> dict[str, Allocation]:
    """One size of engines, an even split, the greedy plan, and random plans of the menu; those that exist."""
    found: dict[str, Allocation] = {}
    single = replace(problem, most_buckets=1)
    for name, training in (
        ("one size", problem.training),
        ("even split", _even(problem)),
        ("greedy", _most_efficient(problem)),
    ):
        try:
            found[name] = solve(replace(single, training=tuple(training)), tie_break=False).allocation
        except InfeasiblePlanError:
            continue
    drawn = random.Random(seed)
    for number, allocation in enumerate(_random_plans(problem, drawn), start=1):
        found[f"random {number}"] = allocation
    return found


def _even(problem: Problem) -> list[TrainingOption]:
    """Training on the number of devices that is nearest to half of all."""
    half = sum(pool.devices for pool in problem.pools) / 2
    nearest = min(abs(option.devices - half) for option in problem.training)
    return [option for option in problem.training if abs(option.devices - half) == nearest]


def _most_efficient(problem: Problem) -> list[TrainingOption]:
    """Training where a device second buys most, whatever that makes of the step."""
    return [min(problem.training, key=lambda option: option.seconds * option.devices)]


def _random_plans(problem: Problem, drawn: random.Random) -> Iterator[Allocation]:
    found: set[Allocation] = set()
    for _ in range(_TRIES):
        allocation = _drawn_plan(problem, drawn)
        if allocation is not None and allocation not in found and infeasibility(problem, allocation) is None:
            found.add(allocation)
            yield allocation
            if len(found) == RANDOM:
                return


def _drawn_plan(problem: Problem, drawn: random.Random) -> Allocation | None:
    """Training and ranges drawn evenly; then engines, until no device is left for another."""
    training = drawn.choice(problem.training)
    most = problem.most_buckets or 3
    ends = sorted(drawn.sample(problem.peaks[:-1], min(drawn.randint(1, most), len(problem.peaks)) - 1))
    limits = [*dict.fromkeys(end for end in ends if end < problem.longest_context), problem.longest_context]
    shapes: list[str] = []
    for limit in limits:
        fitting = sorted({option.shape for option in problem.engines if option.holds >= limit} - set(shapes))
        if not fitting:
            return None
        shapes.append(drawn.choice(fitting))
    left = {pool.name: pool.devices for pool in problem.pools}
    if not problem.colocated:
        left[training.pool] -= training.devices
    counts = _filled(problem, shapes, left, drawn)
    if counts is None:
        return None
    buckets = tuple(
        Bucket(shape, count, above, up_to)
        for shape, count, above, up_to in zip(shapes, counts, [0, *limits[:-1]], limits, strict=True)
    )
    return Allocation(training.replicas, buckets, training.layout)


def _filled(problem: Problem, shapes: Sequence[str], left: dict[str, int], drawn: random.Random) -> list[int] | None:
    """Engines of each shape, one of each first; None where not even those fit."""
    counts = [0] * len(shapes)

    def take(which: int) -> bool:
        uses = problem.uses(shapes[which])
        if any(left[pool] < devices for pool, devices in uses.items()):
            return False
        for pool, devices in uses.items():
            left[pool] -= devices
        counts[which] += 1
        return True

    if not all(take(which) for which in range(len(shapes))):
        return None
    while any(take(which) for which in drawn.sample(range(len(shapes)), len(shapes))):
        pass
    return counts
