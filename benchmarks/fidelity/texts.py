"""Chains as tokens, for an engine that must be given some.

Invariant: contexts that share a part of a chain share its tokens, and two tokens that no chain shares are equal by
chance alone. A token that an engine generated stays what it was.
"""

from __future__ import annotations

from random import Random

from libra.sim.engine.request import Chain

_SPECIAL = 4  # the first ids of a vocabulary, which mean something


class Texts:
    """Tokens of chains: generated ones as they were told, all others pseudo-random by the chain's name."""

    def __init__(self, vocabulary: int) -> None:
        """`vocabulary` is how many ids a model has."""
        self._vocabulary = vocabulary
        self._own: dict[str, list[int]] = {}  # after the fork
        self._random: dict[str, Random] = {}

    def prompt(self, chain: Chain, length: int) -> list[int]:
        """The first `length` tokens."""
        shared = self.prompt(chain.parent, min(chain.fork, length)) if chain.parent is not None else []
        own = self._own.setdefault(chain.name, [])
        if chain.name not in self._random:
            self._random[chain.name] = Random(chain.name)
        random = self._random[chain.name]
        while chain.fork + len(own) < length:
            own.append(random.randrange(_SPECIAL, self._vocabulary))
        return shared + own[: max(0, length - chain.fork)]

    def generated(self, chain: Chain, after: int, tokens: list[int]) -> None:
        """`tokens` follow the first `after` ones. Raises ValueError where others are known to."""
        own = self._own.get(chain.name, [])
        if chain.fork + len(own) != after:
            raise ValueError(
                f"{chain.name}: {chain.fork + len(own)} tokens are known, and {after} precede the new ones"
            )
        own.extend(tokens)
