"""Libra: which GPUs train, which generate, and where every request goes.

Invariant: these are the public names. Importing this module loads none of them: `import libra` costs nothing, and
planning never imports the libraries of runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.choose.choice import choose_plan as choose_plan
    from libra.choose.confirmation import simulated_gain as simulated_gain
    from libra.choose.effort import Effort as Effort
    from libra.config.recipe import Recipe as Recipe
    from libra.config.recipe import load_recipe as load_recipe
    from libra.cost.sources.profiles import engine_profiles as engine_profiles
    from libra.hardware.cluster import Cluster as Cluster
    from libra.hardware.cluster_file import load_cluster as load_cluster
    from libra.hardware.model import ModelSpec as ModelSpec
    from libra.hardware.model_file import load_model as load_model
    from libra.lengths import LengthTracker as LengthTracker
    from libra.plan.explain.explained import explain_plan as explain_plan
    from libra.plan.plan import Plan as Plan
    from libra.plan.planner import Planner as Planner
    from libra.plan.problem import InfeasiblePlanError as InfeasiblePlanError
    from libra.plan.replanner import Replanner as Replanner
    from libra.serving.point_file import write_engines as write_engines
    from libra.serving.search import search as search
    from libra.sim.engine.config import EngineConfig as EngineConfig
    from libra.sim.engine.config import EngineSpec as EngineSpec
    from libra.sim.engines_file import load_engines as load_engines
    from libra.sim.of_plan import simulate_plan as simulate_plan
    from libra.sim.outcome.metrics import metrics_of as metrics_of
    from libra.sim.outcome.result import SimulationResult as SimulationResult
    from libra.sim.simulate import simulate as simulate
    from libra.sim.training_run.episodes import Resampled as Resampled
    from libra.sim.training_run.loop import simulate_posttraining as simulate_posttraining
    from libra.sim.training_run.system import System as System
    from libra.sim.workload.replay import Replay as Replay
    from libra.sim.workload.request_file import read_requests as read_requests
    from libra.sim.workload.requests import recorded_requests as recorded_requests
    from libra.trajectory import Trajectory as Trajectory
    from libra.trajectory import read_trajectories as read_trajectories

_HOME = {
    "Effort": "libra.choose.effort",
    "choose_plan": "libra.choose.choice",
    "Cluster": "libra.hardware.cluster",
    "EngineConfig": "libra.sim.engine.config",
    "EngineSpec": "libra.sim.engine.config",
    "InfeasiblePlanError": "libra.plan.problem",
    "LengthTracker": "libra.lengths",
    "ModelSpec": "libra.hardware.model",
    "Plan": "libra.plan.plan",
    "Planner": "libra.plan.planner",
    "Recipe": "libra.config.recipe",
    "Replanner": "libra.plan.replanner",
    "Replay": "libra.sim.workload.replay",
    "Resampled": "libra.sim.training_run.episodes",
    "SimulationResult": "libra.sim.outcome.result",
    "System": "libra.sim.training_run.system",
    "Trajectory": "libra.trajectory",
    "engine_profiles": "libra.cost.sources.profiles",
    "explain_plan": "libra.plan.explain.explained",
    "load_cluster": "libra.hardware.cluster_file",
    "load_engines": "libra.sim.engines_file",
    "load_model": "libra.hardware.model_file",
    "load_recipe": "libra.config.recipe",
    "metrics_of": "libra.sim.outcome.metrics",
    "read_requests": "libra.sim.workload.request_file",
    "read_trajectories": "libra.trajectory",
    "recorded_requests": "libra.sim.workload.requests",
    "search": "libra.serving.search",
    "simulate": "libra.sim.simulate",
    "simulate_plan": "libra.sim.of_plan",
    "simulated_gain": "libra.choose.confirmation",
    "simulate_posttraining": "libra.sim.training_run.loop",
    "write_engines": "libra.serving.point_file",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'libra' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
