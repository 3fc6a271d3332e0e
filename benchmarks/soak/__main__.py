"""A run under random faults for some minutes, and whether everything held.

    python -m benchmarks.soak --minutes 20 --seed 0

or attacks on what Libra reads and where it listens, each figure with its goal:

    python -m benchmarks.soak --attack [--quick]

Exit status: 0 all held, 1 something did not, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.command import command_line
from benchmarks.soak.attack import findings
from benchmarks.soak.attack.attacks import ATTACKS, FULL, QUICK, attack
from benchmarks.soak.faults import schedule
from benchmarks.soak.soaking import Soak, Soaked, SoakError
from libra.backends.machine import hardware_name

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("soak", __doc__, quick="attack with a tenth and less of everything")
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults; then the run ends (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between two faults (default: 4)")
    parser.add_argument("--directory", type=Path, default=Path("runs/soak"), help="emptied (default: runs/soak)")
    parser.add_argument("--save", action="store_true", help=f"write it to {RESULTS.name}/soak-<date>.jsonl as well")
    parser.add_argument(
        "--attack",
        choices=ATTACKS,
        nargs="*",
        help="attack files, run directories, listeners and sessions instead; all of these, or the named ones",
    )
    options = parser.parse_args(arguments)
    console, began = Console(highlight=False), time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]\\[{time.monotonic() - began:7.1f} s][/dim] {escape(text)}")

    if options.attack is not None:
        try:
            found = list(attack(options.attack or ATTACKS, QUICK if options.quick else FULL, options.seed, say))
        except KeyboardInterrupt:
            return 130
        console.print(findings.make_table(found))
        _write(options, "attack-", [_head(options), *findings.lines(found)])
        return 0 if all(it.held is not False for it in found) else 1
    try:
        soaked = Soak(options.directory, say).run(schedule(options.seed, options.pause), 60 * options.minutes)
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("soak: interrupted, so nothing was checked", file=sys.stderr)
        return 130
    console.print(make_table(soaked))
    for table in (faults_table(soaked), recoveries_table(soaked)):
        console.print(table)
    _write(options, "", result(soaked, options))
    return 0 if soaked.held else 1


def _write(options: argparse.Namespace, kind: str, lines: Sequence[dict[str, Any]]) -> None:
    kept = RESULTS / f"soak-{kind}{date.today()}.jsonl" if options.save else None
    for path in filter(None, (options.json, kept)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_table(soaked: Soaked) -> Table:
    table = Table(title=f"{soaked.steps:,} steps in {soaked.sessions} sessions, {soaked.seconds:,.0f} s")
    for name in ("what must hold", "held", "counted, or what contradicts it"):
        table.add_column(name)
    for check in soaked.checks:
        table.add_row(escape(check.name), "yes" if check.held else "[red]no[/red]", escape(check.detail))
    return table


def faults_table(soaked: Soaked) -> Table:
    title = f"{len(soaked.struck)} faults, and {soaked.passed} that found nobody to strike"
    table = Table(title=f"{title}; {soaked.moves} moves; {soaked.processes} processes")
    table.add_column("fault")
    table.add_column("times", justify="right")
    for kind, count in Counter(entry.kind for entry in soaked.struck).most_common():
        table.add_row(kind, str(count))
    return table


def recoveries_table(soaked: Soaked) -> Table:
    table = Table(title="seconds to recover")
    for name in ("from what to what", "times", "median", "worst"):
        table.add_column(name, justify="left" if name == "from what to what" else "right")
    for each in soaked.recoveries:
        table.add_row(escape(each.name), str(each.count), f"{each.median:.2f}", f"{each.worst:.2f}")
    return table


def result(soaked: Soaked, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The soak as lines: what was run, then each check, then each recovery."""
    run = {
        **_head(options),
        "held": soaked.held,
        "steps": soaked.steps,
        "sessions": soaked.sessions,
        "seconds": soaked.seconds,
        "moves": soaked.moves,
        "processes": soaked.processes,
        "passed": soaked.passed,
        "faults": dict(Counter(str(entry.kind) for entry in soaked.struck)),
    }
    return [run, *map(asdict, soaked.checks), *map(asdict, soaked.recoveries)]


def _head(options: argparse.Namespace) -> dict[str, Any]:
    """Command, date, commit and hardware of a report."""
    if options.attack is not None:
        words = " ".join(("--attack", *options.attack, *(("--quick",) if options.quick else ())))
        words += f" --seed {options.seed}"
    else:
        words = f"--minutes {options.minutes:g} --seed {options.seed} --pause {options.pause:g}"
    return {
        "command": f"python -m benchmarks.soak {words}",
        "date": str(date.today()),
        "commit": _commit(),
        "hardware": hardware_name(),
    }


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
