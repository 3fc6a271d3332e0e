"""A plausible result of a benchmark of a GPU."""

from __future__ import annotations

from libra.cost.sources.rates import Calibration, Measured

CALIBRATION = Calibration(
    device="A800",
    torch="2.9.0",
    date="2026-01-31",
    dtype="bf16",
    linear_flops=Measured(100e12, 0.01),
    bandwidth=Measured(1e12, 0.01),
    linear_launch=Measured(1e-5, 0.01),
    attention_flops=Measured(100e12, 0.01),
    attention_launch=Measured(1e-4, 0.01),
    cache_bandwidth=Measured(1e12, 0.01),
    decode_launch=Measured(1e-4, 0.01),
    training_flops=Measured(100e12, 0.01),
    training_parameters=10**9,
)
