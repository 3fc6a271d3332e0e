"""The trajectories of one optimiser step, packed into micro-batches and distributed over ranks.

Invariant: a batch has all its trajectories with their real lengths, and packing never splits a trajectory. Counts are
expected values, so they may be fractions. Lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra.hardware.parallel import Array
from libra.lengths import TrajectoryClass


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches as kinds with repetitions, with the longest trajectories first."""

    repeats: Array  # of each kind
    tokens: Array  # in one micro-batch of the kind
    keys: Array  # sum, over the tokens of one micro-batch, of the keys that a token sees

    @property
    def count(self) -> float:
        return float(self.repeats.sum())

    def of_rank(self, ranks: int, count: int) -> tuple[Array, Array]:
        """Tokens and keys of the `count` micro-batches of one rank, if `ranks` ranks get micro-batches in turn. The
        lightest micro-batches are at both ends, where a pipeline fills and drains.
        """
        position = (np.arange(count) + 0.5) * ranks
        kind = np.minimum(np.searchsorted(np.cumsum(self.repeats), position), len(self.repeats) - 1)
        heaviest_first = kind[np.argsort(-self.keys[kind], kind="stable")]
        order = np.concatenate((heaviest_first[::2][::-1], heaviest_first[1::2]))
        return self.tokens[order], self.keys[order]


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories by length, longest first. Raises ValueError if a length or a count is not positive."""

    lengths: tuple[float, ...]
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.counts):
            raise ValueError(f"{len(self.lengths)} lengths have {len(self.counts)} counts; give each its count")
        if any(length <= 0 for length in self.lengths) or any(count <= 0 for count in self.counts):
            raise ValueError("lengths or counts has a value of 0 or less; leave classes without trajectories out")
        if any(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False)):
            raise ValueError("lengths are not sorted; give the longest first")

    @property
    def trajectories(self) -> float:
        return sum(self.counts)

    @property
    def tokens(self) -> float:
        return sum(length * count for length, count in zip(self.lengths, self.counts, strict=True))

    @property
    def context_sum(self) -> float:
        """Sum, over all tokens, of the keys that the token sees: n * (n + 1) / 2 for a causal sequence of n."""
        return sum(_keys(length) * count for length, count in zip(self.lengths, self.counts, strict=True))

    def packed(self, micro_tokens: int) -> Packed:
        """Pack by first fit decreasing into micro-batches of `micro_tokens`; a longer trajectory is a micro-batch by
        itself.

        Filling one micro-batch at a time with the longest trajectories that still fit gives the same packing (Johnson
        1974). The same filling repeats until one of its lengths runs out.
        """
        left = list(self.counts)
        repeats, tokens, keys = [], [], []
        while any(count > 0 for count in left):
            room = float(micro_tokens)
            taken: dict[int, float] = {}
            for kind, length in enumerate(self.lengths):
                if left[kind] <= 0:
                    continue
                fits = float(room // length)
                if not taken and length >= micro_tokens:
                    fits = 1.0
                if fits >= 1:
                    taken[kind] = min(fits, max(left[kind], 1.0))
                    room -= taken[kind] * length
            times = min(left[kind] / amount for kind, amount in taken.items())
            times = math.floor(times + 1e-9) if times >= 1 else times
            for kind, amount in taken.items():
                left[kind] -= times * amount
                if left[kind] < 1e-9 * self.counts[kind]:
                    left[kind] = 0.0
            repeats.append(times)
            tokens.append(sum(self.lengths[kind] * amount for kind, amount in taken.items()))
            keys.append(sum(_keys(self.lengths[kind]) * amount for kind, amount in taken.items()))
        return Packed(np.array(repeats), np.array(tokens), np.array(keys))

    def imbalance(self, ranks: Array, per_token: float, per_key: float) -> Array:
        """Work of the most loaded rank relative to the mean, with whole trajectories distributed as evenly as possible.

        It is the larger of two lower bounds for any assignment. The first is the longest trajectory. The second, for k
        up to 3, is the sum of the k + 1 shortest of the k * ranks + 1 longest trajectories, since some rank gets k + 1
        of them. Longest-first assignment comes close (at most a third above the optimum, Graham 1969, SIAM J. Appl.
        Math. 17:2).
        """
        work = np.array([per_token * length + per_key * _keys(length) for length in self.lengths])
        upto = np.cumsum(self.counts)
        mean = float(work @ np.array(self.counts)) / ranks
        total = upto[-1]
        bound = np.full_like(mean, work[0])
        for k in (1, 2, 3):
            shared = np.zeros_like(mean)
            for back in range(k + 1):
                position = k * ranks - back + 0.5
                at = np.minimum(np.searchsorted(upto, position), len(work) - 1)
                shared += work[at]
            bound = np.maximum(bound, np.where(k * ranks + 1 <= total, shared, 0.0))
        return np.maximum(1.0, bound / mean)


def batch_of(classes: Sequence[TrajectoryClass], trajectories: int) -> Batch:
    """A batch of `trajectories` drawn from the classes, each trajectory as long as its class's mean final context."""
    if trajectories < 1:
        raise ValueError(f"trajectories is {trajectories}; a batch has at least 1")
    longest_first = sorted((c for c in classes if c.share > 0), key=lambda c: -c.mean_context)
    return Batch(
        tuple(c.mean_context for c in longest_first),
        tuple(c.share * trajectories for c in longest_first),
    )


def _keys(length: float) -> float:
    return length * (length + 1) / 2
