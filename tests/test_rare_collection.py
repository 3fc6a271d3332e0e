"""Collections come with growth alone, and Python's own ways come back."""

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


def test_what_refers_to_itself_is_found_when_there_is_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rare_collection, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(rare_collection, "_GROWN", 50_000)
    collected: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    async def serve() -> None:
        async with collecting_rarely():
            assert gc.get_freeze_count() > 0
            gc.callbacks.append(noted)
            gone = weakref.ref(Circle())
            for _ in range(20):  # requests come and go, and nothing grows
                assert len([Circle.__new__(Circle) for _ in range(20_000)]) == 20_000
                await asyncio.sleep(0.01)
            assert not collected and gone() is not None
            kept = [Circle() for _ in range(60_000)]
            async with asyncio.timeout(20):
                while gone() is not None:
                    await asyncio.sleep(0.01)
            assert collected == ["start", "stop"] and len(kept) == 60_000

    try:
        asyncio.run(serve())
    finally:
        gc.callbacks.remove(noted)
    assert gc.isenabled() and gc.get_freeze_count() == 0
