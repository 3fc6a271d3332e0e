"""Errors that end a command.

Invariant: a command prints one line on standard error, and exits with status 2 for bad input, or 3 if no answer exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import typer

from libra.config.extras import install_command, missing_library
from libra.report.words import printable


def bad_input(error: Exception) -> NoReturn:
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    typer.echo(f"libra: {printable(' '.join(text.split()))}", err=True)
    raise typer.Exit(2) from None


def of_option(error: Exception, options: Iterable[str]) -> Exception:
    """The error with its first word, a parameter's name, replaced by the name of the option."""
    for option in options:
        parameter = "start_seconds" if option == "--start" else option.removeprefix("--").replace("-", "_")
        if str(error).startswith(f"{parameter} is "):
            return ValueError(f"{option}{str(error).removeprefix(parameter)}")
    return error


def infeasible(error: Exception, what: str = "no plan exists") -> NoReturn:
    typer.echo(f"libra: {what}: {printable(' '.join(str(error).split()))}", err=True)
    raise typer.Exit(3) from None


def require(extra: str) -> None:
    """End the command if a library of this extra is not installed; call this before any work."""
    if (library := missing_library(extra)) is not None:
        bad_input(ValueError(f"{library} is not installed: {install_command(extra)}"))
