"""Measuring that begins again: frames for KV that a lost engine still has are waited for, not done without."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.far_end import FarEnd, connect

from libra.backends.transport.engine_messages import HandoverMeasured, MeasureHandover
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import KVHandover
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.loop import measure
from libra.loop.fleet import ServingEngine

BLOCKS = 4
ROWS = [(BLOCK_TOKENS, 0.25)]


Measured = tuple[KVHandover, ServingEngine, FarEnd]


@pytest.fixture
@asynccontextmanager
async def measured() -> AsyncIterator[Measured]:
    handle, far = await connect(EngineHandle, lambda name, why: None)
    try:
        yield KVHandover(16, BLOCKS * BLOCK_TOKENS), ServingEngine(handle, "any", BLOCKS * BLOCK_TOKENS), far
    finally:
        handle.close()
        far.close()


async def test_frames_of_a_lost_engine_are_measured_with_when_its_process_is_gone(measured: Measured) -> None:
    handover, entry, far = measured
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


async def test_frames_that_nobody_gives_back_are_an_error(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    handover, entry, far = measured
    monkeypatch.setattr(measure, "_GONE_SECONDS", 3 * measure._LOOK_SECONDS)
    assert handover.leases.lease(1) is not None
    with pytest.raises(TimeoutError, match="4 frames for KV were not free"):
        await measure._handover_rows(entry, handover)
    assert far.nothing_waits()
