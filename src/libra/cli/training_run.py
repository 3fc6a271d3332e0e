"""`libra simulate plan.json --steps N`: a whole run of a plan, and how its steps compare with the planned one.

What is compared is the same thing twice: seconds from one published version of the weights to the next, with the plan's
own batch, samples per prompt and staleness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from libra.cli.output import tell_notes, write_text, writing

if TYPE_CHECKING:
    from rich.table import Table

    from libra.plan.plan import Plan
    from libra.sim.training_run.outcome import LenderOutcome, SimulatedRun
    from libra.sim.training_run.tenancy import Tenancy


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
    lenders: Sequence[Path],
    traffic: Sequence[Path],
    kv_quota: bool,
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
    tenancy = _tenancy(plan, lenders, traffic, kv_quota)
    if tenancy is not None and (report is not None or timeline is not None):
        tenancy = replace(tenancy, watched=True)
    outcome = simulate_run(plan, log, steps, named, learned=learned, seed=seed, exact=exact, tenancy=tenancy)
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
        "interrupted": outcome.interrupted,
        "moved_tokens": outcome.moved_tokens,
        "lenders": [_lender(it, outcome.seconds) for it in outcome.lenders],
        "steps": [asdict(step) for step in outcome.steps],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _lender(it: LenderOutcome, seconds: float) -> dict[str, object]:
    """Requests are told by their numbers, times are seconds."""
    return {
        "name": it.name,
        "lent": it.lent / seconds,
        "away": it.away / seconds,
        "recalls": it.recalls,
        "requests": it.requests,
        "ttft": it.ttft,
        "tpot": it.tpot,
        "due_margin": it.margin,
        "missed": sorted(it.missed.any),
        "attributable": sorted(it.attributable),
        "inside_envelope": sorted(it.attributable - it.uncovered),
    }


def _tenancy(plan: Plan, lenders: Sequence[Path], traffic: Sequence[Path], kv_quota: bool) -> Tenancy | None:
    """What serves on the devices that the plan borrows; None where nothing is said of it."""
    from libra.cli.lenders import read_traffic
    from libra.lend.recall import RecallPolicy
    from libra.plan.options.cluster_request import ClusterRequest
    from libra.sim.engines_file import load_lender
    from libra.sim.training_run.tenancy import TenantEngine, tenancy_of

    if not lenders and not traffic:
        if kv_quota:
            raise ValueError("--kv-quota is of the engines that --lender describes: give it, or leave the quota out")
        return None
    if len(lenders) != len(traffic):
        raise ValueError(f"--lender is given {len(lenders)} times and --traffic {len(traffic)}: give one of each")
    if not plan.loans:
        raise ValueError("--lender is for a plan that borrows, and this one has no loans: leave it out")
    assert isinstance(plan.request, ClusterRequest)
    engines = []
    for file, log in zip(lenders, traffic, strict=True):
        spec, model, hardware = load_lender(file, lambda note: tell_notes([note], err=True))
        engines.append(TenantEngine(spec, model.name, hardware, log.name, read_traffic(log), model.parameters))
    serving = {}
    for lender in plan.request.lenders:
        wanted = lender.certificates[0]
        found = [it for it in engines if (it.model, it.hardware) == (wanted.model, wanted.hardware)]
        if len(found) == 1:
            serving[lender.pool] = found[0]
        elif any(loan.pool == lender.pool for loan in plan.loans):
            raise ValueError(
                f"--lender: {len(found)} files are of {wanted.model} on {wanted.hardware}, which serves on"
                f" {lender.pool}: give one"
            )
    return tenancy_of(plan, serving, RecallPolicy(), quota=kv_quota)


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
        console.print(
            "Devices that serve: the shares of their time that were lent and recalled, what users saw, how long before"
            " it was due the closest token came, and misses: by lending, and of these those inside the envelope.",
            soft_wrap=True,
        )
        console.print(_lenders_table(outcome))


def _lenders_table(outcome: SimulatedRun) -> Table:
    """A row a device that serves."""
    from rich.table import Table

    from libra.report.words import percent

    table = Table()
    table.add_column("device", no_wrap=True)
    for name in (
        "lent",
        "away",
        "TTFT P99, ms",
        "TPOT P99, ms",
        "margin, ms",
        "requests",
        "missed",
        "by lending",
        "inside",
    ):
        table.add_column(name, justify="right")
    for it in outcome.lenders:
        table.add_row(
            it.name,
            percent(it.lent / outcome.seconds, 0),
            percent(it.away / outcome.seconds, 1),
            f"{1e3 * it.ttft:.0f}",
            f"{1e3 * it.tpot:.0f}",
            "" if it.margin is None else f"{1e3 * it.margin:+.1f}",
            f"{it.requests:,}",
            f"{len(it.missed.any)}",
            f"{len(it.attributable)}",
            f"{len(it.attributable - it.uncovered)}",
        )
    return table
