"""KV cache groups: layers of a model with a common block table, as in vLLM's `KVCacheGroupSpec`.

Invariant: all groups of an engine allocate blocks from one pool, so a block has the same bytes in each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVGroupKind = Literal["full", "window", "chunk", "state"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same kind of cache.

    `kind` tells what the layers read: `full`, the whole context; `window`, the last `tokens` tokens; `chunk`, the
    tokens of the current chunk of `tokens` tokens; `state`, a state that represents the context. A block has
    `block_size` tokens of every layer of the group. A block of a state group has one state: with prefix caching, the
    state after the block's last token.
    """

    kind: KVGroupKind = "full"
    block_size: int = 16  # tokens
    tokens: int = 0  # of the window or of a chunk

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "chunk", "state"):
            raise ValueError(f"kv_groups: kind is {self.kind!r}; set it to full, window, chunk or state")
        if self.block_size < 1:
            raise ValueError(f"kv_groups: block_size of {self.kind} is {self.block_size}; set it to 1 or more")
        if self.kind in ("full", "state"):
            if self.tokens:
                raise ValueError(f"kv_groups: tokens of {self.kind} is {self.tokens}; only window and chunk have them")
        elif self.tokens < 2:
            raise ValueError(f"kv_groups: tokens of {self.kind} is {self.tokens}; set it to 2 or more")
        elif self.kind == "chunk" and self.tokens % self.block_size:
            raise ValueError(
                f"kv_groups: tokens of chunk is {self.tokens}, which is not a multiple of its block_size"
                f" {self.block_size}; set it to a multiple"
            )
