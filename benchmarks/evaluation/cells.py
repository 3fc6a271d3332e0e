"""Cells: calls of a function that take long enough to be kept, and the runner that computes those that are not.

Invariant: a result is what the cell's function returns for its arguments by the code, inputs and libraries of now,
whether it was computed or found. What has finished stays, whatever becomes of the rest.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.evaluation.digest import Code, code_of, versions
from benchmarks.evaluation.progress import Progress
from libra.config.cache import cache_directory


class CellError(RuntimeError):
    """A cell raised, or its code or inputs changed while it ran. The message names it, and has the traceback if any."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One call: `function(**arguments)`, which returns a dict of JSON values.

    The function is a top-level one of a module, so that another process can import it. The module should import only
    what computes: a change of anything that it imports means computing again. Files that the function reads are
    `inputs`. `cost` is how long it takes beside other cells, in any unit; those with most start first.
    """

    name: str
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    inputs: tuple[Path, ...] = ()
    cost: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty; errors and progress name a cell by it")
        if not self.function.__qualname__.isidentifier() or self.function.__module__ == "__main__":
            raise ValueError(
                f"cell {self.name}: function is {self.function_name}; give a top-level function of a module that can"
                " be imported"
            )
        if json.loads(canonical(self.arguments, f"cell {self.name}: arguments")) != self.arguments:
            raise ValueError(
                f"cell {self.name}: arguments {self.arguments} change when written as JSON; give lists instead of"
                " tuples, and strings as keys"
            )

    @property
    def function_name(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}"


@dataclass(frozen=True, slots=True)
class Stored:
    """The values that a cell returned, and the CPU seconds that it took."""

    values: dict[str, Any]
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """The values that a cell returned, and the CPU seconds of the process that computed it, now or earlier."""

    cell: Cell
    values: Mapping[str, Any]
    cpu_seconds: float
    found: bool  # computed earlier


def run(
    cells: Sequence[Cell], processes: int = 2, progress: bool = True, folder: Path | None = None
) -> tuple[Result, ...]:
    """The results of the cells, in their order. What is not kept in `folder` is computed, by at most `processes` at a
    time; not given, the folder is `evaluation` in the cache directory. Equal calls are computed once.

    Raises `CellError` where a cell raises, once the cells that run at the same time have finished and are kept. Also
    raises it where code or inputs changed meanwhile, as results would then belong to neither version.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; give 1 or more")
    folder = folder or cache_directory() / "evaluation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written") from None
    codes = _codes(cells)
    keys = [_key(cell, codes[_code(cell)][1]) for cell in cells]
    first = {key: cell for key, cell in reversed(list(zip(keys, cells, strict=True)))}
    stored: dict[str, Stored] = {}
    with Progress(len(first), progress) as shown:
        missing = []
        for key in dict.fromkeys(keys):
            kept = _find(folder, key)
            if kept is None:
                missing.append(key)
            else:
                stored[key] = kept
                shown.finished(first[key].name, kept.cpu_seconds, found=True)
        missing.sort(key=lambda key: -first[key].cost)
        with closing(_computed({key: first[key] for key in missing}, processes, shown)) as finished:
            for key, computed in finished:
                cell = first[key]
                _require_unchanged(cell, *codes[_code(cell)])
                _keep(folder, key, cell, computed)
                stored[key] = computed
                shown.finished(cell.name, computed.cpu_seconds, found=False)
    computed_now = set(missing)
    return tuple(
        Result(cell, stored[key].values, stored[key].cpu_seconds, key not in computed_now)
        for key, cell in zip(keys, cells, strict=True)
    )


def call(cell: Cell) -> Stored:
    """Run a cell in this process. Raises what its function does, and ValueError for no dict of JSON values."""
    began = time.process_time()
    values = cell.function(**cell.arguments)
    took = time.process_time() - began
    if not isinstance(values, Mapping):
        raise ValueError(f"{cell.function_name} returned a {type(values).__name__}; return a dict of JSON values")
    # As it will be found later: tuples have become lists, numpy's floats Python's.
    return Stored(json.loads(canonical(dict(values), f"{cell.function_name} returned")), took)


def _computed(cells: Mapping[str, Cell], processes: int, shown: Progress) -> Generator[tuple[str, Stored], None, None]:
    """Key and result of every cell, as they finish. No more are handed out once one has failed."""
    if not cells:
        return
    left = iter(cells.items())
    failed: str | None = None
    # Spawned, so that a cell starts from the same state wherever it runs.
    with ProcessPoolExecutor(min(processes, len(cells)), mp_context=get_context("spawn")) as pool:
        running: dict[Future[Stored], str] = {}
        while True:
            while failed is None and len(running) < processes and (following := next(left, None)) is not None:
                running[pool.submit(call, following[1])] = following[0]
            if not running:
                break
            shown.running([cells[key].name for key in running.values()])
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                error = future.exception()
                if error is None:
                    yield key, future.result()
                elif failed is None:
                    # All that run fail with a process that is killed, and it is not known whose it was.
                    beside = [cells[other].name for other in running.values()]
                    killed = isinstance(error, BrokenProcessPool)
                    whose = " or ".join([cells[key].name, *(beside if killed else [])])
                    failed = f"cell {whose} failed:\n{''.join(traceback.format_exception(error))}"
    if failed is not None:
        raise CellError(failed)


def _code(cell: Cell) -> tuple[str, tuple[Path, ...]]:
    return cell.function.__module__, cell.inputs


def _codes(cells: Sequence[Cell]) -> dict[tuple[str, tuple[Path, ...]], tuple[Code, str]]:
    """The code and inputs that the cells depend on, with their digest."""
    found = {}
    for part in dict.fromkeys(_code(cell) for cell in cells):
        code = code_of(*part)
        found[part] = (code, code.digest())
    return found


def _require_unchanged(cell: Cell, code: Code, digest: str) -> None:
    if code.digest() != digest:
        raise CellError(
            f"cell {cell.name}: its code or an input changed while it ran, so its result is not kept: run again"
        )


def _key(cell: Cell, digest: str) -> str:
    parts = [cell.function_name, cell.arguments, digest, versions()]
    return hashlib.sha256(canonical(parts, f"cell {cell.name}").encode()).hexdigest()


def _find(folder: Path, key: str) -> Stored | None:
    """The result under a key. A file that is damaged counts as not there."""
    try:
        record = json.loads((folder / f"{key}.json").read_bytes())
        if record["sum"] == _sum(record["values"], record["cpu_seconds"]):
            return Stored(record["values"], record["cpu_seconds"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def _keep(folder: Path, key: str, cell: Cell, result: Stored) -> None:
    """Written whole or not at all, with the call that it is the result of for who reads the file."""
    told = {"name": cell.name, "function": cell.function_name, "arguments": cell.arguments, "versions": versions()}
    record = {**told, **asdict(result), "sum": _sum(result.values, result.cpu_seconds)}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as part:
        part.write(json.dumps(record, indent=1) + "\n")
    Path(part.name).replace(folder / f"{key}.json")


def _sum(values: Any, cpu_seconds: Any) -> str:
    return hashlib.sha256(canonical([values, cpu_seconds], "result").encode()).hexdigest()


def canonical(value: Any, what: str) -> str:
    """JSON with sorted keys: the same text for equal values. Raises ValueError that opens with `what` where there is
    none: NaN and infinity among them."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}; give numbers, strings, lists and dicts with strings as keys") from None
