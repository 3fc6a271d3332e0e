"""Runs of KV blocks: whose tokens are in them, and in which order the free ones are reused.

Invariant: two contexts share the blocks whose owners they share; a context without a chain owns its blocks alone.
"""

from __future__ import annotations

from libra.sim.engine.chain import Chain


class Context:
    """Tokens of a request as the block pool sees them. The pool and the engine write all but the chain."""

    __slots__ = ("chain", "own_copy", "path", "written")

    chain: Chain | None
    path: Path  # who owns its blocks
    own_copy: Run | None  # a block that it computed although another copy of it was found
    written: int  # blocks that the pool knows to be full of its tokens


Owner = Chain | Context  # whose tokens they are: a chain's, or those of a context that shares with no other
Path = tuple[tuple[Owner, int], ...]  # who owns a context's blocks, each from which block on; the last one to the end


def owner_of(path: Path, block: int) -> Owner:
    """Whose a block of a context is."""
    return next(owner for owner, start in reversed(path) if start <= block)


class Run:
    """Blocks `low` to `high` (exclusive) of an owner's context that have the same holders and were let go together.

    Without an owner: so many blocks that nobody will ask for.
    """

    __slots__ = ("after", "before", "high", "holders", "low", "owner")

    def __init__(self, owner: Owner | None, low: int, high: int, holders: int) -> None:
        self.owner = owner
        self.low = low
        self.high = high
        self.holders = holders
        self.before: Run | None = None  # neighbours in the order of reuse, while nobody holds it
        self.after: Run | None = None


class FreeQueue:
    """Runs that nobody holds, least recently let go first: vLLM's `FreeKVCacheBlockQueue`."""

    __slots__ = ("newest", "oldest")

    def __init__(self) -> None:
        self.oldest: Run | None = None
        self.newest: Run | None = None

    def append(self, run: Run) -> None:
        run.before = self.newest
        run.after = None
        if self.newest is None:
            self.oldest = run
        else:
            self.newest.after = run
        self.newest = run

    def insert_before(self, run: Run, other: Run) -> None:
        """To be reused just before the other one."""
        run.before, run.after = other.before, other
        if other.before is None:
            self.oldest = run
        else:
            other.before.after = run
        other.before = run

    def unlink(self, run: Run) -> None:
        if run.before is None:
            self.oldest = run.after
        else:
            run.before.after = run.after
        if run.after is None:
            self.newest = run.before
        else:
            run.after.before = run.before
        run.before = run.after = None
