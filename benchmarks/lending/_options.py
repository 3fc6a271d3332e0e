"""Options that benchmarks of recorded traffic share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def traffic_options(name: str, about: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """`traffic`, `rate` and `json` of benchmark `name`; `about` is its docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.lending {name}", description=(about or "").splitlines()[0]
    )
    parser.add_argument("--traffic", type=Path, required=True, metavar="FILE", help="requests: .jsonl, or Azure's .csv")
    parser.add_argument("--rate", type=float, default=0.5, help="times the rate of the trace (default: 0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    return parser.parse_args(arguments)
