"""The result of `libra rehearse`, as JSON and for a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from libra.choose.rehearsal import unsettled_steps
from libra.cli.simulation_input import LENT
from libra.config.rooms import offered
from libra.plan.plan import Plan
from libra.report.words import duration, percent, plural, signed_percent
from libra.sim.training_run.outcome import SimulatedRun


def document(plan: Plan, outcome: SimulatedRun, route: str, seed: int) -> str:
    planned, simulated = plan.predicted.step, outcome.settled_step_seconds(unsettled_steps(plan.request.staleness))
    found = {
        "format": 1,
        "run": {"route": route, "steps": len(outcome.steps), "seed": seed},
        "plan": {
            "predicted_step": planned,
            "simulated_step": simulated,
            "difference": simulated / planned - 1,
            "whole_mean": outcome.step_seconds,
        },
        "seconds": outcome.seconds,
        "throughput": outcome.throughput,
        "trainer_share": outcome.trainer_share,
        "engine_share": outcome.engine_share,
        "placements": outcome.placements,
        "migrations": outcome.migrations,
        "preemptions": outcome.preemptions,
        "interrupted": outcome.interrupted,
        "moved_tokens": outcome.moved_tokens,
        "lenders": [it.document(outcome.seconds) for it in outcome.lenders],
        "steps": [asdict(step) for step in outcome.steps],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def show(plan: Plan, outcome: SimulatedRun, route: str, log: int, seed: int) -> None:
    recipe, planned, left_out = plan.of_cluster.recipe, plan.predicted.step, unsettled_steps(plan.request.staleness)
    simulated = outcome.settled_step_seconds(left_out)
    settled = ""
    if 0 < left_out < len(outcome.steps):
        settled = f", without the first {left_out} steps: with them it is {duration(outcome.step_seconds)}"
    seen = "" if plan.simulated is None else f", and {duration(plan.simulated.seconds)} when it was chosen"
    console = Console()
    for line in (
        f"Whole run of {plural(len(outcome.steps), 'step')}: a step takes {duration(simulated)}; predicted"
        f" {duration(planned)}{seen}: {signed_percent(simulated / planned - 1, 1)}. That is the time from one published"
        f" version to the next{settled}.",
        f"Each step trains on {recipe.prompts} prompts of {plural(recipe.samples_per_prompt, 'sample')}, at most"
        f" {plural(recipe.staleness, 'version')} stale, drawn from {log:,} trajectories (seed {seed}). {route} routes"
        " their turns.",
        f"Training computes {percent(outcome.trainer_share, 0)} of the time; engines have work"
        f" {percent(outcome.engine_share, 0)} of theirs.",
        *([f"{LENT.capitalize()}."] if plan.loans and not outcome.lenders else ()),
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    table = Table("step", "waited", "training", "ended at", "longest context", "mean staleness")
    for step in outcome.steps:
        table.add_row(
            str(step.version),
            duration(step.waited),
            duration(step.training),
            duration(step.ended),
            f"{step.longest_context:,}",
            f"{step.staleness:.2f}",
        )
    console.print(table)
    if outcome.lenders:
        for shown in offered("rehearsal tables"):
            shown(outcome, console)
