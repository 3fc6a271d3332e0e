"""Files that a module's code is in, and their digest.

Invariant: a change of any file that the module imports from our own packages, directly or through others, changes the
digest; where the packages lie does not.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

PACKAGES = ("libra", "benchmarks")  # ours; of others the versions count
LIBRARIES = ("numpy", "ortools", "aiconfigurator-core")  # whose numbers end up in results


def digest(module: str, inputs: Iterable[Path] = ()) -> str:
    """SHA-256 of the module, all that it imports from `PACKAGES` and from its own package, and of the files that it
    reads besides, as they are now. Raises ValueError where a file is gone."""
    roots = {name: _folder(name) for name in dict.fromkeys((*PACKAGES, module.partition(".")[0]))}
    modules = {name: _sum(path) for name, path in sorted(imported(module, roots).items())}
    return hashlib.sha256(repr((modules, [_sum(path) for path in inputs])).encode()).hexdigest()


def imported(module: str, roots: Mapping[str, Path]) -> dict[str, Path]:
    """Files by module name: the module, what it imports from the packages in the folders `roots`, what that imports,
    and so on; and the packages that these are in, whose `__init__` runs first.

    Imports count wherever they are written: in a function, or for the type checker alone. Raises ValueError where the
    module is in none of the packages.
    """
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        path = _file(name, roots)
        if path is None or name in found:
            continue
        found[name] = path
        left += _parents(name)
        left += _imports(path.read_bytes(), name if path.name == "__init__.py" else name.rpartition(".")[0])
    if module not in found:
        raise ValueError(f"there is no module {module} in {', '.join(roots)}; put the function into one")
    return found


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


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not found: run from the root of the repository")
    return Path(next(iter(spec.submodule_search_locations)))


def _file(module: str, roots: Mapping[str, Path]) -> Path | None:
    """File of a module; None for one that is not of these packages."""
    package, _, rest = module.partition(".")
    if package not in roots:
        return None
    path = roots[package].joinpath(*rest.split(".")) if rest else roots[package]
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py") if rest else (path / "__init__.py",)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


@cache
def _imports(source: bytes, package: str) -> Sequence[str]:
    """Names that a module of the package may import as modules: of `from a import b` both `a` and `a.b`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names
