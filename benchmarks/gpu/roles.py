"""A role change of one slot, as its parts: an engine that starts, sleeps beside a trainer, and wakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from benchmarks.gpu.orders import HALF, gap, hire, step, turn
from benchmarks.gpu.setting import Setting, lost, parameters
from benchmarks.rows import Row, at_least, at_most
from libra.backends.transport.engine_messages import LoadWeights, Sleep, Wake
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.shared_memory import BUFFERS
from libra.backends.transport.trainer_messages import Publish, Published, SaveCheckpoint
from libra.backends.vllm.engine_handle import EngineHandle

_WOKEN = 0.5  # of the seconds of a start, at most


def roles(setting: Setting, directory: Path) -> list[Row]:
    """An engine that gives its slot to a trainer and comes back with newer weights."""
    return asyncio.run(_roles(setting, directory))


async def _roles(setting: Setting, directory: Path) -> list[Row]:
    model, on_gpu = setting.write(directory / "served", setting.model), setting.gpu is not None
    async with setting.launcher(directory / "logs") as launcher:
        await launcher.ready()
        core, ready = await hire(setting, launcher, model, "core-0", HALF)
        first = await core.ask(Publish(0, 0), Published)
        await core.ask(SaveCheckpoint(str(model), optimiser=False), Acknowledged)
        began = time.monotonic()
        engine = EngineHandle(await launcher.spawn("hybrid-0", 1), lost)
        order = setting.engine_order(model, ready, engine.link, HALF)
        await engine.start(msgspec.structs.replace(order, sleeps=on_gpu))  # vLLM for CPU knows the calls alone
        await engine.load(LoadWeights(0, 0, first.checksum))
        started = time.monotonic() - began
        before, _ = await gap(engine, core, turn("before", setting.tokens, 0, salt="before"))
        full, began = setting.memory_used(engine), time.monotonic()
        await engine.ask(Sleep(), Acknowledged)
        slept, freed = time.monotonic() - began, full - setting.memory_used(engine)
        began = time.monotonic()
        trainer, _ = await hire(setting, launcher, model, "hybrid-0", HALF, slot=1)
        beside = time.monotonic() - began
        done, _ = await step(core, setting, 1)
        await trainer.stop()
        await launcher.gone(trainer.link)
        began = time.monotonic()
        await engine.ask(Wake(), Acknowledged)
        await engine.load(LoadWeights(1, 1 % BUFFERS, done.checksum))
        woke = time.monotonic() - began
        after, versions = await gap(engine, core, turn("after", setting.tokens, 0, salt="after"))
        await asyncio.gather(engine.stop(), core.stop())
    case = "engine to trainer and back"
    held = 2 * parameters(model) + order.kv_cache_bytes
    return [
        Row(case, "start of an engine, with weights", started, "s"),
        Row(case, "it falls asleep", slept, "s"),
        at_least(case, "memory that it gives up", freed / 2**30, "GiB", 0.9 * held / 2**30 if on_gpu else None),
        Row(case, "start of a trainer beside it", beside, "s"),
        at_most(case, "it wakes, with weights / start", woke / started, "", _WOKEN if on_gpu else None),
        at_most(case, "log-prob off the trainer's, before and after", max(before, after), "", setting.gap),
        at_least(case, "version of its tokens", min(versions), "", 1),
    ]
