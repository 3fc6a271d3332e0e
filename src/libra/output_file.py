"""Files that a command is asked to write.

Invariant: what cannot be written is refused before the work is done where that can be known, and in one line that names
the file.
"""

from __future__ import annotations

from pathlib import Path


def check_writable(*paths: Path | None) -> None:
    """Raises ValueError where a path has no directory to be in."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.parent}; make it, or give another file to write to")


def write_text(path: Path, text: str) -> None:
    """Raises ValueError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give another file to write to") from None
