"""Output of commands: the files that options name, and notes.

Invariant: an output file that cannot be written, or would overwrite an input or another output, is refused in one line
that names the file; if possible, before the work begins.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from libra.report.words import printable

STDOUT = Path("-")
_SIGN_OF_LIFE = 50_000  # trajectories, which take some seconds to read

T = TypeVar("T")


def check_writable(*outputs: Path | None, reads: Iterable[Path | None] = ()) -> None:
    """Raise ValueError if an output cannot be written, is one of `reads` or another output, or is `-` (standard
    output). Commands that can write to standard output handle `-` themselves.
    """
    taken = {
        os.path.realpath(path): f"{path}, which is an input" for path in reads if path is not None and path.is_file()
    }
    for path in outputs:
        if path is None:
            continue
        if path == STDOUT:
            raise ValueError("-: this output goes to a file only; give its name (./- for a file called -)")
        if path.is_dir():
            raise ValueError(f"{path}: is a directory; give a file to write to")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.parent}; make it, or give another file to write to")
        _try(path)
        real = os.path.realpath(path)
        if real in taken:
            raise ValueError(f"{path}: the same file as {taken[real]}; give another file to write to")
        if path.is_file() or not path.exists():  # /dev/null takes any number of outputs
            taken[real] = f"{path}, which is another output"


def _try(path: Path) -> None:
    """Raise ValueError if `path` cannot be written. The file stays unchanged."""
    with writing(path):
        if os.path.lexists(path):
            if not os.access(path, os.W_OK) and path.exists():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            path.unlink()


def reading(path: Path, items: Iterable[T], noun: str) -> Iterator[T]:
    """Yield the items; every `_SIGN_OF_LIFE` items, print the number read so far on standard error."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % _SIGN_OF_LIFE == 0:
            typer.echo(f"libra: {path}: {number:,} {noun} read", err=True)


def tell_notes(notes: Iterable[str], *, err: bool) -> None:
    """Print a line for each note. `err`: on standard error, so that standard output has only the answer."""
    for note in notes:
        typer.echo(f"note: {printable(note)}", err=err)


def tell_note(note: str) -> None:
    """Print one line on standard error at once."""
    tell_notes([note], err=True)


def told_before(note: str) -> None:
    """Ignore the notes of a log that is read again."""


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8. Raises ValueError if it cannot be written."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSError into ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give another file to write to") from None
