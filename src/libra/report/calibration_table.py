"""What a device was measured to do, as a table.

Invariant: medians with the spread they were measured with, and utilisation only against a data sheet that was named.
"""

from __future__ import annotations

from rich.table import Table

from libra.cost.sources.rates import Calibration, Measured
from libra.hardware.cluster import GPU
from libra.report.words import percent


def calibration_table(found: Calibration, gpu: GPU | None) -> Table:
    table = Table(title=f"{found.device}, PyTorch {found.torch}, {found.dtype}")
    for name in ("what", "median", "unit", "spread"):
        table.add_column(name, justify="left" if name in ("what", "unit") else "right")
    _row(table, "linear layers", found.linear_flops, 1e12, "TFLOP/s")
    _row(table, "reading weights", found.bandwidth, 1e9, "GB/s")
    _row(table, "fixed time of a linear layer", found.linear_launch, 1e-6, "us")
    _row(table, "attention, prefill", found.attention_flops, 1e12, "TFLOP/s")
    _row(table, "reading KV", found.cache_bandwidth, 1e9, "GB/s")
    _row(table, "fixed time of decode attention", found.decode_launch, 1e-6, "us")
    _row(
        table,
        f"training step, {found.training_parameters / 1e6:,.0f} M parameters",
        found.training_flops,
        1e12,
        "TFLOP/s",
    )
    if gpu is not None:
        table.add_row("training step, of the data sheet", percent(found.mfu(gpu)), f"MFU on {gpu.name}", "")
    return table


def _row(table: Table, what: str, measured: Measured, unit: float, name: str) -> None:
    table.add_row(what, f"{measured.median / unit:,.4g}", name, percent(measured.spread))
