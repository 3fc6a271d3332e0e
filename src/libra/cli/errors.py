"""How commands end when they cannot do what they were asked.

Invariant: one line on standard error, and an exit status that says whose turn it is: 2 the input's, 3 nobody's.
"""

from __future__ import annotations

from typing import NoReturn

import typer


def bad_input(error: Exception) -> NoReturn:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    typer.echo(f"libra: {' '.join(text.split())}", err=True)
    raise typer.Exit(2) from None


def no_plan(error: Exception) -> NoReturn:
    typer.echo(f"libra: no plan exists: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(3) from None
