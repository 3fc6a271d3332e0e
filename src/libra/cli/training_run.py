"""`libra simulate plan.json --steps N`: a whole run of a plan, and how its steps compare with the planned one.

What is compared is the same thing twice: seconds from one published version of the weights to the next, with the plan's
own batch, samples per prompt and staleness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from libra.cli.output import write_text, writing

if TYPE_CHECKING:
    from libra.plan.plan import Plan
    from libra.sim.training_run.outcome import SimulatedRun


def refuse_unfit(given: Mapping[str, object]) -> None:
    """Raise ValueError naming an option that was given and means nothing for a whole run."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} does not go with --steps, which simulates a run as the plan has it: leave it out")


def run_of_plan(
    what: Path,
    trajectories: Path | None,
    steps: int,
    *,
    route: str | None,
    learn_from: Path | None,
    truncate: bool,
    seed: int,
    exact: bool,
    output: Path | None,
    report: Path | None,
    timeline: Path | None,
    as_json: bool,
) -> None:
    """Simulate, print and write. Raises ValueError in words for whoever called the command, and OSError where a file
    cannot be read."""
    # Imported here: `--help` must not wait for what simulating needs.
    from libra.plan.options.cluster_request import ClusterRequest
    from libra.plan.plan import parse_plan, require_answer
    from libra.sim.deployment import DEFAULT_ROUTE
    from libra.sim.of_plan import simulate_run
    from libra.trajectory import read_trajectories, read_workload

    if trajectories is None:
        raise ValueError("a plan is simulated on trajectories: give --trajectories")
    plan = parse_plan(what.read_bytes(), where=str(what))
    if not isinstance(plan.request, ClusterRequest):
        raise ValueError(f"{what}: --steps is for the plan of a cluster, this one is of one machine: leave it out")
    require_answer(plan, plan.request.menu().problem)
    log = list(read_workload(trajectories, plan.request.recipe.max_length, truncate))
    learned = () if learn_from is None else read_trajectories(learn_from)
    named = DEFAULT_ROUTE if route is None else route
    outcome = simulate_run(plan, log, steps, named, learned=learned, seed=seed, exact=exact)
    text = _document(plan, outcome, named, seed)
    if output is not None:
        write_text(output, text)
    if report is not None:
        from libra.report.training_run_page import training_run_page

        title = f"{what.name} on {trajectories.name}, {steps} steps"
        write_text(report, training_run_page(outcome, plan.predicted.step, title))
    if timeline is not None:
        from libra.report.training_run_trace import write_training_trace

        with writing(timeline):
            write_training_trace(outcome, timeline)
    if as_json:
        typer.echo(text, nl=False)
    else:
        _show(plan, outcome, len(log), seed)


def _document(plan: Plan, outcome: SimulatedRun, route: str, seed: int) -> str:
    planned, simulated = plan.predicted.step, outcome.step_seconds
    found = {
        "format": 1,
        "run": {"route": route, "steps": len(outcome.steps), "seed": seed},
        "plan": {"predicted_step": planned, "simulated_step": simulated, "difference": simulated / planned - 1},
        "seconds": outcome.seconds,
        "throughput": outcome.throughput,
        "trainer_share": outcome.trainer_share,
        "engine_share": outcome.engine_share,
        "placements": outcome.placements,
        "migrations": outcome.migrations,
        "preemptions": outcome.preemptions,
        "steps": [asdict(step) for step in outcome.steps],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _show(plan: Plan, outcome: SimulatedRun, log: int, seed: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from libra.cli.simulation_input import LENT
    from libra.plan.options.cluster_request import ClusterRequest
    from libra.report.words import duration, percent, plural, signed_percent

    assert isinstance(plan.request, ClusterRequest)
    recipe, planned, simulated = plan.request.recipe, plan.predicted.step, outcome.step_seconds
    console = Console()
    for line in (
        f"Whole run of {plural(len(outcome.steps), 'step')}: the plan says {duration(planned)} a step; simulated"
        f" {duration(simulated)}, {signed_percent(simulated / planned - 1, 1)}. Both are the time from one published"
        " version to the next; the simulated mean contains the first step, which begins with idle engines.",
        f"Each step trains on {recipe.prompts} prompts of {plural(recipe.samples_per_prompt, 'sample')}, at most"
        f" {plural(recipe.staleness, 'version')} stale, drawn from {log:,} trajectories (seed {seed}).",
        f"Training computes {percent(outcome.trainer_share, 0)} of the time; engines have work"
        f" {percent(outcome.engine_share, 0)} of theirs.",
        *([f"{LENT.capitalize()}."] if plan.loans else ()),
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
