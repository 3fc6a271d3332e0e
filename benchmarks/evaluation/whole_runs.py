"""Cells of whole runs: one system in one setting.

Invariant: all systems of a setting get the same trajectories.
"""

from __future__ import annotations

from typing import Any

from benchmarks.evaluation import baselines
from benchmarks.evaluation.baselines import Choice
from benchmarks.evaluation.choices import chosen, kept_ours
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.systems import ORACLE_BUCKETS, made, oracle
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import System


def run(
    setting: dict[str, Any], system: str, parts: dict[str, Any] | None = None, choice: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Outcome of the run. `parts` are those of ours, for an ablation; the plan that ours begins with is kept or chosen.
    `choice` is that of a baseline, and kept or searched for where it is not given. Raises ValueError where either is
    given to another system."""
    where = Setting(**setting)
    if parts is not None and system != "ours":
        raise ValueError(f"system {system} has no parts; give them to ours")
    if system == "ours" and choice is None:
        what, episodes = kept_ours(where, parts), where.episodes
    elif choice is None and system == "oracle":
        return _oracle(where)
    elif choice is None and system in baselines.NAMES:
        what, episodes = made(where, system, chosen(where, system))
    else:
        what, episodes = made(where, system, None if choice is None else Choice(**choice))
    return told(what, simulate_posttraining(what, episodes, where.steps))


def _oracle(setting: Setting) -> dict[str, Any]:
    """The best of what an oracle could do here, which it knows, too."""
    found = []
    for most_buckets in ORACLE_BUCKETS:
        what, episodes = oracle(setting, most_buckets)
        found.append(told(what, simulate_posttraining(what, episodes, setting.steps)))
    return max(found, key=lambda values: float(values["throughput"]))


def told(system: System, outcome: SimulatedRun) -> dict[str, Any]:
    """JSON values of a run: the sums, the plan that it began with, and columns of the steps."""
    steps = outcome.steps
    return {
        "throughput": outcome.throughput,
        "seconds": outcome.seconds,
        "generated": outcome.generated_tokens,
        "trainer_share": outcome.trainer_share,
        "engine_share": outcome.engine_share,
        "migrated_share": outcome.migrated_share,
        "interrupted": outcome.interrupted,
        "changes": len(outcome.changes),
        "worst_staleness": max(step.worst_staleness for step in steps),
        "plan": _words(system),
        "ended": [step.ended for step in steps],
        "waited": [step.waited for step in steps],
        "training": [step.training for step in steps],
        "tokens": [step.generated_tokens for step in steps],
        "contexts": [step.final_context_tokens for step in steps],
        "staleness": [step.staleness for step in steps],
        "training_devices": [step.training_devices for step in steps],
    }


def _words(system: System) -> str:
    plan = system.plan
    engines = " + ".join(
        f"{bucket.engines} {bucket.shape.rpartition('/')[2]} to {bucket.up_to}" for bucket in plan.allocation.buckets
    )
    assert plan.layout is not None
    most = system.request.recipe.concurrency
    limit = "" if most is None else f"; {most} trajectories at once"
    return f"{plan.layout.devices} train ({plan.layout.family}); {engines}{limit}"
