"""`libra trace`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from libra.cli.errors import bad_input
from libra.cli.log_import import import_log
from libra.cli.output import tell_note
from libra.trajectory import TrajectoryFormatError, read_trajectories

app = typer.Typer(
    help="Show statistics of logs of trajectories, and import logs of other frameworks.", no_args_is_help=True
)
app.command("import")(import_log)


@app.callback()
def trace() -> None:
    """Show statistics of logs of trajectories, and import logs of other frameworks."""


@app.command()
def stats(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A log of trajectories, in Libra's format or another known format.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON on standard output.")] = False,
) -> None:
    """Show turns, lengths, tools, outcomes, and the share of tokens in the longest 10 % of trajectories.

    Exit status: 0 done, 2 the file cannot be read (the message names file, line and field).
    """
    from libra.report.tables import trace_tables
    from libra.trajectory.statistics import trace_stats

    try:
        found = trace_stats(read_trajectories(file, tell_note))
    except (TrajectoryFormatError, ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    console = Console()
    for table in trace_tables(found):
        console.print(table)


@app.command()
def formats() -> None:
    """List the log formats that Libra reads in addition to its own."""
    from libra.report.tables import format_table
    from libra.trajectory.logs.catalogue import FORMATS

    Console().print(format_table(FORMATS.values()))
