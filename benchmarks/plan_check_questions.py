"""Questions to the planner: clusters, models, recipes and logs of trajectories.

Invariant: a question is determined by its name, and everything in it is in the repository or drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.evaluation.setting import Setting
from libra.config.recipe import load_recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.planner import Planner
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


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `ask` makes its planner and its log."""

    name: str
    ask: Callable[[], tuple[Planner, tuple[Trajectory, ...]]]


def _nodes(gpu: str, count: int) -> NodeClass:
    kind = _H20 if gpu == "H20" else GPUS[gpu]
    return NodeClass(gpu.lower(), count, 8, kind, kind.link, 400e9 / 8)


def _planned(
    model: str, nodes: tuple[tuple[str, int], ...], batch: int = 512, **recipe: object
) -> tuple[Planner, tuple[Trajectory, ...]]:
    changes = {"batch": batch, **recipe}
    if changes.get("mode") in ("sync", "colocated"):
        changes["staleness"] = 0
    asked = load_recipe(EXAMPLES / "request.yaml", changes)
    shape, cluster = load_model(model), Cluster(tuple(_nodes(*it) for it in nodes))
    profiles = engine_profiles(cluster, shape, asked, "roofline", host="default")
    return Planner(cluster, shape, asked, profiles), tuple(read_workload(LOG, asked.max_length, False))


def _workload(workload: str, nodes: int, staleness: int = 1) -> tuple[Planner, tuple[Trajectory, ...]]:
    setting = Setting("Qwen/Qwen3-14B", workload, nodes=nodes, staleness=staleness)
    return setting.planner(), setting.known


def questions() -> Iterator[Question]:
    """The most telling first."""
    a800 = (("A800", 6),)
    asked = {
        "README: 48 A800, 14B": partial(_planned, "Qwen/Qwen3-14B", a800),
        "64 mixed, 14B": partial(_planned, "Qwen/Qwen3-14B", (("H100", 4), ("H20", 4))),
        "48 A800, 14B, colocated": partial(_planned, "Qwen/Qwen3-14B", a800, mode="colocated"),
        "48 A800, 14B, sync": partial(_planned, "Qwen/Qwen3-14B", a800, mode="sync"),
        "64 H100, 30B-A3B": partial(_planned, "Qwen/Qwen3-30B-A3B", (("H100", 8),)),
        "64 H100, 70B": partial(_planned, "meta-llama/Llama-3.3-70B-Instruct", (("H100", 8),)),
        "64 mixed, 32B, sync": partial(_planned, "Qwen/Qwen3-32B", (("H100", 4), ("H20", 4)), mode="sync"),
        "16 H100, 8B, staleness 4": partial(_planned, "Qwen/Qwen3-8B", (("H100", 2),), 256, staleness=4),
        **{
            f"{gpus} A800, 14B, {workload}": partial(_workload, workload, gpus // 8)
            for gpus in (48, 128)
            for workload in ("search_r1", "dapo_math", "r2e_gym")
        },
    }
    return (Question(name, ask) for name, ask in asked.items())
