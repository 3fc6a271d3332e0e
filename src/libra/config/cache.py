"""Where what was measured or read once is kept between runs.

Invariant: everything there can be made again; deleting it costs time and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/libra`, or `~/.cache/libra`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libra"
