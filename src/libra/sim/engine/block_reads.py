"""Released blocks that transfers still read: an iteration that reuses such a block waits for its readers.

Invariant: a block that is still read is in `reading` until its readers have ended or it is reused. A reused block is in
`given` until the next iteration waits for its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from libra.sim.engine.block_run import Block, Run
from libra.sim.engine.request import Owner, Request


class Reader(Protocol):
    """A transfer that reads blocks after their release."""

    end: int | None  # tick, if it is known

    def ended(self, now: int) -> bool: ...


class BlockReads:
    """Blocks of one pool that are still being read."""

    __slots__ = ("fenced", "given", "reading", "unwritten")

    def __init__(self) -> None:
        self.reading: dict[Block, tuple[Reader, ...]] = {}
        self.given: dict[Block, tuple[Reader, ...]] = {}
        self.unwritten: dict[Request, list[tuple[int, Run]]] = {}  # held blocks that are not findable: (number, block)
        self.fenced: list[tuple[int, Run]] = []  # released such blocks: (blank blocks that are reused later, block)

    def settle(self, now: int) -> None:
        """Remove the readers that have ended by `now`."""
        if self.reading:
            left = {block: tuple(it for it in its if not it.ended(now)) for block, its in self.reading.items()}
            self.reading = {block: its for block, its in left.items() if its}

    def begin(self, block: Block, reader: Reader) -> None:
        self.reading[block] = (*self.reading.get(block, ()), reader)

    def drop(self, block: Block, reader: Reader) -> None:
        """Remove a reader that does not read the block after all. Other readers stay."""
        left = tuple(it for it in self.reading.pop(block, ()) if it is not reader)
        if left:
            self.reading[block] = left

    def fence(self, request: Request, blank: int) -> None:
        """Record that a request is about to release blocks that are read but not findable. They become blank, on top of
        the present `blank` blocks, and the request's last block is reused first."""
        self.fenced += [(blank + number - request.written, block) for number, block in self.unwritten.pop(request)]

    def give_blank(self, left: int) -> None:
        """Record that blank blocks are reused; `left` of them remain."""
        while self.fenced and self.fenced[-1][0] >= left:
            self.give_block(self.fenced.pop()[1])

    def give(self, owner: Owner | None, low: int, high: int) -> None:
        """Record that the blocks from `low` to `high` of an owner are reused."""
        for block in [it for it in self.reading if isinstance(it, tuple) and it[0] is owner and low <= it[1] < high]:
            self.given[block] = self.reading.pop(block)

    def give_block(self, block: Block) -> None:
        """Record that one block, which may still be read, is reused."""
        if block in self.reading:
            self.given[block] = self.reading.pop(block)

    def rename(self, block: Block, name: Block) -> None:
        """Record that the further copy `block` becomes the owner's block `name`."""
        if block in self.reading:
            self.reading[name] = self.reading.pop(block)

    def given_before(self, free: Iterable[Run], blank: int, found: Mapping[Owner, int], most: int) -> int:
        """As `BlockPool.given_before`, for `blank` blocks and then the `free` runs, in the order of reuse."""
        fenced = next((after for after, block in reversed(self.fenced) if block in self.reading), None)
        if fenced is not None:
            return min(blank - 1 - fenced, most)
        read: dict[Owner, list[int]] = {}
        for block in self.reading:
            if isinstance(block, tuple):
                read.setdefault(block[0], []).append(block[1])
        before = blank
        for run in free:
            if before >= most:
                break
            owner, low, high = run.owner, run.low, run.high
            if owner is None:
                before += high
                continue
            if run in self.reading:
                return before
            last = max((block for block in read.get(owner, ()) if low <= block < high), default=-1)
            last = max(last, min(found.get(owner, 0), high) - 1)
            if last >= low:
                return before + high - 1 - last
            before += high - low
        return min(before, most)
