"""Lets several tests be made at once, see `lanes`."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from lanes import PROCESSES, Lanes, turn

HERE = Path(__file__).parent

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
