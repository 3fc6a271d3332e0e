"""Layouts of KV cache groups: the blocks that a group of layers needs, the blocks that it no longer reads, and its
cache hits.

Invariant: each layout follows one of vLLM's managers (`single_type_kv_cache_manager.py`). A place is the number of a
block in a request's table; blocks that were released, or never taken, keep their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from libra.hardware.kv_groups import KVGroup
from libra.sim.engine.group_blocks import Prefix


class Layout:
    """Layers that read the whole context: vLLM's `FullAttentionManager`."""

    __slots__ = ("ahead", "alignment", "block_size", "most", "period")

    def __init__(self, block_size: int, alignment: int) -> None:
        self.block_size = block_size
        self.alignment = alignment  # tokens: hits are whole multiples of it
        self.most = 0  # blocks of one request while its prompt is computed; 0: as many as its context has
        # The first place that is read changes after `ahead` tokens, and again after each `period`; 0: it never changes
        self.ahead = self.period = 0

    def first(self, processed: int) -> int:
        """The first place that the next token reads, after `processed` tokens."""
        return 0

    def blocks(self, tokens: int) -> int:
        """Number of places for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def places(self, end: int, tokens: int) -> range:
        """Places for which blocks are taken when a table of `end` places is extended to `tokens` tokens."""
        return range(end, self.blocks(tokens))

    def new_blocks(self, before: int, after: int) -> int:
        """Blocks that are taken when a context grows from `before` to `after` tokens."""
        return self.blocks(after) - self.blocks(before)

    def reserved(self, found: int, tokens: int) -> int:
        """Blocks that must be free to admit a prompt of `tokens` tokens, the first `found` of which are cached."""
        blocks = self.blocks(tokens)
        if self.most:
            blocks = min(blocks, self.most)
        return max(0, blocks - self.blocks(found))

    def held(self, longest: int, ahead: bool) -> int:
        """Most blocks that one request of `longest` tokens holds. `ahead`: with asynchronous scheduling."""
        return self.most or self.blocks(longest)

    def starts(self) -> range:
        """Lengths of contexts, in tokens below the alignment, whose next token needs a new block."""
        return range(0, self.alignment, self.block_size)

    def keeps(self, place: int) -> bool:
        """Whether the block at a place can be part of a hit."""
        return True

    def hit(self, prefix: Prefix, tokens: int) -> int:
        """Cached tokens of a context, at most `tokens`."""
        place, end = 0, tokens // self.block_size
        while place < end and prefix.has(place):
            place += 1
        found = place * self.block_size
        return found - found % self.alignment


class WindowLayout(Layout):
    """Layers that read the last `window` tokens, the new one included: vLLM's `SlidingWindowManager`."""

    __slots__ = ("_needed", "window")

    def __init__(self, block_size: int, alignment: int, window: int, most: int) -> None:
        super().__init__(block_size, alignment)
        self.window = window
        self.most = most
        self.ahead, self.period = window - 1, block_size
        self._needed = -(-(window - 1) // block_size)  # blocks in a row, for a hit

    def first(self, processed: int) -> int:
        return max(0, processed - self.window + 1) // self.block_size

    def keeps(self, place: int) -> bool:
        segment = self.alignment // self.block_size
        return self._needed >= segment or place % segment >= segment - self._needed

    def hit(self, prefix: Prefix, tokens: int) -> int:
        size, row = self.block_size, 0
        for place in range(tokens // size - 1, -1, -1):
            if not prefix.has(place):
                row = 0
            elif row or (place + 1) * size % self.alignment == 0:
                row += 1
                if row == self._needed:
                    return (place + row) * size
        return row * size


class ChunkLayout(Layout):
    """Layers that read the current chunk of `chunk` tokens: vLLM's `ChunkedLocalAttentionManager`."""

    __slots__ = ("chunk",)

    def __init__(self, block_size: int, alignment: int, chunk: int, most: int) -> None:
        super().__init__(block_size, alignment)
        self.chunk = chunk
        self.most = most
        self.period = chunk

    def first(self, processed: int) -> int:
        return processed // self.chunk * self.chunk // self.block_size

    def hit(self, prefix: Prefix, tokens: int) -> int:
        place, end = self.first(tokens), tokens // self.block_size
        while place < end and prefix.has(place):
            place += 1
        return place * self.block_size


class StateLayout(Layout):
    """Layers with a state, kept at the ends of iterations: vLLM's `MambaManager` with `mamba_cache_mode` align."""

    __slots__ = ()

    def __init__(self, block_size: int, alignment: int) -> None:
        super().__init__(block_size, alignment)
        self.ahead, self.period = 1, block_size

    def first(self, processed: int) -> int:
        return max(0, processed - 1) // self.block_size

    def places(self, end: int, tokens: int) -> range:
        blocks = self.blocks(tokens)
        return range(max(end, blocks - 1), blocks)

    def new_blocks(self, before: int, after: int) -> int:
        return int(self.blocks(after) > self.blocks(before))

    def reserved(self, found: int, tokens: int) -> int:
        return self.new_blocks(found, tokens)

    def held(self, longest: int, ahead: bool) -> int:
        return 2 + ahead  # the state that is read, and one written by each iteration in flight

    def hit(self, prefix: Prefix, tokens: int) -> int:
        place = tokens // self.block_size
        while place and not prefix.has(place - 1):
            place -= 1
        return place * self.block_size


class ConstantLayout(Layout):
    """Layers with one state per request: vLLM's `MambaManager` without prefix caching."""

    __slots__ = ()

    def blocks(self, tokens: int) -> int:
        return int(tokens > 0)

    def starts(self) -> range:
        return range(0)


@cache
def layouts(
    groups: Sequence[KVGroup], alignment: int, caching: bool, in_flight: int, longest: int
) -> tuple[Layout, ...]:
    """Layouts of an engine's groups, in their order. At most `in_flight` tokens are scheduled and not yet computed, and
    contexts have at most `longest` tokens."""
    return tuple(_layout(group, alignment, caching, in_flight, longest) for group in groups)


def _layout(group: KVGroup, alignment: int, caching: bool, in_flight: int, longest: int) -> Layout:
    size, tokens = group.block_size, group.tokens
    if group.kind == "full":
        return Layout(size, alignment)
    if group.kind == "state":
        return StateLayout(size, alignment) if caching else ConstantLayout(size, alignment)
    # As `max_admission_blocks_per_request` of vLLM's specs. A window may begin inside a block.
    if group.kind == "window":
        most = -(-min(tokens - 1 + in_flight, longest) // size) + 1
        return WindowLayout(size, alignment, tokens, most)
    return ChunkLayout(size, alignment, tokens, -(-min(tokens + in_flight, longest) // size))
