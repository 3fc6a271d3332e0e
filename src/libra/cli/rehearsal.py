"""`libra rehearse`: simulates a whole run of a plan, and compares its step with the planned step.

Both steps are seconds from one published version of the weights to the next, with the plan's batch, samples per prompt
and staleness.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import Exact, ResultAsJson, ResultFile, ResultPage, TraceFile, TruncateContext
from libra.cli.output import check_writable, tell_note, told_before, write_text, writing
from libra.config.input_file import read_input
from libra.config.rooms import offered

if TYPE_CHECKING:
    from libra.plan.plan import Plan
    from libra.sim.training_run.borrowed import BorrowedDevices
    from libra.sim.training_run.outcome import SimulatedRun
    from libra.trajectory import Trajectory


def rehearse(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json of `libra plan`, for a cluster.")],
    trajectories: Annotated[
        Path,
        typer.Option(
            "--trajectories", "-t", help="Log of trajectories; groups are drawn from its finished trajectories."
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of optimiser steps of the run.")] = 8,
    router: Annotated[
        str | None,
        typer.Option("--router", help="Routing policy (default: the plan's): a name, or path.py:Class."),
    ] = None,
    learn_from: Annotated[
        Path | None,
        typer.Option("--learn-from", help="Log from which the policy learns before the run (default: --trajectories)."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start with an untrained policy.")] = False,
    lender: Annotated[
        list[Path] | None,
        typer.Option(
            "--lender", help="File of a serving engine on borrowed devices, as for `libra lend check`; repeatable."
        ),
    ] = None,
    traffic: Annotated[
        list[Path] | None,
        typer.Option(
            "--traffic", help="File of the requests of a serving engine; one for each --lender, in the same order."
        ),
    ] = None,
    kv_quota: Annotated[
        bool,
        typer.Option(
            "--kv-quota",
            help="Divide KV memory of these devices between serving and rollout on demand, instead of the "
            "certified division.",
        ),
    ] = False,
    truncate_context: TruncateContext = False,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the draws, and of policies with random choices.")
    ] = 0,
    exact: Exact = False,
    output: ResultFile = None,
    report: ResultPage = None,
    timeline: TraceFile = None,
    as_json: ResultAsJson = False,
) -> None:
    """Simulate a whole run of a plan: rollout, training, publication, and the waits between them.

    Groups are drawn from the log prompt by prompt, engines follow vLLM's scheduler, and the policy routes turns. The
    first steps begin with idle engines, so they do not count for the comparison with the plan's step. With the log,
    router and seed of the plan, the run is one that `libra plan` simulated. The same inputs give the same output.

    Exit status: 0 done, 2 bad input, 130 interrupted.
    """
    # Imported here, so that `--help` need not load the simulator.
    from libra.cli.rehearsal_result import document, show

    if report is not None:
        require("report")
    try:
        files = (plan, trajectories, learn_from, *(lender or ()), *(traffic or ()))
        check_writable(output, report, timeline, reads=files)
        if cold and learn_from is not None:
            raise ValueError("--cold and --learn-from contradict each other: leave one out")
        rehearsed = _rehearsed(plan, trajectories, truncate_context)
        named = _router(rehearsed, router)
        watched = report is not None or timeline is not None
        tenancy = _tenancy(rehearsed.plan, lender or [], traffic or [], kv_quota, watched)
        outcome = _simulated(
            rehearsed,
            named,
            None if cold else learn_from or trajectories,
            told_before if learn_from is None else tell_note,
            steps,
            seed,
            exact,
            tenancy,
        )
        text = document(rehearsed.plan, outcome, named, seed)
        _write(rehearsed, outcome, text, steps, output, report, timeline)
    except (ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(text, nl=False)
    else:
        show(rehearsed.plan, outcome, named, len(rehearsed.log), seed)


@dataclass(frozen=True, slots=True)
class _Rehearsed:
    """A plan, and the log from which groups are drawn."""

    plan: Plan
    log: list[Trajectory]
    name: str
    log_name: str


def _rehearsed(file: Path, trajectories: Path, truncate: bool) -> _Rehearsed:
    from libra.plan.plan import parse_plan, require_answer
    from libra.trajectory import read_workload

    plan = parse_plan(read_input(file), where=str(file))
    request = plan.of_cluster
    require_answer(plan, request.menu().problem)
    log = list(read_workload(trajectories, request.longest_context, truncate, tell_note))
    return _Rehearsed(plan, log, file.name, trajectories.name)


def _router(rehearsed: _Rehearsed, router: str | None) -> str:
    """Name of the routing policy. Raises ValueError if a file of code is named only by the plan, which is not
    trusted.
    """
    from libra.route.catalogue import is_path

    planned = rehearsed.plan.of_cluster.recipe.router
    if router is None and is_path(planned):
        raise ValueError(f"the plan's router is {planned}: give it as --router {planned} to run that file")
    return planned if router is None else router


def _simulated(
    rehearsed: _Rehearsed,
    router: str,
    learned: Path | None,
    tell: Callable[[str], None],
    steps: int,
    seed: int,
    exact: bool,
    tenancy: BorrowedDevices | None,
) -> SimulatedRun:
    from libra.report.live import SimulationProgress
    from libra.route.custom import load_policy
    from libra.sim.of_plan import simulate_run
    from libra.trajectory import read_trajectories

    with SimulationProgress(sys.stderr) as progress:
        return simulate_run(
            rehearsed.plan,
            rehearsed.log,
            steps,
            load_policy(router, seed=seed),
            learned=() if learned is None else read_trajectories(learned, tell),
            seed=seed,
            exact=exact,
            tenancy=tenancy,
            tell=lambda done: progress.step(done, steps),
        )


def _write(
    rehearsed: _Rehearsed,
    outcome: SimulatedRun,
    text: str,
    steps: int,
    output: Path | None,
    report: Path | None,
    timeline: Path | None,
) -> None:
    if output is not None:
        write_text(output, text)
    if report is not None:
        from libra.report.training_run_page import training_run_page

        title = f"{rehearsed.name} on {rehearsed.log_name}, {steps} steps"
        write_text(report, training_run_page(outcome, rehearsed.plan.predicted.step, title))
    if timeline is not None:
        from libra.report.training_run_trace import write_training_trace

        with writing(timeline):
            write_training_trace(outcome, timeline)


def _tenancy(
    plan: Plan, lenders: Sequence[Path], traffic: Sequence[Path], kv_quota: bool, watched: bool
) -> BorrowedDevices | None:
    """Serving engines on the plan's borrowed devices; None without `--lender`."""
    if not lenders and not traffic:
        if kv_quota:
            raise ValueError("--kv-quota needs --lender: give --lender, or leave --kv-quota out")
        return None
    for described in offered("rehearsal tenancy"):
        tenancy: BorrowedDevices = described(plan, lenders, traffic, kv_quota, watched)
        return tenancy
    raise ValueError("--lender: lending is not part of this installation; leave it out")
