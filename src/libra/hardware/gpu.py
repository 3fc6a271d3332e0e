"""One accelerator, by its data sheet.

Invariant: every number is possible. Sizes are in bytes, rates in bytes or FLOP per second.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of the driver's total that PyTorch does not report: 0.35 to 0.9 GiB on 14 kinds of GPU with 16 to 288 GB.
_RESERVED = 0.55 * 2.0**30
_PCIE = 64e9  # bytes/s in one direction, PCIe 5 x16

# Limits far beyond present GPUs. A value outside them must be in another unit.
_GPU_RANGES = {
    "memory": (1e9, 4e12),
    "bandwidth": (1e10, 1e14),  # from GDDR on a small card to ten stacks of HBM
    "flops": (1e12, 1e17),
    "link": (1e9, 2e12),
}


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator, by its data sheet. Raises `ValueError` for an impossible number."""

    name: str
    memory: float  # bytes of device memory
    bandwidth: float  # bytes/s of device memory
    flops: float  # dense bf16 FLOP/s, without sparsity
    link: float  # bytes/s to other GPUs in the node, one direction (NVLink or PCIe): half the advertised sum
    source: str
    visible: float | None = None  # bytes of memory that PyTorch reports; None: unknown

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name is empty; give one")
        for field, (low, high) in _GPU_RANGES.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field} is {value:g}; a GPU has {low:g} to {high:g}: check its unit")

    @property
    def usable(self) -> float:
        """Bytes of memory that PyTorch reports. An engine's share of memory is a share of these bytes."""
        return self.memory - _RESERVED if self.visible is None else self.visible

    @property
    def switched(self) -> bool:
        """Whether the link to other GPUs is faster than PCIe. Buffers of collectives are then in GPU memory."""
        return self.link > _PCIE
