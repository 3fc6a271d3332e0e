"""Finds the earlier context that a prompt shares a prefix with.

Invariant: two requests share exactly the full blocks in which their tokens agree from the start. A block is forgotten
only when a KV cache of the same size would have evicted it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from libra.sim.engine.request import Chain


class PrefixIndex:
    """Maps full blocks, by all tokens up to their end, to the chains that identify contexts in the simulator's caches.
    Keeps the `capacity` most recently used blocks."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._size, self._capacity = block_size, capacity
        self._chains: OrderedDict[int, Chain] = OrderedDict()  # by the hash of all tokens up to the block's end
        self._made = 0

    def __len__(self) -> int:
        return len(self._chains)

    def chain(self, tokens: Sequence[int], salt: str = "") -> Chain:
        """A new chain for a prompt, forked from the one with the longest common prefix and the same salt."""
        states = self._states(tokens, salt)
        parent, shared = None, 0
        for state in states:
            found = self._chains.get(state)
            if found is None:
                break
            parent, shared = found, shared + self._size
        self._made += 1
        chain = Chain(str(self._made), parent, shared)
        self._learn(chain, states)
        return chain

    def learn(self, chain: Chain, tokens: Sequence[int], salt: str = "") -> None:
        """Record the tokens of a chain's whole context."""
        self._learn(chain, self._states(tokens, salt))

    def _states(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The hash of all tokens up to the end of each full block."""
        size, context, state = self._size, tuple(tokens), hash(salt)
        return [
            state := hash((state, context[start : start + size])) for start in range(0, len(context) - size + 1, size)
        ]

    def _learn(self, chain: Chain, states: Sequence[int]) -> None:
        chains = self._chains
        for state in states:
            chains.setdefault(state, chain)
            chains.move_to_end(state)
        while len(self._chains) > self._capacity:
            self._chains.popitem(last=False)
