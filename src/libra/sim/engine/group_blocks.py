"""Single blocks of KV cache groups: blocks that a request holds, and blocks that other requests can find.

Invariant: a lookup finds a block with an owner by all tokens from the start of its context to the end of the block. If
several blocks have the same such tokens, it finds the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libra.sim.engine.request import Owner, Path, owner_of


@dataclass(slots=True, eq=False)
class GroupBlock:
    """A block of one group. Without an owner it cannot be found."""

    group: int
    place: int
    owner: Owner | None = None
    holders: int = 1


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one group that a request holds."""

    first: int = 0  # the first place that is not released
    end: int = 0  # number of places in the table
    cached: int = 0  # number of places already checked for the prefix cache
    blocks: dict[int, GroupBlock] = field(default_factory=dict)  # by place, in rising order


class Known:
    """Blocks of one group that can be found."""

    __slots__ = ("_copies", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._copies: dict[Owner, dict[int, list[GroupBlock]]] = {}  # by place, oldest first

    def find(self, path: Path, place: int) -> GroupBlock | None:
        """The block with the tokens of a context at a place. Lengths in `path` are tokens."""
        copies = self._copies.get(owner_of(path, (place + 1) * self.block_size - 1))
        if copies is None:
            return None
        blocks = copies.get(place)
        return None if blocks is None else blocks[0]

    def extent(self, path: Path) -> int:
        """Tokens at the beginning of a context that include all blocks of it that can be found."""
        places = [max(copies) for owner, _, _ in path if (copies := self._copies.get(owner))]
        return (max(places) + 1) * self.block_size if places else 0

    def add(self, block: GroupBlock, path: Path) -> None:
        """Let others find a block that is full of a context's tokens."""
        owner = owner_of(path, (block.place + 1) * self.block_size - 1)
        block.owner = owner
        self._copies.setdefault(owner, {}).setdefault(block.place, []).append(block)

    def forget(self, block: GroupBlock) -> None:
        owner = block.owner
        assert owner is not None
        copies = self._copies[owner]
        blocks = copies[block.place]
        blocks.remove(block)
        if not blocks:
            del copies[block.place]
            if not copies:
                del self._copies[owner]

    def clear(self) -> None:
        self._copies.clear()


class Prefix:
    """The part of a context that can be found in all of some groups with equal layouts."""

    __slots__ = ("_groups", "_path")

    def __init__(self, groups: Sequence[Known], path: Path) -> None:
        self._groups = groups
        self._path = path

    def has(self, place: int) -> bool:
        """Whether the block at a place can be found in each of the groups."""
        path = self._path
        for known in self._groups:  # noqa: SIM110 - a generator for each place is slow
            if known.find(path, place) is None:
                return False
        return True
