"""Layouts that spread one model over devices for training.

Invariant: the degrees of a `ParallelLayout` are consistent. `libra.cost.train_memory` tells whether a layout fits into
memory. A `LayoutTable` has many layouts as columns, so that formulas price thousands of layouts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from libra.hardware.checks import require_at_least

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["zero1", "zero2", "zero3"]

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
SHARDING: tuple[Sharding, ...] = get_args(Sharding)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism, and the division of stored state.

    - `recompute`: activations that the backward pass computes again. "selective": norm outputs and the gated product of
    the MLP, which cost only memory traffic; "full": whole layers.
    - `sharding`: state that data- and context-parallel ranks divide (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054).
    "zero1": optimiser state (Megatron's distributed optimiser); "zero2": also gradients; "zero3": also weights (FSDP).
    - `virtual`: model parts on each pipeline device, which alternate with parts of other devices (interleaved 1F1B,
    Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2).
    - `whole_experts`: tensor parallelism does not divide experts (Megatron's expert tensor parallel size is 1 instead
      of
    tp), and expert-parallel groups also contain tensor-parallel ranks.
    """

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int  # expert-parallel groups consist of data- and context-parallel ranks
    micro_tokens: int  # tokens to which a micro-batch is packed; a longer trajectory is a micro-batch by itself
    recompute: Recompute
    sharding: Sharding
    chunked_logits: bool  # whether logits are computed for a few tokens at a time, and again in the backward pass
    virtual: int = 1
    whole_experts: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, ep=self.ep, micro_tokens=self.micro_tokens)
        require_at_least(1, virtual=self.virtual)
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}; choose one of {', '.join(RECOMPUTE)}")
        if self.sharding not in SHARDING:
            raise ValueError(f"sharding is {self.sharding!r}; choose one of {', '.join(SHARDING)}")
        ranks, words = (
            (self.devices // self.pp, "dp * cp * tp") if self.whole_experts else (self.dp * self.cp, "dp * cp")
        )
        if ranks % self.ep:
            raise ValueError(f"ep is {self.ep}; it must divide {words} = {ranks}")
        if self.virtual > 1 and self.pp == 1:
            raise ValueError(f"virtual is {self.virtual} with pp 1; only a pipeline has virtual stages: set it to 1")
        if self.pp > 1 and self.sharding != "zero1":
            raise ValueError(
                f"sharding is {self.sharding!r} with pp {self.pp}; a pipeline accumulates whole gradients of its stage"
                " over micro-batches: set sharding to 'zero1' or pp to 1"
            )

    @property
    def replica_devices(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def devices(self) -> int:
        return self.replica_devices * self.dp

    @property
    def name(self) -> str:
        """Name of the layout: degrees, then the division of stored state."""
        return self._named(str(self.dp))

    @property
    def family(self) -> str:
        """Name that all layouts share which differ only in dp."""
        return self._named("*")

    def _named(self, dp: str) -> str:
        words = [f"tp{self.tp} pp{self.pp} cp{self.cp} dp{dp}"]
        if self.virtual > 1:
            words.append(f"vp{self.virtual}")
        if self.ep > 1:
            words.append(f"ep{self.ep}")
        if self.whole_experts:
            words.append("etp1")
        words.append(self.sharding)
        if self.recompute != "none":
            words.append(f"{self.recompute}-recompute")
        if self.chunked_logits:
            words.append("chunked-logits")
        words.append(f"{self.micro_tokens}-token")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """Layouts as columns of equal length. `recompute` and `sharding` are positions in RECOMPUTE and SHARDING."""

    tp: Array
    pp: Array
    dp: Array
    cp: Array
    ep: Array
    micro_tokens: Array
    recompute: Array
    sharding: Array
    chunked: Array  # 0 or 1
    virtual: Array
    whole: Array  # 0 or 1, `whole_experts`

    @classmethod
    def of(cls, layouts: Sequence[ParallelLayout]) -> LayoutTable:
        rows = [
            (
                *(each.tp, each.pp, each.dp, each.cp, each.ep, each.micro_tokens),
                *(RECOMPUTE.index(each.recompute), SHARDING.index(each.sharding), each.chunked_logits),
                *(each.virtual, each.whole_experts),
            )
            for each in layouts
        ]
        return cls(*np.array(rows, dtype=float).reshape(len(rows), len(fields(cls))).T)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def replica_devices(self) -> Array:
        return self.tp * self.pp * self.cp

    @property
    def expert_parts(self) -> Array:
        """Number of devices that divide the routed experts of a stage."""
        parts: Array = self.ep * np.where(self.whole == 1, 1.0, self.tp)
        return parts

    @property
    def expert_copies(self) -> Array:
        """Number of copies of each routed expert."""
        return self.tp * self.dp * self.cp / self.expert_parts

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> LayoutTable:
        """The layouts at these positions, or at the positions where a mask is true."""
        return LayoutTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def with_dp(self, dp: Array) -> LayoutTable:
        return LayoutTable(*(dp if field.name == "dp" else getattr(self, field.name) for field in fields(self)))

    def layout(self, row: int) -> ParallelLayout:
        return ParallelLayout(
            tp=int(self.tp[row]),
            pp=int(self.pp[row]),
            dp=int(self.dp[row]),
            cp=int(self.cp[row]),
            ep=int(self.ep[row]),
            micro_tokens=int(self.micro_tokens[row]),
            recompute=RECOMPUTE[int(self.recompute[row])],
            sharding=SHARDING[int(self.sharding[row])],
            chunked_logits=bool(self.chunked[row]),
            virtual=int(self.virtual[row]),
            whole_experts=bool(self.whole[row]),
        )
