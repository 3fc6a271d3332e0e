"""Tests that are tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def by_name(arguments: str, rows: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize by rows of a name and its arguments."""
    return pytest.mark.parametrize(arguments, [row[1:] for row in rows], ids=[row[0] for row in rows])
