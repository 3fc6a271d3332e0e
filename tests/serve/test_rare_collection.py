"""Collections come with connections that leave something, and Python's own ways come back."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from libra.serve import rare_collection
from libra.serve.rare_collection import Connections, collecting_rarely


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_connections_that_leave_something_lead_to_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rare_collection, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(rare_collection, "_CONNECTIONS", 10_000)
    collected: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    async def serve() -> None:
        connections = Connections()
        async with collecting_rarely(connections):
            assert gc.get_freeze_count() > 0
            gc.callbacks.append(noted)
            gone = weakref.ref(Circle())
            connections.made = 10_000
            for _ in range(20):  # they leave nothing: requests come and go
                assert len([Circle.__new__(Circle) for _ in range(20_000)]) == 20_000
                await asyncio.sleep(0.01)
            assert not collected and connections.made == 10_000
            connections.made = 9_999
            waiting = [Circle() for _ in range(100_000)]  # grown, but not by what connections leave
            await asyncio.sleep(0.2)
            assert not collected and gone() is not None
            connections.made += 1
            async with asyncio.timeout(20):
                while gone() is not None:
                    await asyncio.sleep(0.01)
            assert collected == ["start", "stop"] and connections.made == 0
            assert len(waiting) == 100_000

    try:
        asyncio.run(serve())
    finally:
        gc.callbacks.remove(noted)
    assert gc.isenabled() and gc.get_freeze_count() == 0
