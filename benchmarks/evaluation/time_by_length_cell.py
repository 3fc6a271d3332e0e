"""Cells of `time_by_length`: the rollout of a batch, and the training on it, on 48 A800.

Invariant: both are given the same trajectories, and each has all GPUs.
"""

from __future__ import annotations

from benchmarks.evaluation.engines import a800_nodes, engines_of
from benchmarks.evaluation.spread_requests import spread_requests
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.lengths import LengthTracker
from libra.plan.options.layouts import training_layouts
from libra.route.baselines import LeastLoaded
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.requests import Requests
from libra.trajectory import Trajectory, Turn

MODEL = "Qwen/Qwen3-14B"
NODES = 6  # of 8 A800
MAX_NUM_SEQS = 256  # sequences of an engine at once: the default of `EngineConfig`
LONGEST = 40_960  # tokens
_CLASSES = 8


def rollout(tp: int, mean: int, trajectories: int, seed: int) -> dict[str, float]:
    """Seconds until the last trajectory of a batch is finished, all started at once on engines of degree `tp`."""
    engines = engines_of(load_model(MODEL), a800_nodes(NODES), _recipe(trajectories), tp, MAX_NUM_SEQS)
    found = metrics_of(simulate(engines, _batch(mean, trajectories, seed), LeastLoaded()))
    if found.finished != trajectories:
        raise RuntimeError(f"{found.finished} of {trajectories} trajectories finished; all must")
    return {"seconds": found.makespan}


def training(mean: int, trajectories: int, seed: int) -> dict[str, float | str]:
    """Seconds of an optimiser step on the same batch, in the fastest layout."""
    tracker = LengthTracker()
    for request in _batch(mean, trajectories, seed).start():
        turn = Turn(request.output_tokens, None, None, 0)
        name = str(request.number)
        tracker.observe(Trajectory(name, name, "", request.prompt_tokens, (turn,), None, 0, True))
    (nodes,) = a800_nodes(NODES).nodes
    options = training_layouts(load_model(MODEL), nodes, _recipe(trajectories), tracker.classes(_CLASSES)).options
    if not options:
        raise RuntimeError(f"no layout of {MODEL} fits on {nodes.devices} GPUs")
    best = min(options, key=lambda option: option.seconds)
    return {"seconds": best.seconds, "layout": f"{best.layout}, {best.devices} GPUs"}


def _batch(mean: int, trajectories: int, seed: int) -> Requests:
    return spread_requests(trajectories, mean * 3 // 4, mean * 5 // 4, seed)


def _recipe(trajectories: int) -> Recipe:
    return Recipe(batch=trajectories, samples_per_prompt=1, max_length=LONGEST)
