"""Full collections come when they are due, and Python's own ways come back."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from libra import rare_collection
from libra.rare_collection import collecting_rarely


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_refers_to_itself_is_found_though_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rare_collection, "_SECONDS", 0.05)
    before = gc.get_threshold()

    async def serve() -> None:
        async with collecting_rarely():
            assert gc.get_freeze_count() > 0 and gc.get_threshold()[2] > 1000
            gone = weakref.ref(Circle())
            gc.collect(1)  # it is old now
            for _ in range(100):
                await asyncio.sleep(0.02)
                if gone() is None:
                    return
            raise AssertionError("nobody collected it")

    asyncio.run(serve())
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
