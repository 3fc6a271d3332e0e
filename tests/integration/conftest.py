"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from shared_fork_server import SharedForkServer, shared_fork_server
from small_runs import SmallRuns


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts and measurements, shared by the tests of one session and by nothing else."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_runs(tmp_path: Path, cache: Path) -> Iterator[SmallRuns]:
    with TemporaryDirectory(prefix="runs-") as temporary:
        yield SmallRuns(tmp_path, Path(temporary), cache)


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedForkServer]:
    with shared_fork_server(tmp_path_factory.mktemp("logs")) as fork_server:
        yield fork_server
