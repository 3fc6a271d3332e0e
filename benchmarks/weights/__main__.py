"""Exact deltas between versions of a model's weights: how small, how fast; and over a slow link.

python -m benchmarks.weights [--json FILE]          deltas of real AdamW steps at four learning rates
python -m benchmarks.weights link [--json FILE]     two clusters of three nodes, a slow link between them
"""

from __future__ import annotations

from benchmarks.command import command_line, show
from benchmarks.weights import link, steps

if __name__ == "__main__":
    parser = command_line("weights", __doc__)
    parser.add_argument("what", nargs="?", choices=("steps", "link"), default="steps")
    show(parser, lambda options: (steps if options.what == "steps" else link).measured(), judged=True)
