"""A run under random faults for some minutes, and whether everything held.

    python -m benchmarks.soak --minutes 20 --seed 0

or attacks on what Libra reads and where it listens, each figure with its goal:

    python -m benchmarks.soak --attack [--quick]

Exit status: 0 all held, 1 something did not, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.command import command_line
from benchmarks.rows import report
from benchmarks.soak.attack.attacks import ATTACKS, FULL, QUICK, attack
from benchmarks.soak.faults import schedule
from benchmarks.soak.soaking import Soak, SoakError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("soak", __doc__, quick="attack with a tenth and less of everything")
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults; then the run ends (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between two faults (default: 4)")
    parser.add_argument("--directory", type=Path, default=Path("runs/soak"), help="emptied (default: runs/soak)")
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
        report(found, options.json)
        return 0 if all(it.met is not False for it in found) else 1
    try:
        soaked = Soak(options.directory, say).run(schedule(options.seed, options.pause), 60 * options.minutes)
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("soak: interrupted, so nothing was checked", file=sys.stderr)
        return 130
    report(soaked.rows, options.json)
    return 0 if soaked.held else 1


if __name__ == "__main__":
    sys.exit(main())
