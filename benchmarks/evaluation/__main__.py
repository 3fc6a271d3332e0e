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

from benchmarks.evaluation.cells import CellError, run
from benchmarks.evaluation.page import with_tables
from benchmarks.evaluation.registry import experiments
from benchmarks.rows import Row, report, write_rows


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
    rows: list[Row] = []
    tables: dict[str, str] = {}
    for experiment in chosen:
        console.print(f"\n[bold]{escape(experiment.title)}[/] ({experiment.name})", highlight=False)
        lacking = experiment.lacks()
        if lacking is not None:
            if experiment.name in options.names:
                raise ValueError(f"{experiment.name}: {lacking}")
            console.print(f"left out: {escape(lacking)}", highlight=False, soft_wrap=True)
            continue
        results = run(experiment.cells(options.quick), options.processes)
        found = list(experiment.rows(results))
        report(found, None)
        rows += found
        tables |= {f"{experiment.name}/{name}": text for name, text in experiment.tables(results).items()}
        if options.figures is not None:
            for name, svg in experiment.figures(results).items():
                (options.figures / f"{experiment.name}-{name}.svg").write_text(svg, encoding="utf-8")
    if options.json is not None:
        write_rows(rows, options.json)
    if options.markdown is not None:
        page = options.markdown.read_text(encoding="utf-8")
        known = [experiment.name for experiment in experiments()]
        options.markdown.write_text(with_tables(page, tables, known), encoding="utf-8")
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
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {options.json.absolute().parent}; make it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAMES", help="of experiments; not given: all")
    parser.add_argument("--list", action="store_true", help="say which experiments there are, and run none")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and smaller sizes: a first look, no verdict")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that compute at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the tables of FILE, by their markers")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the figures to FOLDER, as SVG files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
