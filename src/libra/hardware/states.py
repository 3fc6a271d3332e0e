"""Mixers that keep a state of constant size per sequence: delta networks, lightning attention, short convolutions.

The invariant of `libra.hardware.attention` holds. States have the shapes of vLLM's `MambaStateShapeCalculator`: the
last inputs of a convolution in 16 bits, and matrices in a type of their own. FLOPs are those of the recurrence; chunked
kernels take slightly more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware.attention import Products
from libra.hardware.checks import require_at_least
from libra.hardware.context import Array, Read, Retained
from libra.hardware.matrix import Matrix

INPUT_BYTES = 2  # per input that a convolution keeps


@dataclass(frozen=True, slots=True)
class StateMixer:
    """Methods that all mixers with states share."""

    @property
    def token_flops(self) -> float:
        return 0.0

    def reads(self, tp: int = 1) -> tuple[Read, ...]:
        return ()

    def decompressed(self, tp: int) -> tuple[float, float] | None:
        return None

    def ring(self, tp: Array) -> Array:
        """Numbers that context parallelism sends per token: 0, since a rank sends its state only once."""
        nothing: Array = 0.0 * tp
        return nothing


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(StateMixer):
    """Gated delta network (arXiv 2412.06464) of Qwen3-Next and Qwen3.5, with a matrix for each value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # width of the convolution in tokens
    state_bytes: int = 2  # per number of the matrices
    kind: Literal["gated_delta_net"] = "gated_delta_net"

    def __post_init__(self) -> None:
        require_at_least(1, key_heads=self.key_heads, value_heads=self.value_heads, kernel=self.kernel)
        require_at_least(1, key_dim=self.key_dim, value_dim=self.value_dim, state_bytes=self.state_bytes)
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads is {self.key_heads}; it must divide the {self.value_heads} value heads")

    @property
    def _mixed(self) -> int:
        """Width of queries, keys and values, which pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.width

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        return (
            Matrix("linear_attn.in_proj_qkv", hidden, self._mixed),
            Matrix("linear_attn.in_proj_z", hidden, self.width),
            Matrix("linear_attn.in_proj_b", hidden, self.value_heads),
            Matrix("linear_attn.in_proj_a", hidden, self.value_heads),
            Matrix("linear_attn.out_proj", self.width, hidden),
        )

    def vectors(self, hidden: int, tp: int = 1) -> float:
        return (self._mixed * self.kernel + 2 * self.value_heads) / tp + self.value_dim

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        inputs = (self.kernel - 1) * self._mixed * INPUT_BYTES
        return (Retained(state=(inputs + self.width * self.key_dim * self.state_bytes) / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        return ((hidden, (self._mixed + self.width + 2 * self.value_heads) / tp), (self.width / tp, hidden))

    @property
    def token_flops(self) -> float:
        """FLOPs per token: decay, two products of the state with a vector, and an outer product take 7 per number of
        the state.
        """
        return 7.0 * self.width * self.key_dim

    def saved(self, tp: Array) -> Array:
        found: Array = (2 * self._mixed + 3 * self.width) / tp
        return found

    @property
    def width(self) -> int:
        return self.value_heads * self.value_dim

    def tp_refusal(self, tp: int) -> str | None:
        return f"tp is {tp}; it must divide the {self.key_heads} key heads of states" if self.key_heads % tp else None


@dataclass(frozen=True, slots=True)
class KimiDelta(StateMixer):
    """Kimi's delta attention (arXiv 2510.26692): a delta network with a separate decay for each channel."""

    heads: int
    head_dim: int
    kernel: int
    full_gate: bool = False  # whether the output gate is one matrix, rather than two with the rank of a head
    state_bytes: int = 4
    kind: Literal["kimi_delta"] = "kimi_delta"

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, head_dim=self.head_dim, kernel=self.kernel, state_bytes=self.state_bytes)

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        made = [Matrix(f"self_attn.{name}_proj", hidden, self.width) for name in "qkv"]
        made.append(Matrix("self_attn.f_a_proj", hidden, self.head_dim, 1))
        made.append(Matrix("self_attn.f_b_proj", self.head_dim, self.width))
        made.append(Matrix("self_attn.b_proj", hidden, self.heads))
        if self.full_gate:
            made.append(Matrix("self_attn.g_proj", hidden, self.width))
        else:
            made.append(Matrix("self_attn.g_a_proj", hidden, self.head_dim, 1))
            made.append(Matrix("self_attn.g_b_proj", self.head_dim, self.width))
        return (*made, Matrix("self_attn.o_proj", self.width, hidden))

    def vectors(self, hidden: int, tp: int = 1) -> float:
        return (3 * self.width * self.kernel + self.width + self.heads) / tp + self.head_dim

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        inputs = (self.kernel - 1) * 3 * self.width * INPUT_BYTES
        return (Retained(state=(inputs + self.width * self.head_dim * self.state_bytes) / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        first = (3 + (1 if self.full_gate else 0)) * self.width / tp + self.head_dim + self.heads / tp
        if self.full_gate:
            return ((hidden, first), (self.head_dim, self.width / tp), (self.width / tp, hidden))
        second = (self.head_dim, 2 * self.width / tp)
        return ((hidden, first + self.head_dim), second, (self.width / tp, hidden))

    @property
    def token_flops(self) -> float:
        return 7.0 * self.width * self.head_dim

    def saved(self, tp: Array) -> Array:
        found: Array = 9 * self.width / tp + 2.0 * self.head_dim
        return found

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tp_refusal(self, tp: int) -> str | None:
        return f"tp is {tp}; it must divide the {self.heads} heads of states" if self.heads % tp else None


@dataclass(frozen=True, slots=True)
class Lightning(StateMixer):
    """Lightning attention (arXiv 2405.17381) of MiniMax-Text-01 and M1: a decaying sum of keys times values."""

    heads: int
    head_dim: int
    state_bytes: int = 4
    kind: Literal["lightning"] = "lightning"

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, head_dim=self.head_dim, state_bytes=self.state_bytes)

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        return (
            Matrix("self_attn.qkv_proj", hidden, 3 * self.width),
            Matrix("self_attn.output_gate", hidden, self.width),
            Matrix("self_attn.out_proj", self.width, hidden),
        )

    def vectors(self, hidden: int, tp: int = 1) -> float:
        return self.width / tp

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        return (Retained(state=self.width * self.head_dim * self.state_bytes / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        return ((hidden, 4 * self.width / tp), (self.width / tp, hidden))

    @property
    def token_flops(self) -> float:
        return 5.0 * self.width * self.head_dim

    def saved(self, tp: Array) -> Array:
        found: Array = 7 * self.width / tp
        return found

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tp_refusal(self, tp: int) -> str | None:
        return f"tp is {tp}; it must divide the {self.heads} heads of states" if self.heads % tp else None


@dataclass(frozen=True, slots=True)
class ShortConvolution(StateMixer):
    """Gated convolution over a few tokens (LFM2)."""

    channels: int
    kernel: int
    bias: bool = False
    kind: Literal["short_convolution"] = "short_convolution"

    def __post_init__(self) -> None:
        require_at_least(1, channels=self.channels, kernel=self.kernel)

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        return (
            Matrix("conv.in_proj", hidden, 3 * self.channels, bias=self.bias),
            Matrix("conv.out_proj", self.channels, hidden),
        )

    def vectors(self, hidden: int, tp: int = 1) -> float:
        bias = 1 if self.bias else 0
        return self.channels * (self.kernel + bias) / tp + bias * hidden

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        return (Retained(state=(self.kernel - 1) * self.channels * INPUT_BYTES / tp),)

    def products(self, hidden: int, tp: int) -> Products:
        return ((hidden, 3 * self.channels / tp), (self.channels / tp, hidden))

    def saved(self, tp: Array) -> Array:
        found: Array = 5 * self.channels / tp
        return found

    @property
    def width(self) -> int:
        return self.channels

    def tp_refusal(self, tp: int) -> str | None:
        return f"tp is {tp}; it must divide the {self.channels} channels" if self.channels % tp else None
