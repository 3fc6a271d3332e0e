"""Fixtures of the tests with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SmallRuns


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm starts and measurements, shared by the tests of one session and by nothing else."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_runs(tmp_path: Path, cache: Path) -> SmallRuns:
    return SmallRuns(tmp_path, cache)
