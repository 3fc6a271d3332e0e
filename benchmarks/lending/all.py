"""Every benchmark of lending and of weights, one after the other, and all of their rows in one file.

    python -m benchmarks.lending all [--traffic FILE] [--quick] [--json FILE]

Each runs as a process of its own. A failure is reported and left out, and the status is 1, as where a goal was missed.
Without recorded traffic, benchmarks that replay it are left out, which is reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rows import Row, report

_SECONDS = 3600.0  # that one of them may take


@dataclass(frozen=True, slots=True)
class Benchmark:
    module: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None  # arguments of a first look; None: it has none that is short
    traffic: bool = False  # it replays recorded traffic

    @property
    def name(self) -> str:
        return " ".join((self.module.removeprefix("benchmarks."), *self.arguments[:1]))


BENCHMARKS = (
    Benchmark("benchmarks.lending", ("token",)),
    Benchmark("benchmarks.lending", ("memory",), ()),
    Benchmark("benchmarks.lending", ("pair",), traffic=True),
    Benchmark("benchmarks.lending", ("rules",), traffic=True),
    Benchmark("benchmarks.lending", ("fidelity",), traffic=True),
    Benchmark("benchmarks.lending", ("hour",), (), traffic=True),
    Benchmark("benchmarks.lending", ("plan",), ()),
    Benchmark("benchmarks.lending", ("run",)),
    Benchmark("benchmarks.weights"),
    Benchmark("benchmarks.weights", ("link",)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lending all", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--traffic", type=Path, metavar="FILE", help="requests: .jsonl, or Azure's .csv")
    parser.add_argument("--quick", action="store_true", help="a first look, at those that are short")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    rows, failed = list[Row](), list[str]()
    for it in BENCHMARKS:
        if options.quick and it.quick is None:
            continue
        if it.traffic and options.traffic is None:
            print(f"{it.name}: left out: it replays recorded traffic; give --traffic FILE", file=sys.stderr)
            continue
        command = [sys.executable, "-m", it.module, *it.arguments, *(it.quick or () if options.quick else ())]
        command += ["--traffic", str(options.traffic)] if it.traffic else []
        found = _rows(command)
        print(f"{it.name}: {f'{len(found)} rows' if found else 'FAILED'}", file=sys.stderr)
        failed += [] if found else [it.name]
        rows += [replace(row, case=f"{it.name}: {row.case}") for row in found]
    report(rows, options.json)
    return 1 if failed or any(row.met is False for row in rows) else 0


def _rows(command: Sequence[str]) -> list[Row]:
    """Rows that the command wrote; none where it failed, with the end of its errors on standard error."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        try:
            ended = subprocess.run(
                [*command, "--json", str(path)], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)}: not done in {_SECONDS:.0f} s", file=sys.stderr)
            return []
        if not path.exists():
            print(f"{' '.join(command)}: status {ended.returncode}\n{ended.stderr[-2000:]}", file=sys.stderr)
            return []
        return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
