"""Plan, from a training loop of your own: python examples/plan_in_a_loop.py"""

from pathlib import Path

import libra

HERE = Path(__file__).parent

cluster = libra.load_cluster(HERE / "cluster_48_a800.yaml")
recipe = libra.load_recipe(HERE / "request.yaml")
planner = libra.Planner(cluster, libra.load_model("Qwen/Qwen3-14B"), recipe)
tracker = planner.tracker()

plan = None
for trajectory in libra.read_trajectories(HERE / "trajectories.jsonl"):  # yours: as they finish
    tracker.observe(trajectory)
plan = planner.plan(tracker, current=plan)  # yours: every few steps
print(f"{plan.predicted.bottleneck}-bound, {plan.predicted.step:.1f} s a step, proven to {plan.proof.gap:.2%}")
for group in plan.placement:
    print(group.role, group.name, group.pool, group.nodes, group.gpus)
