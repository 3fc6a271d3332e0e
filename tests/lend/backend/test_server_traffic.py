"""Which requests come to a server under recorded traffic, and when."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from libra.backends.transport.engine_messages import StartServer

pytest.importorskip("vllm")


def arrivals(directory: Path, **changes: float) -> list[tuple[int, float]]:
    """Number and time of the first seven; four are recorded, a second apart."""
    from libra.lend.backend.traced_server import _arrivals

    traffic = directory / "traffic.csv"
    rows = [f"2023-11-16 18:00:0{second}.0000000,10,5" for second in range(4)]
    traffic.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    asked = {"speed": 1.0, "shorter": 1.0, "begins": 0.0, "first": 0, **changes}
    start = StartServer("", True, 64, 8, 64, 0, "float32", 0, "", 1.0, (0,), str(traffic), served="", **asked)  # type: ignore[arg-type]
    return [(it.number, round(it.at, 3)) for it in islice(_arrivals(start), 7)]


def test_the_record_begins_again_behind_its_end(tmp_path: Path) -> None:
    whole = [(number, float(number)) for number in range(7)]
    assert arrivals(tmp_path) == whole
    assert arrivals(tmp_path, speed=2.0) == [(number, at / 2) for number, at in whole]
    assert arrivals(tmp_path, begins=0.5) == whole  # counted from there


def test_a_later_server_goes_on_where_the_one_before_was(tmp_path: Path) -> None:
    assert arrivals(tmp_path, first=6) == [(number, float(number)) for number in range(6, 13)]
