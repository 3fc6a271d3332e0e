"""The parts of a context that a layer attends to, stores and reads.

Invariant: amounts are for one layer and one device. `number` is the bytes of one number in the engine's KV type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that a token attends to: all earlier keys, the last `tokens` keys, or the keys in its own chunk of
    `tokens` tokens.

    After the first chunk, a token is assumed to see half a chunk on average.
    """

    tokens: int = 0  # 0: all keys
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0 or (self.chunked and not self.tokens):
            raise ValueError(f"reach.tokens is {self.tokens}; set it to 1 or more, or to 0 for all keys without chunks")

    @property
    def _far(self) -> float:
        return self.tokens / 2 if self.chunked else float(self.tokens)

    def seen(self, context: Array) -> Array:
        """Number of keys that the next token sees after `context` tokens."""
        return np.where(context < self.tokens, context, self._far) if self.tokens else context

    def pairs(self, new: Array, prefix: Array) -> Array:
        """Total number of keys that `new` tokens see after `prefix` tokens; each token counts as half a key for
        itself."""
        if not self.tokens:
            every: Array = new * (prefix + new / 2)
            return every
        growing = np.clip(self.tokens - prefix, 0, new)
        limited: Array = growing * (prefix + growing / 2) + (new - growing) * self._far
        return limited

    def share(self, mean: float) -> float:
        """Ratio of all keys that tokens see to all tokens before them, in a sequence of 2 * `mean` tokens. There, a
        token has `mean` tokens before it on average.
        """
        if not self.tokens or mean <= 0:
            return 1.0
        length = np.array(2.0 * mean)
        return float(self.pairs(length, np.zeros(()))) / (2.0 * mean * mean)


ALL = Reach()


@dataclass(frozen=True, slots=True)
class Retained:
    """Memory of one sequence: bytes per token within reach, and a state of constant size."""

    numbers: float = 0.0  # per token, in the KV type
    plain: float = 0.0  # bytes per token of a type that the engine does not choose
    reach: Reach = ALL
    state: float = 0.0  # bytes, independent of the length
    least: float = 0.0  # fewest bytes of a token's numbers, in any KV type

    def token_bytes(self, number: float) -> float:
        """Bytes of a token within reach."""
        return max(self.numbers * number, self.least) + self.plain

    def bytes(self, context: float, number: float) -> float:
        """Bytes of a sequence of `context` tokens. This excludes blocks of a window that a running prefill still needs,
        for up to `max_num_batched_tokens` tokens of one sequence.
        """
        tokens = min(context, self.reach.tokens) if self.reach.tokens else context
        return tokens * self.token_bytes(number) + self.state

    @property
    def grows(self) -> bool:
        """Whether every token adds the same number of bytes, at any length."""
        return not self.reach.tokens and not self.state


@dataclass(frozen=True, slots=True)
class Read:
    """Keys and values that attention reads for one token, and its FLOPs."""

    numbers: float  # per key with its value, in the KV type
    flops: float  # per key of a decoding sequence
    pair_flops: float  # per pair of a token and a key in a prefill
    reach: Reach = ALL
    plain: float = 0.0  # bytes per key of a type that the engine does not choose
