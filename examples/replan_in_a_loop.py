"""Re-plan while training: python examples/replan_in_a_loop.py"""

from pathlib import Path

import libra

HERE = Path(__file__).parent

cluster = libra.load_cluster(HERE / "cluster_48_a800.yaml")
planner = libra.Planner(cluster, libra.load_model("Qwen/Qwen3-14B"), libra.load_recipe(HERE / "request.yaml"))
replanner = libra.Replanner(planner, period=5)

log = list(libra.read_trajectories(HERE / "trajectories.jsonl"))
for half in (log[::2], log[1::2]):  # yours: what has finished in the last five steps, and what still runs
    decision = replanner.step(finished=half, running=())
    print("change:" if decision.taken else "keep:", decision.reason)
    replanner.realised(seconds_per_step=2.0)  # yours: measured
