"""A run under random faults for some minutes, and whether everything held.

    python -m benchmarks.soak --minutes 20 --seed 0

or attacks on what Libra reads and where it listens, each figure with its goal:

    python -m benchmarks.soak --attack [--quick]

Exit status: 0 all held, 1 something did not, 130 interrupted.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.command import command_line
from benchmarks.rows import Row, never, report
from benchmarks.soak.attack.listeners import attack_listeners
from benchmarks.soak.attack.readers import NAME, Say, make_run, read_mutated, resume_damaged
from benchmarks.soak.attack.sessions import attack_sessions
from benchmarks.soak.attack.strangers import attack_as_stranger
from benchmarks.soak.faults import schedule
from benchmarks.soak.soaking import Soak, SoakError


@dataclass(frozen=True, slots=True)
class Size:
    sessions: int
    seconds: float  # of sessions
    files: int
    runs: int
    listener_seconds: float  # of each


FULL, QUICK = Size(2_000, 60.0, 5_000, 1_500, 20.0), Size(200, 10.0, 300, 60, 8.0)
# By name: what makes an attack in a folder of its own, beside a whole run, at this size, with this seed
ATTACKS: dict[str, Callable[[Path, Path, Size, int, Say], Iterator[Row]]] = {
    "sessions": lambda here, run, size, seed, say: attack_sessions(here, size.sessions, size.seconds, say, seed),
    "files": lambda here, run, size, seed, say: read_mutated(here, run / "runs" / NAME, size.files, say, seed),
    "runs": lambda here, run, size, seed, say: resume_damaged(run, size.runs, say, seed),
    "listeners": lambda here, run, size, seed, say: attack_listeners(here, size.listener_seconds, say),
    "strangers": lambda here, run, size, seed, say: attack_as_stranger(say),
}


def attack(names: Sequence[str], size: Size, seed: int, say: Say) -> Iterator[Row]:
    """Rows of these attacks, as they come. One that breaks off is a failed row; the others run all the same."""
    with tempfile.TemporaryDirectory(prefix="libra-attack-") as directory:
        whole = Path(directory) / "run"
        if {"files", "runs"} & {*names}:
            whole.mkdir()
            say("a small run, whose files are to be damaged")
            make_run(whole)
        for name in names:
            say(f"attack: {name}")
            folder = Path(directory) / name
            folder.mkdir()
            try:
                yield from ATTACKS[name](folder, whole, size, seed, say)
            except (RuntimeError, OSError) as error:
                yield never(name, "attacks that broke off", [str(error)], "one")


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
            found = list(attack(options.attack or list(ATTACKS), QUICK if options.quick else FULL, options.seed, say))
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
