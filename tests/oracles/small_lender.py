"""A serving pool next to the small cluster, with its certificates."""

from __future__ import annotations

from dataclasses import replace

from libra.hardware.cluster import ServingPool
from libra.lend.certificate import Certificate, Harvest
from libra.lend.gate import Slo
from libra.lend.lender import Lender
from libra.lend.traffic.envelope import Envelope
from oracles.small_cluster import A800, QWEN_06B

SERVING = ServingPool(replace(A800, name="chat", count=1))
CERTIFICATE = Certificate(
    model=QWEN_06B.name,
    hardware="1 x A800",
    slo=Slo(1.0, 0.1),
    use=0.8,
    longest_grant=0.1,
    longest_step=0.03,
    envelope=Envelope(rate=6.0, queued=8000, live=40, context=60_000, window=60.0),
    harvest=(Harvest(1.0, 0.9), Harvest(2.0, 0.8), Harvest(4.0, 0.6)),
    traffic="made.csv",
    requests=1000,
    missed_alone=0,
)


def lender(*rates: float, certificates: tuple[Certificate, ...] = (CERTIFICATE,), period: float = 300.0) -> Lender:
    """A lender with an engine on each device of the pool."""
    return Lender("chat", QWEN_06B, 1, certificates, tuple(sorted(rates)), period)
