"""Damage to files, as a disk, an interrupted process or a stranger does it.

Invariant: the damage depends only on its three values, so a seed or a failed test reproduces the same files.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_VALUES = (
    *(b"0", b"-1", b"1", b"0.5", b"1e308", b"-1e308", b"1e-308", b".nan", b".inf", b"NaN", b"Infinity", b"null"),
    *(b"true", b'""', b"[]", b"{}", b'"\\ud800"', b"9" * 40, b"9" * 400, b"2147483648", b"9007199254740993"),
)


@dataclass(frozen=True)
class Damage:
    """One change of a file. `at` is the place, as a share of the file in [0, 1]. `byte` in [0, 255] picks a variant."""

    kind: str
    at: float
    byte: int

    def __call__(self, path: Path) -> None:
        if self.kind in _INSTEAD:
            path.unlink()
            _INSTEAD[self.kind](path, self.byte)
        else:
            path.write_bytes(self._damaged(path.read_bytes()))

    def _damaged(self, content: bytes) -> bytes:
        place, lines = int(self.at * len(content)), content.splitlines(keepends=True)
        line = int(self.at * len(lines))
        match self.kind:
            case "flip" if content:
                place = min(place, len(content) - 1)
                return content[:place] + bytes([content[place] ^ (1 << self.byte % 8)]) + content[place + 1 :]
            case "cut":
                return content[:place]
            case "insert":
                return content[:place] + bytes([self.byte]) * (1 + self.byte) + content[place:]
            case "zero":
                return content[:place] + bytes(len(content) - place)
            case "lines":  # one is gone
                return b"".join(lines[:line] + lines[line + 1 :])
            case "twice":
                return b"".join(lines + lines[:line])
            case "number":
                return content.replace(b"1", b"9" * (1 + 20 * self.byte))
            case "value":  # of one number
                return self._with_value(content)
        instead = {"nested": b"[" * 100_000, "no text": b"\xff\xfe\n" * (1 + self.byte), "empty": b""}
        return instead.get(self.kind, content)

    def _with_value(self, content: bytes) -> bytes:
        numbers = list(_NUMBER.finditer(content))
        if not numbers:
            return content
        found = numbers[min(int(self.at * len(numbers)), len(numbers) - 1)]
        return content[: found.start()] + _VALUES[self.byte % len(_VALUES)] + content[found.end() :]


_INSTEAD: dict[str, Callable[[Path, int], object]] = {
    "gone": lambda path, byte: None,
    "directory": lambda path, byte: path.mkdir(),
    "link": lambda path, byte: path.symlink_to("/etc/hostname" if byte % 2 else "nowhere"),
    "fifo": lambda path, byte: os.mkfifo(path),
}
KINDS = (
    *("flip", "cut", "insert", "zero", "lines", "twice", "number", "value", "nested", "no text", "empty"),
    *_INSTEAD,
)
STRANGE = ("checkpoint-999", "checkpoint-foo", "checkpoint-3.part", "episodes-foo.jsonl/", "episodes-00009.jsonl/")


def drawn(rng: random.Random, kinds: Sequence[str] = KINDS) -> Damage:
    return Damage(rng.choice(kinds), rng.random(), rng.randrange(256))


def damage_run(run: Path, damages: Sequence[tuple[float, Damage]], strange: str | None) -> None:
    """Damage files of a run directory, each at a share of their sorted list; `strange` is an empty directory to add."""
    for share, change in damages:
        files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        change(files[int(share * len(files))])
    if strange is not None:
        (run / strange).mkdir(exist_ok=True)
