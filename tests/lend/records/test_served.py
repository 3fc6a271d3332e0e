"""What users saw of servers, and which of their misses lending is to blame for."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra.lend.gate import Slo
from libra.lend.records.served import ServedRequest, attributable, read_served, summarise

SLO = Slo(ttft=1.0, tpot=0.1)


def request(number: int, ttft: float = 0.5, tpot: float = 0.05) -> ServedRequest:
    return ServedRequest(number, float(number), 10, 5, ttft, tpot)


def test_a_miss_is_attributable_where_the_same_request_meets_its_slo_alone() -> None:
    lent = [request(0), request(1, ttft=1.1), request(2, tpot=0.2), request(3, ttft=2.0), request(4, ttft=2.0)]
    alone = [request(0, ttft=3.0), request(1), request(2), request(3, ttft=1.5)]
    assert attributable(lent, alone, SLO) == 2  # the fourth misses it anyway, the fifth nobody asked alone
    assert attributable(alone, alone, SLO) == 0


def test_the_limits_of_an_slo_are_met() -> None:
    assert not request(0, ttft=1.0, tpot=0.1).misses(SLO)


def test_sums_over_all_servers(tmp_path: Path) -> None:
    path = tmp_path / "served-0.jsonl"
    assert read_served(path) == [] and summarise([], SLO) is None
    path.write_text("".join(f"{request(n, ttft=n / 100).to_json()}\n" for n in range(200)))
    found = summarise(read_served(path), SLO)
    assert found is not None and (found.requests, found.missed, found.tpot) == (200, 99, 0.05)
    assert found.ttft == pytest.approx(1.9701)  # 0.99 of the way from 0 to 1.99
