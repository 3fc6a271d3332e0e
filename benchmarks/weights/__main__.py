"""Exact deltas between versions of a model's weights: how small, how fast; and over a slow link.

python -m benchmarks.weights [--json FILE]          deltas of real AdamW steps at four learning rates
python -m benchmarks.weights link [--json FILE]     two clusters of three nodes, a slow link between them
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.command import command_line
from benchmarks.rows import report
from benchmarks.weights import link, steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("weights", __doc__)
    parser.add_argument("what", nargs="?", choices=("steps", "link"), default="steps")
    options = parser.parse_args(arguments)
    rows = steps.measured() if options.what == "steps" else link.measured()
    report(rows, options.json)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
