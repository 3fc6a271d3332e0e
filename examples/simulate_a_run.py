"""Compare routers over a whole post-training run: python examples/simulate_a_run.py"""

from functools import partial
from pathlib import Path

import libra
from libra.route.catalogue import policy_named

HERE = Path(__file__).parent

log = tuple(libra.read_trajectories(HERE / "trajectories.jsonl"))
model, cluster = libra.load_model("Qwen/Qwen3-14B"), libra.load_cluster(HERE / "cluster_48_a800.yaml")
recipe = libra.load_recipe(HERE / "request.yaml", {"batch": 64})
planner = libra.Planner(cluster, model, recipe)
tracker = planner.tracker()
for trajectory in log:
    tracker.observe(trajectory)
plan = planner.plan(tracker)
episodes = libra.Resampled(log, recipe.samples_per_prompt, recipe.max_length, seed=0)
for route in ("least-loaded", "cmlfq"):
    outcome = libra.simulate_posttraining(libra.System(route, plan, partial(policy_named, route)), episodes, steps=8)
    print(f"{route}: {outcome.step_seconds:.2f} s a step, {outcome.trainer_share:.0%} of the time training")
