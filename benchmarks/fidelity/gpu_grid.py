"""The grid of a measured engine: single iterations, from its points or from rows of its steps, and what arrivals take.

Invariant: what failed, or was not timed, is no iteration. Nothing of a workload is read.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.fidelity.fields import Fields
from libra.cost.lines import least_squares
from libra.cost.sources.engine_fit import MeasuredIteration

_CLOSE = 64  # tokens by which contexts of one point of a grid may differ
_LAST = 16  # tokens of a prompt that a decode point computes: all before them is cached
_KINDS = ("decode", "prefill", "prefills", "mixed")


@dataclass(frozen=True, slots=True)
class Intake:
    """Seconds of an engine to take in a request: `request + token * tokens`."""

    request: float
    token: float


def read_grid(
    document: Fields, steps: Path, block: int, budget: int
) -> tuple[tuple[MeasuredIteration, ...], Intake | None]:
    """From the file of steps where there is one with rows of the grid, else the document's points, which do not show
    what arrivals take. Raises ValueError that names the field."""
    rows = _rows(steps) if steps.is_file() else []
    if not rows:
        return _points(document.sections("grid"), block), None
    try:
        return _iterations(rows, block, budget), _intake(rows)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{steps.name} has rows of the grid that cannot be read ({error!r}); {_WITHOUT}") from None


_WITHOUT = "measure again, or take it out of the folder: the points of `grid` stand in for it"


def _rows(steps: Path) -> list[dict[str, str]]:
    try:
        with gzip.open(steps, "rt", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if row["case"] == "grid"]
    except (OSError, EOFError, zlib.error, KeyError, ValueError, csv.Error) as error:
        raise ValueError(f"{steps.name} cannot be read ({error!r}); {_WITHOUT}") from None


def _points(points: Sequence[Fields], block: int) -> tuple[MeasuredIteration, ...]:
    """The medians of a grid's points."""
    found: list[MeasuredIteration] = []

    def add(decodes: int, held: int, chunks: tuple[tuple[int, int], ...], us: float, times: int, new: bool) -> None:
        cached = sum(before for _, before in chunks)
        admitted = (len(chunks), sum(tokens for tokens, _ in chunks) + cached, cached) if new else (0, 0, 0)
        shared = max(0, decodes - 1) * (held // block * block)
        found.append(MeasuredIteration(decodes, decodes * held, chunks, admitted, shared, us / 1e6, times))

    for point in points:
        kind = point.text("kind")
        if kind not in _KINDS:
            raise point.refusal("kind", f"is {kind}, none of {', '.join(_KINDS)}")
        if point.given("error"):
            continue
        if kind == "decode":
            add(point.count("batch"), point.count("ctx"), (), point.positive("us"), point.count("n", 1), False)
        elif kind in ("prefill", "prefills"):
            chunks = ((point.count("tokens"), point.count("ctx", 0, least=0)),) * point.count("parts", 1)
            add(0, 0, chunks, point.positive("us"), point.count("n", 1), True)
        else:
            whole = point.count("tokens")
            for tokens, us in _samples(point):  # the rest of a prompt that was cut is no admission
                before = whole - tokens if tokens < whole / 2 else 0
                add(point.count("batch"), point.count("ctx"), ((tokens, before),), us, 1, not before)
    return tuple(found)


def _samples(point: Fields) -> list[tuple[int, float]]:
    samples = point.data.get("samples")
    if not isinstance(samples, list) or not all(isinstance(it, list) and len(it) == 2 for it in samples):
        raise point.refusal("samples", "is no list of pairs of tokens and microseconds")
    named = [Fields({"tokens": it[0], "us": it[1]}, f"{point.name}.samples[{i}]") for i, it in enumerate(samples)]
    return [(it.count("tokens"), it.positive("us")) for it in named]


def _iterations(rows: Sequence[Mapping[str, str]], block: int, budget: int) -> tuple[MeasuredIteration, ...]:
    """The means of a grid's iterations that are alike. Prompts of one iteration are of one length there."""
    alike: dict[tuple[object, ...], list[MeasuredIteration]] = {}
    before: MeasuredIteration | None = None
    for row in rows:
        if not int(row["us"]):
            continue
        decodes, context, prompts = int(row["decodes"]), int(row["decode_ctx"]), int(row["prefills"])
        chunks: tuple[tuple[int, int], ...] = ()
        admitted = (0, 0, 0)
        if prompts:
            new = int(row["prefill_tokens"]) // prompts
            cached = max(0, round(int(row["prefill_ctx"]) / int(row["prefill_tokens"]) - new / 2))
            chunks = ((new, cached),) * prompts
            if not (before and before.tokens == budget and prompts == 1 and sum(before.chunks[-1]) == cached):
                admitted = (prompts, prompts * (new + cached), prompts * cached)
        shared = (decodes - 1) * ((context // decodes - 1) // block * block) if decodes else 0
        before = MeasuredIteration(decodes, context, chunks, admitted, shared, int(row["us"]) / 1e6)
        alike.setdefault((decodes, context // max(1, decodes) // _CLOSE, chunks, admitted), []).append(before)
    found = []
    for members in alike.values():
        middle = members[len(members) // 2]
        mean = sum(it.seconds for it in members) / len(members)
        shape = (middle.decodes, middle.context, middle.chunks, middle.admitted, middle.shared)
        found.append(MeasuredIteration(*shape, mean, len(members)))
    return tuple(found)


def _intake(rows: Sequence[Mapping[str, str]]) -> Intake | None:
    """From the time between two iterations in which the requests of a decode point were taken in. The more of it there
    is with the number of requests; what is the same for all points of a context is the making of its prompt."""
    taken: list[tuple[int, int, float]] = []  # context, requests, seconds
    for last, row in pairwise(rows):
        prompts, tokens = int(row["prefills"]), int(row["prefill_tokens"])
        begun = int(last["waiting"]) > 0  # they were taken in before that iteration
        if prompts and not int(row["decodes"]) and tokens == _LAST * prompts and not begun:
            context = (int(row["prefill_ctx"]) // tokens - _LAST // 2) + _LAST
            gap = float(row["start_s"]) - float(last["start_s"]) - int(last["us"]) / 1e6
            taken.append((context, prompts + int(row["waiting"]), gap))
    contexts = sorted({context for context, _, _ in taken})
    contexts = [one for one in contexts if len({n for context, n, _ in taken if context == one}) > 2]
    taken = [it for it in taken if it[0] in contexts]
    if len(contexts) < 2:
        return None
    gaps = np.array([gap for _, _, gap in taken])
    columns = [[float(context == one) for one in contexts] + [n, n * context] for context, n, _ in taken]
    trust = np.ones(len(taken))
    for _ in range(20):  # a gap that is far off had something else in it: its weight falls
        weights = trust / gaps
        fitted = least_squares(np.array(columns) * weights[:, None], gaps * weights)
        off = np.abs(np.array(columns) @ fitted / gaps - 1)
        usual = max(float(np.median(off)), 1e-6)
        trust = usual / np.maximum(off, usual)
    return Intake(float(fitted[-2]), float(fitted[-1]))
