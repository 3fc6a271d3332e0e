"""Cells: calls of a function that take long enough to be kept, and the runner that computes those that are not.

Invariant: a result is what the cell's function returns for its arguments by the code, inputs and libraries of now,
whether it was computed or found. What has finished stays, whatever becomes of the rest.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.evaluation.digest import digest, versions
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
        if not self.function.__qualname__.isidentifier() or self.function.__module__ == "__main__":
            wanted = "give a top-level function of a module that can be imported"
            raise ValueError(f"cell {self.name}: function is {self.function_name}; {wanted}")
        if json.loads(canonical(self.arguments, f"cell {self.name}: arguments")) != self.arguments:
            wanted = "give lists instead of tuples, and strings as keys"
            raise ValueError(f"cell {self.name}: arguments {self.arguments} change when written as JSON; {wanted}")

    @property
    def function_name(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}"


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
    folder = folder or cache_directory() / "evaluation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written") from None
    keys, first = _keys(cells), dict[str, Cell]()
    for key, cell in zip(keys, cells, strict=True):
        first.setdefault(key, cell)
    found = {key: it for key, cell in first.items() if (it := _find(folder, key, cell)) is not None}
    missing = {key: cell for key, cell in first.items() if key not in found}

    def told(text: str) -> None:
        if progress:
            print(text, file=sys.stderr, flush=True)

    if found:
        told(f"{len(found)} of {len(first)} cells are kept from before")
    with closing(_computed(missing, processes)) as finished:
        for key, result in finished:
            name = result.cell.name
            if _keys([result.cell]) != [key]:
                raise CellError(f"cell {name}: its code or an input changed while it ran, so it is not kept: run again")
            _keep(folder, key, result)
            found[key] = result
            told(f"{len(found)}/{len(first)}  {result.cpu_seconds:8.2f} s CPU  {name}")
    return tuple(replace(found[key], cell=cell) for key, cell in zip(keys, cells, strict=True))


def call(cell: Cell) -> Result:
    """Run a cell in this process. Raises what its function does, and ValueError for no dict of JSON values."""
    began = time.process_time()
    values = cell.function(**cell.arguments)
    took = time.process_time() - began
    if not isinstance(values, Mapping):
        raise ValueError(f"{cell.function_name} returned a {type(values).__name__}; return a dict of JSON values")
    # As it will be found later: tuples have become lists, numpy's floats Python's.
    return Result(cell, json.loads(canonical(dict(values), f"{cell.function_name} returned")), took, found=False)


def _computed(cells: Mapping[str, Cell], processes: int) -> Generator[tuple[str, Result], None, None]:
    """Key and result of every cell, as they finish, those of most cost first. Few more start once one has failed."""
    failed: str | None = None
    # Spawned, so that a cell starts from the same state wherever it runs.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        ordered = sorted(cells.items(), key=lambda it: -it[1].cost)
        running = {pool.submit(call, cell): key for key, cell in ordered}
        for future in as_completed(running):
            error = None if future.cancelled() else future.exception()
            if error is None and not future.cancelled():
                yield running[future], future.result()
            elif failed is None:
                # All that are left fail with a process that is killed, and it is not known whose it was.
                killed = isinstance(error, BrokenProcessPool)
                name = "that a process was killed under" if killed else cells[running[future]].name
                failed = f"cell {name} failed:\n{''.join(traceback.format_exception(error))}"
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed is not None:
        raise CellError(failed)


def _keys(cells: Sequence[Cell]) -> list[str]:
    """Keys of kept results: the call, digests of the files that it depends on, and versions of libraries."""
    digests = {part: digest(*part) for part in {(it.function.__module__, it.inputs) for it in cells}}
    parts = ([it.function_name, it.arguments, digests[it.function.__module__, it.inputs], versions()] for it in cells)
    return [hashlib.sha256(canonical(it, "a cell's key").encode()).hexdigest() for it in parts]


def _find(folder: Path, key: str, cell: Cell) -> Result | None:
    """The result under a key. A file that is damaged counts as not there."""
    try:
        record = json.loads((folder / f"{key}.json").read_bytes())
        return Result(cell, dict(record["values"]), float(record["cpu_seconds"]), found=True)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _keep(folder: Path, key: str, result: Result) -> None:
    """Written whole or not at all, with the call that it is the result of for who reads the file."""
    cell, made = result.cell, {"values": result.values, "cpu_seconds": result.cpu_seconds}
    told = {"name": cell.name, "function": cell.function_name, "arguments": cell.arguments, "versions": versions()}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as part:
        part.write(json.dumps(told | made, indent=1) + "\n")
    Path(part.name).replace(folder / f"{key}.json")


def canonical(value: Any, what: str) -> str:
    """JSON with sorted keys: the same text for equal values. Raises ValueError that opens with `what` where there is
    none: NaN and infinity among them."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}; give numbers, strings, lists and dicts with strings as keys") from None
