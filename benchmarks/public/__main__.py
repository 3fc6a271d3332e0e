"""The command: `python -m benchmarks.public [--data DIR] [--json FILE]`.

Exit status 0, whatever is met: the rows say it. Without the data its cases are skipped, with a line.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import command_line
from benchmarks.public.memory import memory_group
from benchmarks.public.parameters import parameters_group
from benchmarks.public.training import training_groups
from benchmarks.rows import report

DATA = Path(__file__).parents[2] / "../shared/data/public"


def main() -> None:
    parser = command_line("public", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the cases that are files")
    given = parser.parse_args()
    groups = training_groups()
    for folder, read in (("memory", memory_group), ("models", parameters_group)):
        if (given.data / folder).is_dir():
            groups.append(read(given.data / folder))
        else:
            print(f"{folder}: skipped, {given.data / folder} is not there")
    report([row for group in groups for row in group.rows()], given.json)


if __name__ == "__main__":
    main()
