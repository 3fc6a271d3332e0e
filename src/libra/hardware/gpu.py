"""One accelerator, by its data sheet.

Invariant: its numbers are possible. Sizes are bytes, rates are bytes or FLOP per second.
"""

from __future__ import annotations

from dataclasses import dataclass

_VISIBLE = 0.987  # of what the driver reports, as on L40S and RTX 3090: the context takes the rest

# Limits that no GPU of today comes near. A value outside was given in another unit.
_GPU_RANGES = {
    "memory": (1e9, 4e12),
    "bandwidth": (1e10, 1e14),  # of GDDR on a small card, to ten stacks of HBM
    "flops": (1e12, 1e17),
    "link": (1e9, 2e12),
}


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator, by its data sheet. Raises ValueError for an impossible number."""

    name: str
    memory: float  # bytes of device memory
    bandwidth: float  # bytes/s of device memory
    flops: float  # dense bf16 FLOP/s, without sparsity
    link: float  # bytes/s to its neighbours in the node, one direction (NVLink or PCIe): half the advertised sum
    source: str
    visible: float | None = None  # bytes of memory that PyTorch reports; None: not known

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name is empty; give one")
        for field, (low, high) in _GPU_RANGES.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field} is {value:g}; a GPU has {low:g} to {high:g}: check its unit")

    @property
    def usable(self) -> float:
        """Bytes of memory as PyTorch reports them, of which engines take their share."""
        return _VISIBLE * self.memory if self.visible is None else self.visible
