"""Blocks of one context that share a fate: one entry of a block pool stands for as many as it can.

Invariant: of a block that is known one copy is in a run of its owner, where others find it. Requests that computed its
tokens beside that one have further copies, each a run of its own; the oldest takes the place of the one that is found
once that is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.engine.request import Owner, Request


@dataclass(slots=True, eq=False)
class Run:
    """Blocks `low` to `high` (exclusive) of an owner's context that have the same holders and were let go together.

    Without an owner: so many blocks that nobody will ask for.
    """

    owner: Owner | None
    low: int
    high: int
    holders: int


Block = tuple[Owner, int] | Run  # one block: of an owner, or a further copy


class BlockCopies:
    """Further copies of the blocks of one pool."""

    __slots__ = ("further", "own")

    def __init__(self) -> None:
        self.further: dict[Owner, dict[int, list[Run]]] = {}  # of each block, oldest first
        self.own: dict[Request, list[Run]] = {}  # blocks that it has although other copies of them were found

    def add(self, request: Request, owner: Owner, block: int) -> None:
        """A request has computed a block that is known."""
        copy = Run(owner, block, block + 1, 1)
        self.own.setdefault(request, []).append(copy)
        self.further.setdefault(owner, {}).setdefault(block, []).append(copy)

    def of(self, request: Request, owner: Owner, block: int) -> Run | None:
        """The copy of a block that a request has, further or not any more."""
        mine = (it for it in self.own.get(request, ()) if it.owner is owner and it.low == block)
        return next(mine, None)

    def oldest(self, owner: Owner, block: int) -> Run | None:
        """Of the further copies of a block."""
        copies = self.further[owner].get(block)
        return copies[0] if copies else None

    def forget(self, owner: Owner, block: int, copy: Run) -> None:
        """It is none of the further copies any more."""
        copied = self.further[owner]
        copied[block].remove(copy)
        if not copied[block]:
            del copied[block]
            if not copied:
                del self.further[owner]
