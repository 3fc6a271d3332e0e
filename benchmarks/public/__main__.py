"""Prices beside published measurements: memory and pace of engines, and training rates.

    python -m benchmarks.public [--data DIR] [--json FILE]

Exit status 0, whatever is met: the rows say it. Without the data its cases are skipped, with a line.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import command_line, show
from benchmarks.public.engines import memory_groups, pace_groups
from benchmarks.public.training import training_groups
from benchmarks.rows import Row

DATA = Path(__file__).parents[2] / "../shared/data/public"


def rows(options: Namespace) -> Iterator[Row]:
    groups = training_groups()
    for folder, read in (("memory", memory_groups), ("throughput", pace_groups)):
        if (options.data / folder).is_dir():
            groups += read(options.data / folder)
        else:
            print(f"{folder}: skipped, {options.data / folder} is not there")
    for group in groups:
        yield from group.rows()


if __name__ == "__main__":
    parser = command_line("public", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the cases that are files")
    show(parser, rows)
