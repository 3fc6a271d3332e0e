"""The directory that keeps measurements and parsed inputs between runs.

Invariant: each file in the directory can be made again; deleting one only costs time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def cache_directory() -> Path:
    """The directory of cached files: `$XDG_CACHE_HOME/libra`, or `~/.cache/libra`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libra"


def cache_key(parts: Mapping[str, Any] | Sequence[Any]) -> str:
    """A name for data that depends only on `parts`, which must be serialisable as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
