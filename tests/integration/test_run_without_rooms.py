"""A whole run in a copy of the project that has only the core."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.roomless import Roomless

from libra.config.rooms import ROOMS

pytestmark = pytest.mark.integration


def test_a_run_needs_no_room(tmp_path: Path) -> None:
    run = "tests/integration/test_small_run.py::test_a_run_ends_with_everything_accounted_for"
    Roomless(ROOMS, tmp_path).test(run, seconds=600)
