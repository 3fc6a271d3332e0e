"""Runs of blocks of one context that are held and released together. One entry of a block pool is one run.

Invariant: one copy of each known block is in a run of its owner, where other requests find it. Other requests that
computed the same tokens hold further copies, each a run of its own. When the findable copy is forgotten, the oldest
further copy replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.engine.request import Owner, Request


@dataclass(slots=True, eq=False)
class Run:
    """Blocks `low` to `high` (exclusive) of an owner's context with the same holders and the same time of release.
    Without an owner: blocks that will never be found."""

    owner: Owner | None
    low: int
    high: int
    holders: int


Block = tuple[Owner, int] | Run  # one block: of an owner, or a further copy


class BlockCopies:
    """Further copies of the blocks of one pool."""

    __slots__ = ("further", "own")

    def __init__(self) -> None:
        self.further: dict[Owner, dict[int, list[Run]]] = {}  # further copies of each block, oldest first
        self.own: dict[Request, list[Run]] = {}  # copies that a request holds although another copy can be found

    def add(self, request: Request, owner: Owner, block: int) -> None:
        """Record that a request has computed a block that was known already."""
        copy = Run(owner, block, block + 1, 1)
        self.own.setdefault(request, []).append(copy)
        self.further.setdefault(owner, {}).setdefault(block, []).append(copy)

    def of(self, request: Request, owner: Owner, block: int) -> Run | None:
        """The copy of a block that a request holds, even if this copy has become the findable one; None: no copy."""
        mine = (it for it in self.own.get(request, ()) if it.owner is owner and it.low == block)
        return next(mine, None)

    def oldest(self, owner: Owner, block: int) -> Run | None:
        """The oldest further copy of a block; None: the block has none."""
        copies = self.further[owner].get(block)
        return copies[0] if copies else None

    def forget(self, owner: Owner, block: int, copy: Run) -> None:
        """Remove one of the further copies of a block."""
        copied = self.further[owner]
        copied[block].remove(copy)
        if not copied[block]:
            del copied[block]
            if not copied:
                del self.further[owner]
