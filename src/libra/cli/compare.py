"""`libra compare`: compares routing policies on the same work."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import TruncateContext
from libra.cli.output import check_writable, tell_note, told_before, write_text

if TYPE_CHECKING:
    from libra.choose.study import Subject


def compare(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY...", help="Two policies or more, each a name or path.py:Class.")
    ],
    *,
    on: Annotated[
        Path,
        typer.Option(
            "--on", metavar="WHAT", help="plan.json of `libra plan` (whole runs), or a YAML file of engines (rollouts)."
        ),
    ],
    trajectories: Annotated[
        Path, typer.Option("--trajectories", "--workload", "-t", help="Log of trajectories to draw from.")
    ],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of draws; each policy runs on all draws.")] = 5,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimiser steps to measure in a whole run (default: 4).")
    ] = None,
    learn_from: Annotated[
        Path | None,
        typer.Option("--learn-from", help="Log from which policies learn before the runs (default: --trajectories)."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start with untrained policies.")] = False,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Limit on trajectories in flight, for a file of engines.")
    ] = None,
    truncate_context: TruncateContext = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Number of simulation processes (default: one per core).")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write one line of CSV per run to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the comparison as an HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON on standard output.")] = False,
) -> None:
    """Compare routing policies in simulation: equal draws for all policies, differences with 95 % intervals.

    On a plan, whole runs are simulated, and the result is seconds per step. On a file of engines, rollouts of the log
    are simulated, and the results are makespan and mean time per trajectory. All policies are compared with the first.
    The same inputs give the same output.

    Exit status: 0 done, 2 bad input, 130 interrupted.
    """
    # Imported here, so that `--help` need not load the simulator.
    from libra.choose.study import compare_policies
    from libra.report.live import SimulationProgress
    from libra.report.study_table import as_csv, document, study_sentences, study_table

    if html is not None:
        require("report")
    try:
        check_writable(csv, html, reads=(on, trajectories, learn_from))
        if len(policies) < 2:
            raise ValueError("POLICY... names one policy; give two or more to compare")
        if cold and learn_from is not None:
            raise ValueError("--cold and --learn-from contradict each other: leave one out")
        subject = _subject(on, trajectories, learn_from, cold, steps, concurrency, truncate_context)
        processes = len(os.sched_getaffinity(0)) if jobs is None else jobs
        with SimulationProgress(sys.stderr) as shown:
            found = compare_policies(subject, policies, range(seeds), processes, shown.tell)
        if csv is not None:
            write_text(csv, as_csv(found))
        if html is not None:
            from libra.report.study_page import study_page

            write_text(html, study_page(found, f"{', '.join(policies)} on {on.name}"))
    except (ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(json.dumps(document(found), indent=1))
        return
    from rich.console import Console

    console = Console()
    for line in study_sentences(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(study_table(found))


def _subject(
    on: Path,
    trajectories: Path,
    learn_from: Path | None,
    cold: bool,
    steps: int | None,
    concurrency: int | None,
    truncate: bool,
) -> Subject:
    from libra.choose.study import Rollouts, WholeRuns
    from libra.config.input_file import read_input
    from libra.plan.plan import parse_plan, require_answer
    from libra.sim.engines_file import load_engines
    from libra.trajectory import read_trajectories, read_workload

    if on.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{on}: give a plan.json of `libra plan`, or a YAML file such as examples/engines.yaml")
    if on.suffix == ".json":
        if concurrency is not None:
            raise ValueError(
                "--concurrency is for a file of engines: with a plan, its staleness limits the trajectories in flight"
            )
        plan = parse_plan(read_input(on), where=str(on))
        require_answer(plan, plan.of_cluster.menu().problem)
        longest = plan.of_cluster.longest_context
    else:
        if steps is not None:
            raise ValueError("--steps is for a plan: a file of engines runs as many trajectories as the log has")
        deployment = load_engines(on, tell_note)
        longest = deployment.longest_context
    log = tuple(it for it in read_workload(trajectories, longest, truncate, tell_note) if it.finished)
    if not log:
        raise ValueError(f"{trajectories}: no trajectory is finished; give a log with at least one")
    learned = () if cold else log if learn_from is None else tuple(read_trajectories(learn_from, told_before))
    if learn_from is not None and not any(it.finished for it in learned):
        raise ValueError(
            f"{learn_from}: no trajectory is finished, so policies cannot learn: give another log, or --cold"
        )
    if on.suffix == ".json":
        return WholeRuns(plan, log, learned, 4 if steps is None else steps)
    return Rollouts(deployment, log, learned, concurrency)
