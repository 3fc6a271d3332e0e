"""`libra report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.output import check_writable, tell_notes, write_text


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory that `libra run` wrote to, for example runs/calculator.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page to this file (default: RUN/report.html).")
    ] = None,
) -> None:
    """Make the page of a run from its records, also of a run that was killed or is still running.

    Exit status: 0 done, 2 bad input.
    """
    require("report")
    from libra.records.run_lock import running_process
    from libra.report.run_page import render_report

    page = run / "report.html" if output is None else output
    try:
        if run.is_dir():
            check_writable(page)
        text = render_report(run)
        write_text(page, text)
    except (ValueError, OSError) as error:
        bad_input(error)
    if (process := running_process(run)) is not None:
        tell_notes([f"process {process} is running in {run}: the page has what it recorded so far"], err=True)
    typer.echo(f"report: {page}")
