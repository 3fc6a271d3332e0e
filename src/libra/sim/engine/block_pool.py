"""The KV blocks of one engine: which are held, which can be reused, and in what order they are given away.

Invariant: blocks are told apart only where the engine could tell: by the tokens in them, by who holds them, and by when
they were let go. A block of known tokens that nobody holds stays findable until it is the least recently let go; what
is findable of a context is always its beginning, without a gap.
"""

from __future__ import annotations

from libra.sim.engine.blocks import Context, FreeQueue, Owner, Path, Run
from libra.sim.engine.chain import Chain


class BlockPool:
    """Free blocks are given away in this order: those without known tokens, then the least recently let go.

    A context's blocks are let go from the last to the first, so a prefix outlives what follows it.
    """

    __slots__ = ("_copies", "_free", "_runs", "blank", "block_size", "blocks", "caching", "findable")

    def __init__(self, blocks: int, block_size: int, caching: bool) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.caching = caching
        self.blank = blocks  # free, with no tokens that anyone could ask for
        self.findable = 0  # free, with known tokens
        self._free = FreeQueue()
        self._runs: dict[Owner, list[Run]] = {}  # in the order of blocks, without a gap
        self._copies: dict[Owner, dict[int, list[Run]]] = {}  # further copies of a block, oldest first

    @property
    def free(self) -> int:
        return self.blank + self.findable

    @property
    def held(self) -> int:
        return self.blocks - self.blank - self.findable

    def path(self, context: Owner) -> Path:
        """Who owns the blocks of a request's context, or of a chain's. A block that only begins as the parent's is the
        child's own."""
        chain = context if isinstance(context, Chain) else context.chain
        if chain is None:
            return ((context, 0),)
        if chain.parent is None:
            return ((chain, 0),)
        path: list[tuple[Owner, int]] = []
        end = None
        link: Chain | None = chain
        while link is not None:
            start = link.fork // self.block_size
            if end is None or start < end:
                path.append((link, start))
                end = start
            link = link.parent
        return tuple(reversed(path))

    def knows(self, owner: Owner) -> bool:
        """Whether any block of this owner can be found."""
        return owner in self._runs

    def find(self, path: Path, most: int) -> tuple[int, int]:
        """(blocks found from the beginning of a context, at most `most`; how many of them nobody holds)."""
        found = unheld = 0
        last = len(path) - 1
        for place, (owner, _) in enumerate(path):
            end = most if place == last else min(most, path[place + 1][1])
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

    def hold(self, path: Path, blocks: int) -> None:
        """Hold the first `blocks` blocks of a context, which were found."""
        last = len(path) - 1
        for place, (owner, start) in enumerate(path):
            end = blocks if place == last else min(blocks, path[place + 1][1])
            if start >= end:
                break
            runs = self._runs[owner]
            for index, run in enumerate(runs):
                if run.low >= end:
                    break
                if run.high > end:
                    rest = Run(owner, end, run.high, run.holders)
                    runs.insert(index + 1, rest)
                    if not run.holders:
                        self._free.insert_before(rest, run)
                    run.high = end
                if not run.holders:
                    self._free.unlink(run)
                    self.findable -= run.high - run.low
                run.holders += 1

    def take(self, blocks: int) -> None:
        """Give away `blocks` free blocks; there must be as many."""
        blank = self.blank
        if blocks <= blank:
            self.blank = blank - blocks
            return
        self.blank = 0
        self._forget(blocks - blank)

    def write(self, context: Context, path: Path, low: int, high: int) -> None:
        """Blocks `low` to `high` of a context that is held are full of tokens now: others may find them."""
        last = len(path) - 1
        for place, (owner, start) in enumerate(path):
            end = high if place == last else min(high, path[place + 1][1])
            begin = low if low > start else start
            if begin >= end:
                continue
            runs = self._runs.get(owner)
            if runs is None:
                self._runs[owner] = [Run(owner, begin, end, 1)]
                continue
            newest = runs[-1]
            if newest.high == begin:
                if newest.holders == 1 and context.own_copy is None:
                    newest.high = end
                else:
                    runs.append(Run(owner, begin, end, 1))
            elif end == begin + 1 and begin < newest.high and context.own_copy is None:
                # The whole prompt was found, and its last block is computed again for the logits.
                copy = context.own_copy = Run(owner, begin, end, 1)
                self._copies.setdefault(owner, {}).setdefault(begin, []).append(copy)
            else:
                raise ValueError(
                    f"{owner} is written from block {begin} on, but goes to block {newest.high} already: two requests"
                    " generate on it; give each its own fork"
                )

    def adopt(self, path: Path, blocks: int) -> int:
        """The first `blocks` blocks of a context come from elsewhere: as if a request had computed those that are not
        here, and had ended. The others of them count as just let go, too, for they must outlive what follows.

        Returns how many are here then: less than `blocks` if too few were free. No request may be about to write what
        is missing.
        """
        found, _ = self.find(path, blocks)
        self.hold(path, found)
        here = found + min(blocks - found, self.free)
        self.take(here - found)
        last = len(path) - 1
        for place, (owner, start) in enumerate(path):
            end = here if place == last else min(here, path[place + 1][1])
            begin = max(found, start)
            if begin < end:
                self._runs.setdefault(owner, []).append(Run(owner, begin, end, 1))
        self._let_go(path, here, None)
        return here

    def release(self, context: Context, path: Path, written: int, held: int) -> None:
        """Let go of the `held` blocks of a context, of which the first `written` are full of known tokens."""
        self.blank += held - written
        self._let_go(path, written, context.own_copy)
        context.own_copy = None

    def _let_go(self, path: Path, blocks: int, copy: Run | None) -> None:
        """One holder less of the first `blocks` blocks of a context; of one of them it may have held a copy."""
        end = blocks
        for owner, start in reversed(path):
            if start >= end:
                continue
            runs = self._runs[owner]
            index = len(runs) - 1
            while runs[index].low >= end:
                index -= 1
            while index >= 0:
                run = runs[index]
                if copy is not None and copy.owner is owner and copy.low == run.low:
                    copy.holders -= 1
                    if not copy.holders:
                        self._let_go_last(copy)
                    if copy is not run:  # the other copy has other holders
                        index -= 1
                        continue
                else:
                    run.holders -= 1
                    if not run.holders:
                        self._let_go_last(run)
                newest = run.before
                if (
                    not run.holders
                    and newest is not None
                    and newest.low == run.high
                    and newest.owner is owner
                    and index + 1 < len(runs)
                    and runs[index + 1] is newest
                ):
                    run.high = newest.high
                    self._free.unlink(newest)
                    del runs[index + 1]
                index -= 1
            end = start

    def discard(self, full: int, held: int) -> None:
        """Let go of `held` blocks that nobody will ask for, of which the first `full` are full.

        Full blocks of tokens that were known keep their turn in the order of reuse, though nothing will be found.
        """
        self.blank += held - full
        if not full:
            return
        newest = self._free.newest
        if newest is not None and newest.owner is None:
            newest.high += full
            self.findable += full
        else:
            self._let_go_last(Run(None, 0, full, 0))

    def clear(self) -> None:
        """Forget all tokens. Nobody may hold a block."""
        if self.free != self.blocks:
            raise ValueError(f"{self.blocks - self.free} blocks are held: release them before the cache is cleared")
        self.blank, self.findable = self.blocks, 0
        self._free = FreeQueue()
        self._runs.clear()
        self._copies.clear()

    def _forget(self, blocks: int) -> None:
        self.findable -= blocks
        while blocks:
            run = self._free.oldest
            if run is None:
                raise ValueError(f"{blocks} blocks are asked for that are not free")
            owner = run.owner
            if self._copies and owner in self._copies:
                self._forget_last(run)
                blocks -= 1
                continue
            size = run.high - run.low
            if size > blocks:
                run.high -= blocks
                return
            blocks -= size
            self._free.unlink(run)
            if owner is None:
                continue
            runs = self._runs[owner]
            if runs[-1] is not run:
                raise AssertionError(f"{owner}: block {run.low} is forgotten before those that follow it")
            runs.pop()
            if not runs:
                del self._runs[owner]

    def _forget_last(self, run: Run) -> None:
        """Forget the last block of a run of an owner that has copies."""
        owner = run.owner
        assert owner is not None
        copies = self._copies[owner]
        runs = self._runs[owner]
        block = run.high - 1
        others = copies.get(block)
        main = next(index for index, other in enumerate(runs) if other.low <= block < other.high)
        if runs[main] is not run:  # a copy
            assert others is not None
            self._free.unlink(run)
            others.remove(run)
        else:
            run.high = block
            if run.low == block:
                self._free.unlink(run)
                del runs[main]
                main -= 1
            if others:
                runs.insert(main + 1, others.pop(0))
            elif main + 1 < len(runs):
                raise AssertionError(f"{owner}: block {block} is forgotten before those that follow it")
            elif not runs:
                del self._runs[owner]
        if others is not None and not others:
            del copies[block]
            if not copies:
                del self._copies[owner]

    def _let_go_last(self, run: Run) -> None:
        """Nobody holds it any more: it is reused last."""
        self.findable += run.high - run.low
        self._free.append(run)
