"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

TruncateContext = Annotated[
    bool, typer.Option("--truncate-context", help="Cut trajectories at the longest context instead of refusing them.")
]
Exact = Annotated[bool, typer.Option("--exact", help="Simulate every iteration separately: same results, but slower.")]
ResultFile = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON to this file.")]
ResultPage = Annotated[Path | None, typer.Option("--report", help="Write the result as an HTML page to this file.")]
TraceFile = Annotated[Path | None, typer.Option("--timeline", help="Write a trace for ui.perfetto.dev to this file.")]
ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the bearer token that clients must send.")
]


def page_option(served: str) -> Any:
    """Option `--page`, the port of a page for a browser; `served` describes the page."""
    return typer.Option("--page", metavar="PORT", min=0, max=65535, help=f"Serve {served}; 0: any free port.")
