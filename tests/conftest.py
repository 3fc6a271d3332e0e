"""Runs several tests at once, see `lanes`, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from lanes import LONG, PROCESSES, Lanes, turn

HERE = Path(__file__).parent
# Seconds after which a coroutine that would hang fails, and one with real processes. Those in which it waits for a core
# that others have do not count: it does not hang then.
PATIENCE, LONG_PATIENCE = 60.0, 600.0

settings.register_profile("libra", settings(), deadline=None)  # no test judges by the clock
settings.load_profile("libra")


def pytest_configure() -> None:
    """A shell has what it starts in the background ignore SIGINT, and so do the processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not item.nodeid.startswith(PROCESSES), not item.nodeid.startswith(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with turn(item.get_closest_marker("alone") is not None, HERE / "lanes.py", HERE / "conftest.py"):
        return (yield)


@asynccontextmanager
async def _patient(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, by the seconds in which this thread had a core or slept."""
    async with asyncio.timeout(None) as limit:
        expiry = asyncio.create_task(_expire(limit, seconds))
        try:
            yield
        finally:
            expiry.cancel()


async def _expire(limit: asyncio.Timeout, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    ends = clock() + seconds - _waited_for_a_core()
    while (left := ends + _waited_for_a_core() - clock()) > 0:
        await asyncio.sleep(left)
    limit.reschedule(clock())


def _waited_for_a_core() -> float:
    """Seconds, since this thread began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine; async context managers among its fixtures are entered on its event loop."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    patience = PATIENCE if pyfuncitem.get_closest_marker("integration") is None else LONG_PATIENCE

    async def run() -> None:
        async with _patient(patience), AsyncExitStack() as stack:
            arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await test(**arguments)

    if HERE / "serve" / "gateway" in pyfuncitem.path.parents:  # as `libra route` does
        from libra.serve.http import run as run_served

        run_served(run())
    else:
        asyncio.run(run())
    return True
