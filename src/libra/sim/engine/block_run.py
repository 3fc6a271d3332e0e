"""Blocks of one context that share a fate: one entry of a block pool stands for as many as it can."""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.engine.request import Owner


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
