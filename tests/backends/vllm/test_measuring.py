"""Measured prefills of prompts beyond the budget of an iteration, on an engine whose clock is counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration


class Chunked:
    """Computes `most_tokens` prompt tokens an iteration, then a token of every request; a second each."""

    most_tokens = 64

    def __init__(self, clock: Iterator[int]) -> None:
        self._left: dict[str, list[int]] = {}  # of each request: prompt tokens to compute, tokens to make
        self._clock = clock

    def add(self, request: Any) -> None:
        self._left[request.id] = [len(request.tokens), request.max_tokens]

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        budget, made = self.most_tokens, []
        for name, left in list(self._left.items()):
            part = min(left[0], budget)
            budget -= part
            left[0] -= part
            if left[0] == 0 and budget >= 0:
                left[1] -= 1
                made.append(SimpleNamespace(turn=name))
            if left[1] == 0:
                del self._left[name]
        return made


def test_a_prompt_beyond_the_budget_is_priced_by_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    from libra.backends.transport.engine_messages import MeasureEngine
    from libra.backends.vllm import engine_worker

    ticks = count()
    monkeypatch.setattr(engine_worker.time, "monotonic", lambda: float(next(ticks)))
    pacer: Any = SimpleNamespace(pace=lambda: None)
    found = engine_worker.measure(Chunked(ticks), MeasureEngine([(1, 256), (1, 32)], 1), pacer)  # type: ignore[arg-type]
    prefills = [row for row in found.iterations if row[2]]
    assert [(row[2], row[3]) for row in prefills] == [(64.0, 1.0), (32.0, 1.0)]
