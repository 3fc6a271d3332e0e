"""What a context consists of, told by name instead of by tokens.

Invariant: two contexts have the same tokens as far as they follow the same chains, and no further.
"""

from __future__ import annotations


class Chain:
    """A sequence of tokens of any length, which may begin as another one does.

    The first `fork` tokens are those of `parent`; the others are the chain's own. A prompt that sixteen trajectories
    share is one chain, and each of them forks from it at the prompt's end. One request at a time generates on a chain.
    """

    __slots__ = ("fork", "name", "parent")

    def __init__(self, name: str, parent: Chain | None = None, fork: int = 0) -> None:
        self.name: str = name
        self.parent: Chain | None = parent
        self.fork: int = fork  # tokens
        if fork < 0 or (parent is None and fork):
            raise ValueError(f"chain {name!r}: fork is {fork}; give the number of tokens shared with a parent")
        if parent is not None and fork < parent.fork:
            raise ValueError(
                f"chain {name!r} forks at {fork}, where {parent.name!r} is still its parent's (up to {parent.fork}):"
                " fork from that one"
            )

    def __repr__(self) -> str:
        return f"Chain({self.name!r}, fork={self.fork})"
