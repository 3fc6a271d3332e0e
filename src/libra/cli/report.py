"""`libra report`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import TokenFile, page_option
from libra.cli.output import check_writable, tell_notes, write_text


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, such as runs/calculator.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page to this file (default: RUN/report.html).")
    ] = None,
    page_port: Annotated[
        int | None,
        page_option("the page at this port of 127.0.0.1, and update it during the run"),
    ] = None,
    token_file: TokenFile = None,
) -> None:
    """Write the page of a run from its records. The run may have been killed, or still be running.

    With --page, a browser shows the page live, until Ctrl-C. With --token-file, the browser asks for the token as a
    password.

    Exit status: 0 done, 2 bad input.
    """
    require("report")
    if token_file is not None and page_port is None:
        bad_input(ValueError("--token-file protects the page of --page: give --page, or leave --token-file out"))
    if page_port is not None:
        require("http")
        from libra.serve.guard import read_token

        try:
            if output is not None:
                raise ValueError("--output writes a file, and --page serves the page: give one of them")
            asyncio.run(_serve(run, page_port, None if token_file is None else read_token(token_file)))
        except (ValueError, OSError) as error:
            bad_input(error)
        return
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
        tell_notes([f"process {process} is still running in {run}: the page shows the records so far"], err=True)
    typer.echo(f"report: {page}")


async def _serve(run: Path, port: int, token: str | None) -> None:
    from libra.config.listeners import METRICS
    from libra.serve.http import serve
    from libra.serve.run_page import run_page

    async with run_page(run) as application:
        announce = "page: {}/ (Ctrl-C ends it)"
        await serve(application, "127.0.0.1", port, lambda base: typer.echo(announce.format(base)), METRICS, token)
