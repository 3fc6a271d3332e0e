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
from benchmarks.soak.attack.sessions import attack_sessions
from benchmarks.soak.attack.strangers import attack_as_stranger

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    sessions: int
    seconds: float  # of sessions
    files: int
    listener_seconds: float  # of each


FULL, QUICK = Size(2_000, 60.0, 5_000, 20.0), Size(200, 10.0, 300, 8.0)

ATTACKS: dict[str, Callable[[Path, Size, int, Say], Iterator[Row]]] = {
    "sessions": lambda folder, size, seed, say: attack_sessions(folder, size.sessions, size.seconds, say, seed),
    "files": lambda folder, size, seed, say: read_mutated(folder, size.files, say, seed),
    "listeners": lambda folder, size, seed, say: attack_listeners(folder, size.listener_seconds, say),
    "strangers": lambda folder, size, seed, say: attack_as_stranger(say),
}


def attack(names: Sequence[str], size: Size, seed: int, say: Say) -> Iterator[Row]:
    """Rows of these attacks, as they come."""
    with tempfile.TemporaryDirectory(prefix="libra-attack-") as directory:
        for name in names:
            say(f"attack: {name}")
            folder = Path(directory) / name
            folder.mkdir()
            try:
                yield from ATTACKS[name](folder, size, seed, say)
            except (RuntimeError, OSError) as error:
                yield never(name, "attacks that broke off", [str(error)], "one")
