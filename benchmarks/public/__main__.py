"""The command: `python -m benchmarks.public [--data DIR] [--json FILE]`.

Exit status 0, whatever is met: the rows say it. Without the data its cases are skipped, with a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.public.case import CaseGroup
from benchmarks.public.memory import memory_groups
from benchmarks.public.pace import pace_groups
from benchmarks.public.training import training_groups
from benchmarks.rows import report

DATA = Path(__file__).parents[2] / "../shared/data/public"


def main() -> None:
    parser = command_line("public", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the cases that are files")
    given = parser.parse_args()
    groups = training_groups()
    readers: Mapping[str, Callable[[Path], Sequence[CaseGroup]]] = {
        "memory": memory_groups,
        "throughput": pace_groups,
    }
    for folder, read in readers.items():
        if (given.data / folder).is_dir():
            groups += read(given.data / folder)
        else:
            print(f"{folder}: skipped, {given.data / folder} is not there")
    report([row for group in groups for row in group.rows()], given.json)


if __name__ == "__main__":
    main()
