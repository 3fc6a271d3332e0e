"""State-space mixers: Mamba and Mamba-2.

The invariant of `libra.hardware.states` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware.attention import Products
from libra.hardware.checks import require_at_least
from libra.hardware.context import Array, Retained
from libra.hardware.matrix import Matrix
from libra.hardware.states import INPUT_BYTES, StateMixer


@dataclass(frozen=True, slots=True)
class Mamba(StateMixer):
    """State-space layer of Mamba (arXiv 2312.00752) as in Jamba, with `state` numbers for each channel."""

    width: int  # channels
    state: int
    rank: int  # of the projection that computes time steps
    kernel: int
    state_bytes: int = 2
    conv_bias: bool = True
    bias: bool = False  # of the input and output projections
    kind: Literal["mamba"] = "mamba"

    def __post_init__(self) -> None:
        require_at_least(1, width=self.width, state=self.state, rank=self.rank, kernel=self.kernel)

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        return (
            Matrix("mamba.in_proj", hidden, 2 * self.width, bias=self.bias),
            Matrix("mamba.x_proj", self.width, self.rank + 2 * self.state),
            Matrix("mamba.dt_proj", self.rank, self.width, bias=True),
            Matrix("mamba.out_proj", self.width, hidden),
        )

    def vectors(self, hidden: int, tp: int = 1) -> float:
        convolution = self.width * (self.kernel + (1 if self.conv_bias else 0))
        norms = self.rank + 2 * self.state
        return (convolution + self.width * (self.state + 1)) / tp + norms + (hidden if self.bias else 0)

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        each = (self.kernel - 1) * INPUT_BYTES + self.state * self.state_bytes
        return (Retained(state=self.width * each / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        width = self.width / tp
        return ((hidden, 2 * width), (width, self.rank + 2 * self.state), (self.rank, width), (width, hidden))

    @property
    def token_flops(self) -> float:
        return 5.0 * self.width * self.state

    def saved(self, tp: Array) -> Array:
        found: Array = 6 * self.width / tp + 2.0 * (self.rank + 2 * self.state)
        return found

    def tp_refusal(self, tp: int) -> str | None:
        return f"tp is {tp}; it must divide the {self.width} channels of states" if self.width % tp else None


@dataclass(frozen=True, slots=True)
class Mamba2(StateMixer):
    """State-space layer of Mamba-2 (arXiv 2405.21060), with a matrix of `head_dim` x `state` for each head."""

    heads: int
    head_dim: int
    state: int
    groups: int  # of heads that share input and output vectors
    kernel: int
    state_bytes: int = 2
    conv_bias: bool = True
    bias: bool = False  # of both projections
    normed: bool = True  # whether there is a gated norm before the output projection
    prefix: str = "mixer"  # name of the module
    kind: Literal["mamba2"] = "mamba2"

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, head_dim=self.head_dim, state=self.state, groups=self.groups)
        require_at_least(1, kernel=self.kernel, state_bytes=self.state_bytes)
        if self.heads % self.groups:
            raise ValueError(f"groups is {self.groups}; it must divide the {self.heads} heads of states")

    @property
    def _mixed(self) -> int:
        return self.width + 2 * self.groups * self.state

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        first = self.width + self._mixed + self.heads
        return (
            Matrix(f"{self.prefix}.in_proj", hidden, first, bias=self.bias),
            Matrix(f"{self.prefix}.out_proj", self.width, hidden),
        )

    def vectors(self, hidden: int, tp: int = 1) -> float:
        convolution = self._mixed * (self.kernel + (1 if self.conv_bias else 0))
        norm = self.width if self.normed else 0
        return (convolution + 3 * self.heads + norm) / tp + (hidden if self.bias else 0)

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        """State of a sequence. Groups that the devices cannot divide are repeated on each device."""
        groups = self.groups if self.groups % tp == 0 else tp
        inputs = (self.kernel - 1) * (self.width + 2 * groups * self.state) * INPUT_BYTES
        return (Retained(state=(inputs + self.width * self.state * self.state_bytes) / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        return ((hidden, (self.width + self._mixed + self.heads) / tp), (self.width / tp, hidden))

    @property
    def token_flops(self) -> float:
        """FLOPs per token: decay, an outer product and a product with a vector take 5 per number of the state."""
        return 5.0 * self.width * self.state

    def saved(self, tp: Array) -> Array:
        found: Array = (2 * self._mixed + 3 * self.width + self.heads) / tp
        return found

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tp_refusal(self, tp: int) -> str | None:
        if self.heads % tp:
            return f"tp is {tp}; it must divide the {self.heads} heads of states"
        if self.groups % tp and self.groups != 1:
            return f"tp is {tp}; it must divide the {self.groups} groups of states"
        return None
