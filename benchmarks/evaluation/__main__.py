"""Runs the experiments on what Libra is worth, and writes their rows, tables and figures.

Invariant: printed rows, written rows and the page are made of the same results. A cell that finished is kept, and
computed again only when its code, inputs or libraries have changed.

    python -m benchmarks.evaluation [NAMES...] [--quick] [--json FILE] [--markdown docs/evaluation.md]
                                    [--figures docs/figures] [--processes N] [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.command import command_line
from benchmarks.evaluation.cells import CellError, run
from benchmarks.evaluation.experiment import Found, experiments, with_tables
from benchmarks.rows import report, write_rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _main(options)
    except (ValueError, CellError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def _main(options: argparse.Namespace) -> int:
    chosen, console = experiments(options.names), Console()
    if options.list:
        for experiment in chosen:
            console.print(f"{experiment.name}: {escape(experiment.question)}", highlight=False, soft_wrap=True)
        return 0
    _check(options)
    found: dict[str, Found] = {}
    for experiment in chosen:
        console.print(f"\n[bold]{escape(experiment.title)}[/] ({experiment.name})", highlight=False)
        found[experiment.name] = experiment.found(run(experiment.cells(options.quick), options.processes))
        report(found[experiment.name].rows, None)
    if options.figures is not None:
        for name, its in found.items():
            for figure, drawn in its.figures.items():
                (options.figures / f"{name}-{figure}.svg").write_text(drawn.svg(), encoding="utf-8")
    if options.json is not None:
        write_rows([row for its in found.values() for row in its.rows], options.json)
    if options.markdown is not None:
        tables = {f"{name}/{table}": it.markdown() for name, its in found.items() for table, it in its.tables.items()}
        page = options.markdown.read_text(encoding="utf-8")
        options.markdown.write_text(with_tables(page, tables), encoding="utf-8")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Before anything is computed."""
    if options.processes < 1:
        raise ValueError(f"--processes is {options.processes}; give 1 or more")
    for option in ("markdown", "figures") if options.quick else ():
        if getattr(options, option) is not None:
            raise ValueError(f"--{option} with --quick: a first look is not for the page; leave one of them out")
    if options.markdown is not None and not options.markdown.is_file():
        raise ValueError(f"--markdown: {options.markdown} is no file; it must exist and hold the markers")
    if options.figures is not None and not options.figures.is_dir():
        raise ValueError(f"--figures: {options.figures} is no folder; make it")


def _parser() -> argparse.ArgumentParser:
    parser = command_line("evaluation", __doc__, quick="fewer seeds and smaller sizes: a first look, no verdict")
    parser.add_argument("names", nargs="*", metavar="NAMES", help="of experiments; not given: all")
    parser.add_argument("--list", action="store_true", help="say which experiments there are, and run none")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that compute at a time (2)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the tables of FILE, by their markers")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the figures to FOLDER, as SVG files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
