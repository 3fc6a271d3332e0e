"""Every benchmark, what it shows and how long it takes: `python -m benchmarks --list`.

Invariant: the purpose of a benchmark is the first paragraph of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
TIMES = {  # roughly, on two cores of a server; in brackets what it needs besides
    "disaggregation": "minutes",
    "evaluation": "hours; finished cells are kept",
    "fidelity": "a minute a kind of schedule (extra `cpu`)",
    "gateway": "7 minutes (21,000 open files)",
    "gpu": "a quarter of an hour by estimate (a GPU of 80 GB; minutes with `--dry-run`)",
    "joins": "minutes (extra `cpu`)",
    "lending": "6 minutes (one H100 or H200; as long with `--cpu`)",
    "lending_rules": "minutes (recorded requests)",
    "models": "a minute",
    "plan_check": "half an hour (compiled core)",
    "planning": "minutes",
    "public": "a minute",
    "rendezvous": "a minute (extra `cpu`)",
    "rollout_price": "an hour",
    "routers": "an hour and a half (vllm-router)",
    "routing_plans": "minutes",
    "routing_speed": "minutes",
    "search": "an hour",
    "served_episodes": "a minute (extra `cpu`)",
    "simulation": "a quarter of an hour",
    "soak": "20 minutes (extra `cpu`)",
    "weights": "minutes (extra `cpu`)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--list", action="store_true", help="the default: all benchmarks, each with its command, purpose and time"
    )
    parser.parse_args(arguments)
    for name, takes in TIMES.items():
        print(f"python -m benchmarks.{name}\n    {shown(name)}\n    Takes {takes}.")
    return 0


def shown(name: str) -> str:
    """First paragraph of the docstring of a benchmark's module or package."""
    path = HERE.joinpath(*name.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
