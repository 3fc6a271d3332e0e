"""Files that a module's code is in, and their digest.

Invariant: a change of any file that the module imports from our own packages, directly or through others, changes the
digest; where the packages lie does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from grimp import build_graph

PACKAGES = ("libra", "benchmarks", "tests.oracles")  # ours; of others the versions count
LIBRARIES = ("numpy", "ortools", "aiconfigurator-core")  # whose numbers end up in results


def digest(module: str, inputs: Iterable[Path] = ()) -> str:
    """SHA-256 of the module, all that it imports from `PACKAGES` and from its own package, and of the files that it
    reads besides, as they are now. Raises ValueError where a file is gone."""
    packages = tuple(dict.fromkeys((*PACKAGES, module.partition(".")[0])))
    modules = {name: _sum(path) for name, path in sorted(imported(module, packages).items())}
    return hashlib.sha256(repr((modules, [_sum(path) for path in inputs])).encode()).hexdigest()


def imported(module: str, packages: tuple[str, ...]) -> dict[str, Path]:
    """Files by module name: the module, what it imports from the packages, what that imports, and so on; and the
    packages that these are in, whose `__init__` runs first.

    Imports count wherever they are written: in a function, or for the type checker alone. Raises ValueError where the
    module is in none of the packages.
    """
    graph, found, left = build_graph(*packages, cache_dir=None), set[str](), [module]
    if module not in graph.modules:
        raise ValueError(f"there is no module {module} in {', '.join(packages)}; put the function into one")
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph.find_modules_directly_imported_by(name)
            left += {name.rpartition(".")[0]} & graph.modules
    return {name: _file(name) for name in found}


@cache
def versions() -> Mapping[str, str]:
    """Versions of Python and of `LIBRARIES`; `none` where one is not installed."""
    found = {"python": python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return found


def _sum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a result depends on this file: put it there") from None


def _file(module: str) -> Path:
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], *rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
