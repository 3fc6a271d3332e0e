"""`libra search`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, infeasible, of_option, require
from libra.cli.output import check_writable, tell_notes, write_text
from libra.report.words import printable

if TYPE_CHECKING:
    from libra.serving.answer import SizingAnswer
    from libra.serving.menu import ServingMenu
    from libra.serving.question import SizingQuestion


def search(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="YAML file of a cluster: GPUs, counts, links.")],
    model: Annotated[str, typer.Option("--model", help="config.json, its directory, or a known name.")],
    requests: Annotated[
        Path,
        typer.Option(
            "--requests", help="Requests of users: a .jsonl file, or a log in another format, such as Azure's traces."
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(
            "--slo",
            metavar="LIMITS",
            help="Latency limits, such as ttft_p99=1s,tpot_p99=50ms: ttft, tpot or latency, with mean, p50, p90, "
            "p95 or p99.",
        ),
    ],
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests/s to serve (default: search for the highest rates)."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", help="Maximum number of GPUs of a deployment (default: all GPUs of the cluster)."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Maximum cost of a deployment per hour, at the menu's prices.")
    ] = None,
    menu: Annotated[
        Path | None,
        typer.Option("--menu", help="YAML file with the settings to try and the prices (see docs/search.md)."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option("--profile", help="Source of engine times: auto, tables, roofline, or a calibration file."),
    ] = "auto",
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Source of CPU times of the engine's host: none, default, fast, or a file of fitted times."
        ),
    ] = "default",
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Combine engine sizes and GPU types to serve --rate: a solver chooses the counts, and a "
            "simulation checks them.",
        ),
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes (default: one for each core).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the answer as JSON to this file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the answer as an HTML page to this file.")
    ] = None,
    engines_out: Annotated[
        Path | None,
        typer.Option(
            "--engines-out",
            metavar="DIR",
            help="Write an engines file for each point of the answer into this directory.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output.")] = False,
) -> None:
    """Find the engines that serve requests within latency limits, with the most requests/s per GPU or the lowest cost.

    The menu has colocated engines, and separate prefill and decode engines, on every GPU type and in every parallelism
    of the cluster. A bound excludes candidates that miss the limits even without a queue. The other candidates are
    simulated with the requests and with draws of the requests. The answer is the Pareto set of goodput per GPU (or
    cost) against TTFT and TPOT. It has the bottleneck of each point, and the reason why each other candidate is not in
    the set. It says which results are proven and which are only simulated. The same inputs give the same bytes.

    Exit status: 0 a candidate serves, 2 bad input, 3 no candidate serves or the requests are too few for a rate, 130
    interrupted.
    """
    # Imported here so that `--help` does not load the simulator.
    from libra.plan.problem import InfeasiblePlanError
    from libra.serving.menu import DEFAULT, ServingMenu, load_menu
    from libra.serving.point_file import write_engines
    from libra.serving.search import question_of

    notes: list[str] = []
    if report is not None:
        require("report")
    try:
        check_writable(output, report, reads=(cluster, requests, menu))
        _check_outputs(plan, report, engines_out)
        file = DEFAULT if menu is None else load_menu(menu)
        question = question_of(
            cluster,
            model,
            requests,
            slo,
            rate=rate,
            gpus=gpus,
            budget=budget,
            menu=file,
            profile=profile,
            host=host,
            note=notes.append,
        )
        processes = len(os.sched_getaffinity(0)) if jobs is None else jobs
        if plan:
            _mix(question, ServingMenu(file), processes, output, as_json, notes)
            return
        found = _found(question, ServingMenu(file), processes)
        text = json.dumps(found.document(), indent=1, allow_nan=False) + "\n"
        if output is not None:
            write_text(output, text)
        files = write_engines(found, engines_out) if engines_out is not None and found.told else ()
        if report is not None:
            from libra.serving.search_page import search_page

            write_text(report, search_page(found, f"Serving {found.question.model.name}", files))
    except InfeasiblePlanError as error:
        infeasible(error, "nothing found")
    except (ValueError, OSError) as error:
        bad_input(of_option(error, ("--rate", "--gpus", "--budget")))
    if found.told and (caution := found.caution()) is not None:
        tell_notes([caution], err=as_json)  # above the figures that the caution is about
    if as_json:
        typer.echo(text, nl=False)
    else:
        _print(found, files)
    tell_notes(notes, err=as_json)
    if found.points and not found.told:
        infeasible(ValueError(found.caution()), "no rate can be given")
    if not found.points:
        infeasible(ValueError(f"{found.claim()}; {_remedy(found)}"), "nothing found")


def _check_outputs(plan: bool, report: Path | None, engines_out: Path | None) -> None:
    """Raise ValueError for an output option that does not apply."""
    from libra.serving.point_file import check_engines_directory

    if plan and report is not None:
        raise ValueError("--report does not apply to --plan; leave it out")
    if plan and engines_out is not None:
        raise ValueError(
            "--engines-out does not apply to --plan, since an engines file cannot route requests to engines by class;"
            " leave it out"
        )
    if engines_out is not None:
        check_engines_directory(engines_out)


def _found(question: SizingQuestion, menu: ServingMenu, jobs: int) -> SizingAnswer:
    from libra.report.live import SimulationProgress
    from libra.report.words import plural
    from libra.serving.found import Progress
    from libra.serving.search import answer

    with SimulationProgress(sys.stderr) as shown:

        def tell(moment: Progress) -> None:
            if not moment.tried:
                shown.begin(estimated=True)
            best = "" if moment.best is None else f"; best: {moment.best.candidate}"
            done = f"{moment.out:,} out, {moment.simulated:,} simulated of {plural(moment.candidates, 'candidate')}"
            shown.tell(done + shown.left(moment.tried, moment.tried + moment.due) + best)

        return answer(question, menu, jobs=jobs, progress=tell)


def _print(found: SizingAnswer, files: Sequence[Path]) -> None:
    from rich.console import Console

    from libra.serving.search_table import counts, files_line, headline, search_tables

    console = Console()
    for line in (headline(found), counts(found)):
        console.print(printable(line), highlight=False, soft_wrap=True, markup=False)
    for table in search_tables(found, files):
        console.print(table)
    if files:
        console.print(files_line(found, files), highlight=False, soft_wrap=True, markup=False)


def _mix(
    question: SizingQuestion, menu: ServingMenu, jobs: int, output: Path | None, as_json: bool, notes: list[str]
) -> None:
    from libra.report.live import SimulationProgress
    from libra.serving.mix import NoMixError, plan_mix
    from libra.serving.search_table import mix_lines

    try:
        with SimulationProgress(sys.stderr) as shown:

            def tell(words: str, done: int, total: int) -> None:
                if not done:
                    shown.begin(uneven=True)
                shown.tell(words + shown.left(done, total))

            found = plan_mix(question, menu, jobs=jobs, note=notes.append, tell=tell)
    except NoMixError as error:
        infeasible(error, "nothing found")
    text = json.dumps(found.document(), indent=1, allow_nan=False) + "\n"
    if output is not None:
        write_text(output, text)
    if as_json:
        typer.echo(text, nl=False)
    else:
        for line in mix_lines(found):
            typer.echo(printable(line))
    tell_notes(notes, err=as_json)


def _remedy(found: SizingAnswer) -> str:
    if not any(it.bound for it in found.rejected):  # at no rate
        first = found.rejected[0]
        return f"{first.candidate}: {first.reason}; add larger engines, or raise a limit"
    return "raise a limit or gpus" if found.question.rate is None else "lower --rate, or raise a limit or gpus"
