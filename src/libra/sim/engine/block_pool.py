"""The KV blocks of one engine: held blocks, findable blocks, and the order in which free blocks are reused.

Invariant: blocks differ only in their tokens, their holders, and the time of their release. A block of known tokens
without a holder stays findable until it is the least recently released. The findable part of a context is always its
beginning, without a gap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from libra.sim.engine.block_reads import BlockReads
from libra.sim.engine.block_run import Block, BlockCopies, Run
from libra.sim.engine.flight import UnderWay
from libra.sim.engine.generation import Generation
from libra.sim.engine.request import Chain, Owner, Path, Request

_END = 1 << 62  # end of a context without an end


class BlockPool:
    """Free blocks are reused in this order: first blocks without known tokens, then the least recently released blocks.
    A context's blocks are released from the last to the first, so a prefix outlives its continuation."""

    __slots__ = (
        *("_free", "_runs", "blank", "block_size", "blocks", "caching"),
        *("copies", "findable", "reads", "shared", "unit"),
    )

    def __init__(self, blocks: int, block_size: int, caching: bool) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.unit = block_size  # of paths, in tokens
        self.caching = caching
        self.blank = blocks  # number of free blocks without tokens that could be found
        self.findable = 0  # number of free blocks with known tokens
        self.shared = 0  # holders of blocks beyond the first of each block
        self.reads = BlockReads()
        self._free: OrderedDict[Run, None] = OrderedDict()  # runs without holders, least recently released first
        self._runs: dict[Owner, list[Run]] = {}  # findable runs of an owner, in the order of blocks, without a gap
        self.copies = BlockCopies()

    @property
    def free(self) -> int:
        return self.blank + self.findable

    @property
    def held(self) -> int:
        return self.blocks - self.blank - self.findable

    def path(self, context: Owner) -> Path:
        """Owners of the blocks in the context of a request or a chain, in units of `unit` tokens. A block that shares
        only its first tokens with the parent's block belongs to the child."""
        link = context if isinstance(context, Chain) else context.chain
        if link is None:
            return ((context, 0, _END),)
        path: list[tuple[Owner, int, int]] = []
        end = _END
        while link is not None:
            start = link.fork // self.unit
            if start < end:
                path.append((link, start, end))
                end = start
            link = link.parent
        return tuple(reversed(path))

    def knows(self, owner: Owner) -> bool:
        """Whether any block of this owner can be found."""
        return owner in self._runs

    def find(self, path: Path, most: int) -> tuple[int, int]:
        """(blocks found from the beginning of a context, at most `most`; the number of them without a holder)."""
        found = unheld = 0
        for owner, _, end in path:
            if end > most:
                end = most
            for run in self._runs.get(owner, ()):
                if run.low >= end:
                    break
                size = (run.high if run.high < end else end) - run.low
                found += size
                if not run.holders:
                    unheld += size
            if found < end or end == most:
                break
        return found, unheld

    def admit(self, request: Request, found: int) -> None:
        """Hold the first `found` blocks of a request that begins to run. These blocks were found."""
        if found:
            self.hold(request.path, found)

    def extend(self, request: Request, tokens: int, blocks: int) -> None:
        """Take `blocks` blocks for a request, which then holds the blocks of its first `tokens` tokens."""
        self.take(blocks)

    def slide(self, request: Request, computed: int, under_way: UnderWay | None) -> None:
        """Release the blocks that a request no longer reads once it has computed `computed` tokens. If all layers read
        the whole context, there are none. Called before the request takes blocks for an iteration."""

    def grow(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, taken: int, steps: int
    ) -> None:
        """Take the blocks that the generating `running` requests need for the next `steps` iterations. The blocks of
        the first `taken` iterations are taken already."""
        demand = generation.demand(steps)
        if taken:
            demand -= generation.demand(taken)
        if demand:
            self.take(demand)

    def affordable(
        self,
        running: Iterable[Request],
        generation: Generation,
        under_way: UnderWay | None,
        taken: int,
        steps: int,
        free: int,
        enough: int,
    ) -> int:
        """Number of the next `steps` iterations for which `free` blocks suffice; blocks of the first `taken` iterations
        are taken already. `free` blocks suffice for `enough` iterations even if no running request releases blocks."""
        return enough

    def steady(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, steps: int, wanted: int
    ) -> int:
        """Number of the next `steps` iterations before an iteration in which `wanted` blocks may be free, if none of
        the `running` requests ends. The first iteration already has its blocks."""
        return steps

    def clip(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a request's next chunk, at most `tokens`, after `computed` tokens. 0: the request waits for more
        budget."""
        return tokens

    def new_step_starts(self) -> None:
        """Record that an iteration is scheduled."""

    def hold(self, path: Path, blocks: int) -> None:
        """Hold the first `blocks` blocks of a context. These blocks were found."""
        for owner, start, end in path:
            if start >= blocks:
                break
            if end > blocks:
                end = blocks
            runs = self._runs[owner]
            for index, run in enumerate(runs):
                if run.low >= end:
                    break
                if run.high > end:  # split the run; its rest does not change
                    if run.holders:
                        self.shared += end - run.low
                    else:
                        self.findable -= end - run.low
                    runs.insert(index, Run(owner, run.low, end, run.holders + 1))
                    run.low = end
                    break
                if run.holders:
                    self.shared += run.high - run.low
                else:
                    del self._free[run]
                    self.findable -= run.high - run.low
                run.holders += 1

    def take(self, blocks: int) -> None:
        """Allocate `blocks` free blocks for new contents. Blocks without known tokens go first, then the least recently
        released blocks, whose tokens can no longer be found. Raises ValueError if fewer are free."""
        blank = self.blank
        self.blank = blank - blocks if blocks < blank else 0
        reads = self.reads
        if reads.fenced:
            reads.give_blank(self.blank)
        if blocks <= blank:
            return
        blocks -= blank
        self.findable -= blocks
        copied = self.copies.further
        while blocks:
            run = next(iter(self._free), None)
            if run is None:
                raise ValueError(f"too few blocks are free: {blocks} are missing")
            owner = run.owner
            if copied and owner in copied:
                self._forget_last(run)
                blocks -= 1
                continue
            size = run.high - run.low
            if size > blocks:
                run.high -= blocks
                if reads.reading:
                    reads.give(owner, run.high, run.high + blocks)
                return
            blocks -= size
            del self._free[run]
            if owner is None:
                continue
            if reads.reading:
                reads.give(owner, run.low, run.high)
            runs = self._runs[owner]
            if runs[-1] is not run:
                raise AssertionError(f"{owner}: block {run.low} is forgotten before its successors")
            runs.pop()
            if not runs:
                del self._runs[owner]

    def given_before(self, found: Mapping[Owner, int], most: int) -> int:
        """Number of free blocks, at most `most`, that are reused before a block that is still read, or that is among
        the first `found[owner]` blocks of its owner."""
        return self.reads.given_before(self._free, self.blank, found, most)

    def write(self, request: Request, full: int, *, again: bool = False) -> None:
        """Make the first `full` blocks of a request findable, which are now full of tokens. With `again`, some of the
        blocks were findable already, and the request computed them again instead of holding them."""
        written, request.written = request.written, full
        own_copy = request in self.copies.own
        for owner, start, end in request.path:
            if end <= written:
                continue
            if start >= full:
                break
            begin = start if start > written else written
            if end > full:
                end = full
            runs = self._runs.get(owner)
            if runs is None:
                self._runs[owner] = [Run(owner, begin, end, 1)]
                continue
            newest = runs[-1]
            if newest.high == begin:
                if newest.holders == 1 and not own_copy:
                    newest.high = end
                else:
                    runs.append(Run(owner, begin, end, 1))
            elif begin < newest.high and (again or (end == begin + 1 and not own_copy)):
                # The whole prompt was found, and its last block is computed again for the logits or for a drafter.
                self._write_again(request, owner, begin, end)
            else:
                raise ValueError(
                    f"{owner} is written from block {begin} on, but goes to block {newest.high} already: two requests"
                    " generate on it; give each its own fork"
                )

    def write_arrived(self, request: Request, full: int) -> None:
        """As `write`, for blocks whose KV arrived in a transfer. Other requests may have written the same blocks during
        the transfer."""
        for owner, start, end in request.path:
            begin, end = max(start, request.written), min(end, full)
            if begin >= end:
                continue
            runs = self._runs.setdefault(owner, [])
            if not runs:
                runs.append(Run(owner, begin, end, 1))
            else:
                self._write_again(request, owner, begin, end)
        request.written = max(request.written, full)

    def _write_again(self, request: Request, owner: Owner, begin: int, end: int) -> None:
        """As `write`, for the blocks from `begin` to `end`. The first of these may be findable already."""
        runs = self._runs[owner]
        known = max(begin, min(end, runs[-1].high))
        for block in range(begin, known):
            self.copies.add(request, owner, block)
        if known < end:
            runs.append(Run(owner, known, end, 1))

    def adopt(self, path: Path, blocks: int) -> int:
        """Adopt the first `blocks` blocks of a context, as if a request had computed the missing blocks and ended. The
        other blocks also count as just released, since they must outlive their continuation. Returns the number of
        blocks now present, which is less than `blocks` if too few were free. No request may be about to write the
        missing blocks."""
        found, _ = self.find(path, blocks)
        self.hold(path, found)
        here = found + min(blocks - found, self.free)
        self.take(here - found)
        for owner, start, end in path:
            begin, end = max(start, found), min(end, here)
            if begin < end:
                self._runs.setdefault(owner, []).append(Run(owner, begin, end, 1))
        self._let_go(path, here, ())
        return here

    def let_go(self, request: Request, tokens: int, known: int) -> None:
        """Release all blocks of a request, which has blocks for `tokens` tokens; `known` of these are final."""
        held = -(-tokens // self.block_size)
        if not self.caching:
            self.blank += held
        elif request.written:
            self.release(request, held)
        else:
            self.discard(known // self.block_size, held)

    def release(self, request: Request, held: int) -> None:
        """Release the `held` blocks of a request. Blocks that it has written stay findable."""
        self.blank += held - request.written
        self._let_go(request.path, request.written, self.copies.own.pop(request, ()))

    def _let_go(self, path: Path, blocks: int, copies: Sequence[Run]) -> None:
        """Remove one holder of the first `blocks` blocks of a context. `copies` are the copies that this holder had
        instead of some of these blocks."""
        free = self._free
        for owner, start, end in reversed(path):
            if start >= blocks:
                continue
            if end > blocks:
                end = blocks
            runs = self._runs[owner]
            last = len(runs) - 1
            while runs[last].low >= end:
                last -= 1
            for index in range(last, -1, -1):
                run = runs[index]
                mine = copies and [it for it in copies if it.owner is owner and run.low <= it.low < run.high]
                if mine and mine[0] is not run:
                    for copy in reversed(mine):  # no other request holds these copies, since none can find them
                        copy.holders = 0
                        self.findable += 1
                        free[copy] = None
                    continue
                run.holders -= 1
                if run.holders:
                    self.shared -= run.high - run.low
                    continue
                self.findable += run.high - run.low
                if index + 1 < len(runs) and free and runs[index + 1] is next(reversed(free)):
                    newest, _ = free.popitem()
                    run.high = newest.high
                    del runs[index + 1]
                free[run] = None

    def discard(self, full: int, held: int) -> None:
        """Release `held` blocks that will never be found. The first `full` of them are full of known tokens, and keep
        their place in the order of reuse."""
        self.blank += held - full
        if not full:
            return
        self.findable += full
        newest = next(reversed(self._free), None)
        if newest is not None and newest.owner is None:
            newest.high += full
        else:
            self._free[Run(None, 0, full, 0)] = None

    def resize(self, blocks: int) -> None:
        """Set the number of blocks. Shrinking removes free blocks in the order of reuse; enough must be free."""
        if blocks < self.blocks:
            self.take(self.blocks - blocks)
        else:
            self.blank += blocks - self.blocks
        self.blocks = blocks

    def clear(self) -> None:
        """Forget all tokens. Raises ValueError if a block is held."""
        if self.free != self.blocks:
            raise ValueError(f"{self.blocks - self.free} blocks are held: release them before the cache is cleared")
        self.blank, self.findable = self.blocks, 0
        self._free.clear()
        self._runs.clear()
        self.copies.further.clear()

    def _forget_last(self, run: Run) -> None:
        """Forget the last block of a run whose owner has copies. The oldest copy replaces the block."""
        owner = run.owner
        assert owner is not None
        runs = self._runs[owner]
        block = run.high - 1
        main = next(index for index, other in enumerate(runs) if other.low <= block < other.high)
        if runs[main] is not run:  # a copy
            del self._free[run]
            self.copies.forget(owner, block, run)
            self.reads.give_block(run)
            return
        run.high = block
        copy = self.copies.oldest(owner, block)
        if self.reads.reading:
            self.reads.give(owner, block, block + 1)
            if copy is not None:
                self.reads.rename(copy, (owner, block))
        if run.low == block:
            del self._free[run]
            del runs[main]
            main -= 1
        if copy is not None:
            self.copies.forget(owner, block, copy)
            runs.insert(main + 1, copy)
        elif main + 1 < len(runs):
            raise AssertionError(f"{owner}: block {block} is forgotten before its successors")
        elif not runs:
            del self._runs[owner]

    def block_of(self, request: Request, owner: Owner, block: int) -> Block:
        """The block that a request holds as number `block` of `owner`: the owner's block, or a further copy."""
        copy = self.copies.of(request, owner, block)
        main = (owner, block)
        return main if copy is None or copy in self._runs.get(owner, ()) else copy
