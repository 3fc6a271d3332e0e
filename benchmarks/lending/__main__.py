"""Runs one benchmark of lending: `python -m benchmarks.lending NAME [...]`, where NAME is a module of this package.

Invariant: only the benchmark that is asked for is imported, so each needs no more than it uses itself.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark named first, on the other arguments, by its module's `main`; without a name, list them."""
    name, *others = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    about = _about()
    if name in about:
        return int(importlib.import_module(f"benchmarks.lending.{name}").main(others))
    wanted = name in ("-h", "--help")
    lines = ["usage: python -m benchmarks.lending NAME [...]", *(f"  {it:12} {line}" for it, line in about.items())]
    if not wanted:
        lines.insert(0, f"python -m benchmarks.lending: {name!r} is not one of {', '.join(about)}")
    print("\n".join(lines), file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


def _about() -> dict[str, str]:
    """The first line of what each benchmark says of itself; a name with an underscore in front is no benchmark."""
    files = sorted(it for it in _HERE.glob("*.py") if not it.name.startswith("_"))
    found = {it.stem: ast.get_docstring(ast.parse(it.read_text(encoding="utf-8"))) for it in files}
    return {name: (text or "").partition("\n")[0] for name, text in found.items()}


if __name__ == "__main__":
    sys.exit(main())
