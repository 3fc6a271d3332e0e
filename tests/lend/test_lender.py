"""What a lender can be counted on for: the share that is certified at the rates to come, and how often it is away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from oracles.small_cluster import A800, QWEN_06B
from oracles.small_lender import CERTIFICATE, lender
from tables import by_name

from libra.hardware.cluster import ServingPool
from libra.lend.certificate import Certificate
from libra.lend.lender import make_lender
from libra.lend.loan_terms import LoanTerms, RatesAhead
from libra.lend.traffic.envelope import Envelope
from libra.lend.traffic.forecast import RateForecast

TERMS = LoanTerms("Qwen/Qwen3-0.6B", 1, 1.0, 0.1, ("c.json",), RatesAhead((16.0,), 300.0))
POOL = ServingPool(replace(A800, name="chat"), TERMS)


@pytest.mark.parametrize(
    ("rates", "share", "away"),
    [
        ([0.5], 0.9, 0.0),
        ([2.0], 0.8, 0.0),
        ([0.5, 3.0], 2 / (1 / 0.9 + 1 / 0.6), 0.0),  # half the work takes 1 / 0.9 as long, half 1 / 0.6
        ([0.5, 3.0, 5.0, 9.0], 2 / (1 / 0.9 + 1 / 0.6), 0.5),
        ([5.0], 0.0, 1.0),
    ],
)
def test_shares_are_those_certified_at_the_rates_to_come(rates: list[float], share: float, away: float) -> None:
    made = lender(*rates)
    assert made.share(CERTIFICATE) == pytest.approx(share)
    assert made.away(CERTIFICATE) == away
    assert made.recalls(CERTIFICATE) == pytest.approx(away * (1 - away) / 300.0)


def test_nothing_is_lent_beyond_the_busiest_minute_of_the_replay() -> None:
    short = replace(CERTIFICATE, envelope=Envelope(1.5, 8000, 40, 60_000, 60.0))
    assert (short.share_at(1.5), short.share_at(1.6)) == (0.8, 0.0)


def test_a_forecast_takes_the_place_of_the_rates() -> None:
    assert lender(1.0).expecting(RateForecast(2.0, (1.5, 2.5))).rates == (1.5, 2.5)


def made(certificates: Sequence[Certificate] = (CERTIFICATE,), pool: ServingPool = POOL) -> Any:
    return make_lender(pool, QWEN_06B, [("c.json", it) for it in certificates], (32.0, 16.0), 300.0)


def test_a_pool_spreads_its_traffic_over_its_engines() -> None:
    found = made()
    assert (found.pool, found.devices, found.rates) == ("chat", 1, (1.0, 2.0))  # 16 devices, an engine each
    pairs = replace(POOL, lends=replace(TERMS, tensor_parallel_size=2))
    assert made([replace(CERTIFICATE, hardware="2 x A800")], pairs).rates == (2.0, 4.0)


REFUSED: list[tuple[str, Any, str]] = [
    ("nothing is lent", lambda: made(pool=replace(POOL, lends=None)), "pool chat has no lends; add its model"),
    ("another model", lambda: made([replace(CERTIFICATE, model="m")]), "c.json: the certificate is for m, not"),
    ("other hardware", lambda: made([replace(CERTIFICATE, hardware="2 x A800")]), "is for 2 x A800, not for 1 x A800"),
    ("too many parts", lambda: made(pool=replace(POOL, nodes=replace(POOL.nodes, gpus=32), lends=replace(TERMS,
     tensor_parallel_size=32))), "tensor_parallel_size: Qwen/Qwen3-0.6B: "),
    ("a laxer SLO", lambda: made(pool=replace(POOL, lends=replace(TERMS, ttft=0.5))), "ttft is 0.5 s; the certificate"),
    ("one use twice", lambda: made([CERTIFICATE, CERTIFICATE]), "certificates: two have use 0.8; keep"),
    ("no rate", lambda: lender(), "rates of chat are (); give one or more"),
    ("an endless rate", lambda: lender(float("inf")), "rates of chat are (inf,)"),
    ("no time", lambda: lender(1.0, period=0.0), "a period of 0 s"),
    ("no certificate", lambda: lender(1.0, certificates=()), "certificates of chat have use []"),
]  # fmt: skip


@by_name("make, message", REFUSED)
def test_what_was_not_certified_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        make()
    assert message in str(refusal.value)
