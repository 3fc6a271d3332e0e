"""`libra examples`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

import libra
from libra.cli.errors import bad_input


def examples(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create and write to.")] = Path(
        "examples"
    ),
) -> None:
    """Write the examples of the documentation: clusters, requests, logs, engine files, runs and scripts.

    Existing files are never overwritten. Exit status: 0 done, 2 bad input.
    """
    try:
        shipped = sorted(it for it in _shipped().iterdir() if it.is_file())
        taken = [it.name for it in shipped if (directory / it.name).exists()]
        if taken:
            raise ValueError(f"{directory / taken[0]}: exists already; give another directory, or remove it")
        directory.mkdir(parents=True, exist_ok=True)
        for file in shipped:
            shutil.copyfile(file, directory / file.name)
    except (ValueError, OSError) as error:
        bad_input(error)
    typer.echo(f"examples: {len(shipped)} files in {directory}")


def _shipped() -> Path:
    """Directory of the examples: in the installed package, or next to `src` in a checkout."""
    package = Path(libra.__file__).parent
    inside = package / "examples"
    return inside if inside.is_dir() else package.parents[1] / "examples"
