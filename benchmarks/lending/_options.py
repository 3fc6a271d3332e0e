"""Options that benchmarks of recorded traffic share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def traffic_options(
    name: str, about: str | None, arguments: Sequence[str] | None, *, rate: float = 0.5, requests: int | None = None
) -> argparse.Namespace:
    """`traffic`, `rate` and `json` of benchmark `name`, and `requests` where it has a number of them; `about` is its
    docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.lending {name}", description=(about or "").splitlines()[0]
    )
    parser.add_argument("--traffic", type=Path, required=True, metavar="FILE", help="requests: .jsonl, or Azure's .csv")
    parser.add_argument("--rate", type=float, default=rate, help=f"times the rate of the trace (default: {rate:g})")
    if requests is not None:
        parser.add_argument("--requests", type=int, default=requests, help=f"that count (default: {requests})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    return parser.parse_args(arguments)
