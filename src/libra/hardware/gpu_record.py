"""Libra's record of one kind of GPU: its data sheet, and the shares of its peak rates that were measured.

Invariant: a record is complete. If a figure was not measured on this GPU, another GPU's share of its peak rate is used,
and the record says so. A missing or impossible figure is an error at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from libra.hardware.gpu import GPU
from libra.hardware.stored_weights import Product

Architecture = Literal["ampere", "ada", "hopper", "blackwell", "cdna"]


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Rates that an engine's kernels reach. Each kernel also takes a fixed time, which dominates the decode of few
    sequences."""

    linear_flops: float  # FLOP/s of large matrix products
    bandwidth: float  # bytes/s of weights and activations
    linear_launch: float  # fixed seconds of a linear layer
    expert_flops: float  # FLOP/s of large grouped products, one product per expert
    attention_flops: float  # FLOP/s of prefill attention
    attention_launch: float  # fixed seconds of prefill attention
    cache_bandwidth: float  # bytes/s of KV read by decode attention
    decode_launch: float  # fixed seconds of decode attention
    pass_launch: float  # fixed seconds of one pass over activations (norm, activation)
    link_latency: float  # fixed seconds of an all-reduce
    peer_latency: float  # fixed seconds that each peer adds
    source: str

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, slots=True)
class TrainingShares:
    """Shares of the data sheet's FLOP/s that training reaches over whole layers."""

    ceiling: float  # model FLOPs utilisation that whole steps of dense models reached
    attention: float  # FlashAttention, forward and backward, at the causal FLOPs
    published: bool  # whether runs on this GPU determined the ceiling; otherwise runs on other GPUs did
    fp8: float | None = None  # the ceiling for products in FP8, as a share of the FP8 FLOP/s; None: no FP8
    origin: str = "published training runs"  # source of the ceiling

    def __post_init__(self) -> None:
        _require_positive(self)
        if max(self.ceiling, self.attention, self.fp8 or 0.0) > 1:
            raise ValueError(f"{self} has a share above 1; a GPU reaches no more than its data sheet")


@dataclass(frozen=True, slots=True)
class TableSystem:
    """A GPU in the kernel tables of aiconfigurator-core."""

    name: str  # in the tables
    vllm: str  # measured version
    sister: str | None = None  # the GPU that was measured, if it is another one


@dataclass(frozen=True, slots=True)
class GPURecord:
    """One kind of GPU. `faster` is the speed of its tensor cores for each type of numbers, relative to bf16."""

    gpu: GPU
    architecture: Architecture
    faster: Mapping[Product, float]
    kernels: KernelRates
    bus: float  # share of one direction of the link that an all-reduce of eight GPUs reaches
    training: TrainingShares
    tables: TableSystem | None  # None: no tables

    def __post_init__(self) -> None:
        if not 0 < self.bus <= 1:
            raise ValueError(f"bus of {self.gpu.name} is {self.bus}; give a share of the link, 0 to 1")
        if any(times < 1 for times in self.faster.values()) or "bf16" in self.faster:
            raise ValueError(f"faster of {self.gpu.name} is {self.faster}; give factors of 1 or more, none for bf16")
        if ("fp8" in self.faster) != (self.training.fp8 is not None):
            raise ValueError(
                f"training.fp8 of {self.gpu.name} is {self.training.fp8}; give it if and only if the GPU "
                f"multiplies in FP8"
            )
        if self.kernels.linear_flops > self.gpu.flops or self.kernels.bandwidth > self.gpu.bandwidth:
            raise ValueError(f"kernels of {self.gpu.name} are faster than its data sheet; correct one of them")


def _require_positive(value: KernelRates | TrainingShares) -> None:
    for it in fields(value):
        given = getattr(value, it.name)
        if isinstance(given, float) and not given > 0:
            raise ValueError(f"{it.name} is {given}; a rate is positive")
