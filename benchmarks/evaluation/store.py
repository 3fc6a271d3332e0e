"""Results of cells, a file each.

Invariant: a file is found under the hash of everything that its result depends on, and is there whole or not at all;
one that is damaged counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Stored:
    """What a cell returned, and the CPU seconds that it took."""

    values: dict[str, Any]
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of results. Raises ValueError where it cannot be made."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self.folder}: {error.strerror}; results are kept there: set XDG_CACHE_HOME to a folder that can be"
                " written"
            ) from None

    def find(self, key: str) -> Stored | None:
        try:
            record = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or set(record) != {"cell", "content", "sum"}:
            return None
        content = record["content"]
        if record["sum"] != _sum(record["cell"], content) or record["cell"].get("key") != key:
            return None
        return Stored(content["values"], content["cpu_seconds"])

    def keep(self, key: str, cell: Mapping[str, Any], stored: Stored) -> None:
        """`cell` says, to who reads the file, whose result it is."""
        told = {"key": key, **cell}
        content = {"values": stored.values, "cpu_seconds": stored.cpu_seconds}
        record = {"cell": told, "content": content, "sum": _sum(told, content)}
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False, encoding="utf-8") as part:
            part.write(json.dumps(record, indent=1) + "\n")
        Path(part.name).replace(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def canonical(value: Any, what: str) -> str:
    """JSON with sorted keys: the same text for equal values. Raises ValueError that opens with `what` where there is
    none: NaN and infinity among them."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}; give numbers, strings, lists and dicts with strings as keys") from None


def _sum(cell: Any, content: Any) -> str:
    return hashlib.sha256(json.dumps([cell, content], sort_keys=True).encode()).hexdigest()
