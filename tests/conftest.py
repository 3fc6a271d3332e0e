"""Runs several tests at once, see `lanes`, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from lanes import PROCESSES, Lanes, turn

HERE = Path(__file__).parent
# Seconds after which a coroutine that would hang fails, and one with real processes.
PATIENCE, LONG_PATIENCE = 60.0, 600.0

settings.register_profile("libra", settings(), deadline=None)  # no test judges by the clock
settings.load_profile("libra")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(PROCESSES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with turn(item.get_closest_marker("alone") is not None, HERE / "lanes.py", HERE / "conftest.py"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine; async context managers among its fixtures are entered on its event loop."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    patience = PATIENCE if pyfuncitem.get_closest_marker("integration") is None else LONG_PATIENCE

    async def run() -> None:
        async with asyncio.timeout(patience), AsyncExitStack() as stack:
            arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await test(**arguments)

    asyncio.run(run())
    return True
