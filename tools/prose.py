"""Marks of prose that has to be read twice: openings of docstrings, and words for which the field has a plainer one.

    python tools/prose.py [PATH ...]

Prints each place, by default of `src/libra`; exit status 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = re.compile(r"(Of|What|Whose|Who|Where|How|That|So many|As many|Likewise)\b")  # of a docstring
WORDS = re.compile(
    r"\b(so many|so much of|nobody|whoever|to be had|gone on with|is told of|go(?:es|ing)? on|goes away|went away"
    r"|gives? way|gave way|st(?:an|oo)ds? still|taken for (?:lost|gone)|taken to (?:be|have)|opens with|lets? go)\b",
    re.IGNORECASE,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PROSE = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT))


def marks(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each mark in a file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) and OPENING.match(text):
            yield node.body[0].lineno, f"opens with {text.split(maxsplit=1)[0]!r}: {text.splitlines()[0]}"
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type in _PROSE:
                for found in WORDS.finditer(token.string):
                    line = token.start[0] + token.string.count("\n", 0, found.start())
                    yield line, f"has {found[0]!r}"


def main() -> int:
    folders = [Path(it) for it in sys.argv[1:]] or [ROOT / "src/libra"]
    files = [path for it in folders for path in ([it] if it.is_file() else sorted(it.rglob("*.py")))]
    found = [(path, *mark) for path in files for mark in sorted(marks(path))]
    for path, line, text in found:
        print(f"{path}:{line}: {text}")
    if found:
        print(
            f"{len(found)} places: begin a docstring with what the thing is or does, name quantities and actors,"
            " and use the words of the field"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
