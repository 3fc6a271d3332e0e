"""The command line that benchmarks share, and a look at the machine that they measure on.

Invariant: every benchmark is `python -m benchmarks.NAME`, and writes its rows, a JSON line each, to the file of
`--json`. `--quick` is a first look, and no verdict.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.rows import Row, report

_QUIET = 0.05  # share of the machine that others may use while a benchmark measures it

T = TypeVar("T")


class RefusedError(ValueError):
    """Nothing can be measured with these options, or here. The message says why, and what to do."""


def command_line(name: str, about: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`, with `--json`, and with `--quick` where its help is given. `about` is
    the module's docstring, whose first paragraph is the benchmark's purpose."""
    purpose = " ".join((about or "").partition("\n\n")[0].split())
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=purpose)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows to FILE, a JSON line each")
    return parser


def _new_file(text: str) -> Path:
    """Refused before anything is measured where its folder is not there."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it")
    return path


def show(
    parser: argparse.ArgumentParser, rows: Callable[[argparse.Namespace], Iterable[Row]], *, judged: bool = False
) -> None:
    """Print and keep the rows of the options that this process was started with. A `judged` benchmark ends with status
    1 where a goal is not met; another one leaves that to its rows. Status 2: `rows` raised `RefusedError`."""
    options = parser.parse_args()
    try:
        found = list(rows(options))
    except RefusedError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    report(found, options.json)
    sys.exit(int(judged and any(row.met is False for row in found)))


@contextmanager
def quiet_machine() -> Iterator[None]:
    """Say after a measurement whether other processes had the machine before it."""
    taken = psutil.cpu_percent(interval=1.0) / 100
    yield
    if taken > _QUIET:
        share = f"{100 * taken:.0f} %"
        print(f"other processes took {share} of the machine before the start: measure again when it is quiet")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a call in a fresh process, so that its memory and its caches are its own."""
    with get_context("spawn").Pool(1) as process:
        return process.apply(function, arguments)


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def processor_seconds(*who: int) -> float:
    """CPU time of this process with all its threads, or of its children that have ended, or of both."""
    used = [resource.getrusage(one) for one in who or (resource.RUSAGE_SELF,)]
    return sum(one.ru_utime + one.ru_stime for one in used)
