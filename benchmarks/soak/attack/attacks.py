"""All attacks in one order, at two sizes.

Invariant: an attack that breaks off is a failed row; the others run all the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, never
from benchmarks.soak.attack.listeners import attack_listeners
from benchmarks.soak.attack.readers import read_mutated
from benchmarks.soak.attack.run_directories import NAME, make_run, resume_damaged
from benchmarks.soak.attack.sessions import attack_sessions
from benchmarks.soak.attack.strangers import attack_as_stranger

ATTACKS = ("sessions", "files", "runs", "listeners", "strangers")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    sessions: int
    seconds: float  # of sessions
    files: int
    runs: int
    listener_seconds: float  # of each


FULL, QUICK = Size(2_000, 60.0, 5_000, 1_500, 20.0), Size(200, 10.0, 300, 60, 8.0)


def attack(names: Sequence[str], size: Size, seed: int, say: Say) -> Iterator[Row]:
    """Rows of these attacks, as they come."""
    with tempfile.TemporaryDirectory(prefix="libra-attack-") as directory:
        whole = Path(directory) / "run"
        if {"files", "runs"} & {*names}:
            whole.mkdir()
            say("a small run, whose files are to be damaged")
            make_run(whole)
        for name in names:
            say(f"attack: {name}")
            folder = Path(directory) / name
            folder.mkdir()
            try:
                yield from _attack(name, size, folder, whole, seed, say)
            except (RuntimeError, OSError) as error:
                yield never(name, "attacks that broke off", [str(error)], "one")


def _attack(name: str, size: Size, folder: Path, whole: Path, seed: int, say: Say) -> Iterator[Row]:
    match name:
        case "sessions":
            yield from attack_sessions(folder, size.sessions, size.seconds, say, seed)
        case "files":
            yield from read_mutated(folder, whole / "runs" / NAME, size.files, say, seed)
        case "runs":
            yield from resume_damaged(whole, size.runs, say, seed)
        case "listeners":
            yield from attack_listeners(folder, size.listener_seconds, say)
        case "strangers":
            yield from attack_as_stranger(say)
