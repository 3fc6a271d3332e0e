"""Damaged logs of each format: read, or refused in one line that begins with the file; never another error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.trajectory import TrajectoryFormatError, read_trajectories
from tests.trajectory.logs.samples import SAMPLES, inspect_archive

WRONG = st.sampled_from(
    [None, -1, 1.5, 10**400, 2**60, float("nan"), float("inf"), "x", "", [], {}, [None], [{}], True]
)
PACKED = {**SAMPLES, "inspect-archive": inspect_archive()}


def assert_read_or_refused(path: Path) -> None:
    try:
        list(read_trajectories(path, lambda _: None))
    except TrajectoryFormatError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)


@settings(deadline=None, max_examples=60)
@given(st.data())
@pytest.mark.parametrize("name", PACKED)
def test_changed_bytes(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    content = PACKED[name]
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    path = tmp_path_factory.mktemp("damaged") / "log"
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=8)) + content[end:])
    assert_read_or_refused(path)


@settings(deadline=None, max_examples=150)
@given(st.data())
@pytest.mark.parametrize("name", [name for name, content in SAMPLES.items() if content.startswith(b"{")])
def test_values_of_another_kind(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    content = SAMPLES[name]
    entries = [json.loads(content)] if content.startswith(b"{\n") else [json.loads(it) for it in content.splitlines()]
    *above, last = data.draw(st.sampled_from(list(places(entries))))
    inner: Any = entries
    for part in above:
        inner = inner[part]
    if data.draw(st.booleans()):
        inner[last] = data.draw(WRONG)
    else:
        del inner[last]
    path = tmp_path_factory.mktemp("damaged") / "log"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    assert_read_or_refused(path)


def places(value: object, above: tuple[Any, ...] = ()) -> Any:
    """Each place inside lists and objects."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*above, key)
        yield from places(below, (*above, key))
