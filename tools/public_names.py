"""Whether a name is one thing: no two modules of src/libra define a public class of the same name.

    python tools/public_names.py

Prints each name that is shared and where; exit status 1 if there is one that is not in `ON_PURPOSE`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "libra"
ON_PURPOSE: dict[str, str] = {  # name: why it is the right word in each place
    "Engine": "`backends` has the protocol of what a run drives, `sim` the model of it; neither imports the other",
    "Trainer": "likewise",
}


def classes(folder: Path) -> dict[str, list[str]]:
    """Modules by the public classes that they define at top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(folder)))
    return found


def main() -> int:
    shared = {name: paths for name, paths in classes(SOURCES).items() if len(paths) > 1 and name not in ON_PURPOSE}
    for name, paths in sorted(shared.items()):
        print(f"{name}: {', '.join(paths)}")
    if shared:
        print(f"{len(shared)} public classes share a name: rename them, or say in {Path(__file__).name} why not")
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
