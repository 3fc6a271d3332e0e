"""Measuring that begins again: frames for KV that a lost engine still has are waited for, not done without."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from far_end import PATIENCE, FarEnd, connect

from libra.backends.transport.engine_messages import HandoverMeasured, MeasureHandover
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import KVHandover
from libra.cost.engine_facts import BLOCK_TOKENS
from libra.loop import measure
from libra.loop.fleet import ServingEngine

BLOCKS = 4
ROWS = [(BLOCK_TOKENS, 0.25)]


def play(scenario: Callable[[KVHandover, ServingEngine, FarEnd], Awaitable[None]]) -> None:
    async def run() -> None:
        handle, far = await connect(EngineHandle, lambda name, why: None)
        try:
            entry = ServingEngine(handle, "any", BLOCKS * BLOCK_TOKENS)
            handover = KVHandover(16, BLOCKS * BLOCK_TOKENS)
            await asyncio.wait_for(scenario(handover, entry, far), PATIENCE)
        finally:
            handle.close()
            far.close()

    asyncio.run(run())


def test_frames_of_a_lost_engine_are_measured_with_when_its_process_is_gone() -> None:
    async def scenario(handover: KVHandover, entry: ServingEngine, far: FarEnd) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            lost = handover.leases.lease(2)
            assert lost is not None
            handover.leases.release_after(process.pid, lost)
            measuring = asyncio.create_task(measure._handover_rows(entry, handover))
            await asyncio.sleep(3 * measure._LOOK_SECONDS)
            assert not measuring.done() and far.nothing_waits()
        order = await far.receive()
        assert isinstance(order, MeasureHandover) and len(order.transfer.frames) == BLOCKS
        far.send(HandoverMeasured(ROWS))
        assert await measuring == ROWS
        assert handover.leases.free == BLOCKS

    play(scenario)


def test_frames_that_nobody_gives_back_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_GONE_SECONDS", 3 * measure._LOOK_SECONDS)

    async def scenario(handover: KVHandover, entry: ServingEngine, far: FarEnd) -> None:
        assert handover.leases.lease(1) is not None
        with pytest.raises(TimeoutError, match="4 frames for KV were not free"):
            await measure._handover_rows(entry, handover)
        assert far.nothing_waits()

    play(scenario)
