"""The command: `python -m benchmarks.public [--data DIR] [--json FILE]`.

Exit status 0, whatever is met: the rows say it. Without the data its cases are skipped, with a line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.public.memory import memory_group
from benchmarks.public.parameters import parameters_group
from benchmarks.public.training import training_groups
from benchmarks.rows import report, write_rows

DATA = Path(__file__).parents[2] / "../shared/data/public"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the cases that are files")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, a JSON line each")
    given = parser.parse_args()
    console = Console()
    groups = training_groups()
    for folder, read in (("memory", memory_group), ("models", parameters_group)):
        if (given.data / folder).is_dir():
            groups.append(read(given.data / folder))
        else:
            console.print(f"{folder}: skipped, {given.data / folder} is not there")
    for group in groups:
        group.show(console)
    report([row for group in groups for row in group.rows() if row.metric != "error"], None)
    if given.json is not None:
        write_rows([row for group in groups for row in group.rows()], given.json)


if __name__ == "__main__":
    main()
