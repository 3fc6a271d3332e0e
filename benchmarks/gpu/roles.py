"""A role change of one slot, as its parts: an engine that starts, sleeps beside a trainer, and wakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.gpu.orders import Stage, gap, step, turn
from benchmarks.gpu.setting import Setting, parameters
from benchmarks.rows import Row, at_least, at_most
from libra.backends.transport.engine_messages import LoadWeights, Sleep, Wake
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.shared_memory import BUFFERS

_WOKEN = 0.5  # of the seconds of a start, at most


async def roles(setting: Setting, directory: Path) -> list[Row]:
    """An engine that gives its slot to a trainer and comes back with newer weights."""
    on_gpu = setting.gpu is not None
    async with Stage.open(setting, directory, setting.model) as stage:
        core, ready, checksum = await stage.first("core-0")
        began = time.monotonic()
        engine, order = await stage.engine("hybrid-0", ready, sleeps=on_gpu)  # vLLM for CPU knows the calls alone
        await engine.load(LoadWeights(0, 0, checksum))
        started = time.monotonic() - began
        before, _ = await gap(engine, core, turn("before", setting.tokens, 0, salt="before"))
        full, began = setting.memory_used(engine), time.monotonic()
        await engine.ask(Sleep(), Acknowledged)
        slept, freed = time.monotonic() - began, full - setting.memory_used(engine)
        began = time.monotonic()
        trainer, _ = await stage.trainer("hybrid-0", slot=1)
        beside = time.monotonic() - began
        done, _ = await step(core, setting, 1)
        await trainer.stop()
        await stage.launcher.gone(trainer.link)
        began = time.monotonic()
        await engine.ask(Wake(), Acknowledged)
        await engine.load(LoadWeights(1, 1 % BUFFERS, done.checksum))
        woke = time.monotonic() - began
        after, versions = await gap(engine, core, turn("after", setting.tokens, 0, salt="after"))
        await asyncio.gather(engine.stop(), core.stop())
    case = "engine to trainer and back"
    held = 2 * parameters(stage.model) + order.kv_cache_bytes
    return [
        Row(case, "start of an engine, with weights", started, "s"),
        Row(case, "it falls asleep", slept, "s"),
        at_least(case, "memory that it gives up", freed / 2**30, "GiB", 0.9 * held / 2**30 if on_gpu else None),
        Row(case, "start of a trainer beside it", beside, "s"),
        at_most(case, "it wakes, with weights / start", woke / started, "", _WOKEN if on_gpu else None),
        at_most(case, "log-prob off the trainer's, before and after", max(before, after), "", setting.gap),
        at_least(case, "version of its tokens", min(versions), "", 1),
    ]
