"""Members: trajectories that represent similar ones, with tokens and tool seconds together.

Invariant: the tokens and the tool seconds of a member are those of the same trajectories, so whichever makes it long,
the other belongs to it. Members do not depend on engines: faster engines never make a member take longer. Cells of the
evidence have means and covariances. Each becomes four members with the same means and covariances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.lengths.cohorts import GENERATED, SECOND, Sums

_ALIKE = 1.5  # members of a class are merged if the shares that exceed them are within this factor of each other
_DIGITS = 5  # significant ones

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Member(NamedTuple):
    """Similar trajectories of one class, as one of them."""

    share: float  # of the trajectories of its class
    generated: float  # tokens
    prefill: float  # tokens
    turns: float
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Members:
    """Columns of members of all bins."""

    bins: Indices
    shares: Array  # of all trajectories; they sum to 1
    generated: Array
    prefill: Array
    turns: Array
    tool_seconds: Array

    @property
    def work(self) -> Array:
        """See `cohorts.work`."""
        return self.prefill + GENERATED * self.generated + SECOND * self.tool_seconds


def spread(bins: Indices, shares: Array, means: Array, peaks: Array) -> Members:
    """Members with the means and covariances of cells; `means` is [cell, field of `Sums`] for one trajectory of a cell,
    `peaks` [cell] limits the tokens that one generates.

    Along the main axis of tokens and tool seconds, in seconds of engines, there are four points, spaced as in a uniform
    distribution, because cells are narrow. They also deviate along the other axis, with alternating signs.
    """
    column = dict(zip(Sums._fields, means.T, strict=True))
    tokens, seconds = column["generated"], column["tool_seconds"]
    squares = column["generated_squared"], column["tool_seconds_squared"]
    generated_scale, tool_scale = float(GENERATED), float(SECOND)
    covariance = np.empty((len(shares), 2, 2))
    covariance[:, 0, 0] = (squares[0] - tokens**2) * generated_scale**2
    covariance[:, 1, 1] = (squares[1] - seconds**2) * tool_scale**2
    cross = (column["generated_tool_seconds"] - tokens * seconds) * generated_scale * tool_scale
    covariance[:, 0, 1] = covariance[:, 1, 0] = cross
    variances, axes = np.linalg.eigh(covariance)  # the larger one last
    # Squares of equal values cancel to rounding noise.
    noise = 1e-9 * (squares[0] * generated_scale**2 + squares[1] * tool_scale**2)
    deviations = np.sqrt(np.where(variances > noise[:, None], variances, 0.0))
    along = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5.0)
    across = np.array([1.0, -1.0, -1.0, 1.0])
    steps = np.stack((across, along)) * deviations[:, :, None]  # [cell, axis, point]
    points = axes @ steps  # [cell, tokens or seconds, point]
    generated = np.clip(tokens[:, None] + points[:, 0] / generated_scale, 0.0, peaks[:, None])
    tools = np.maximum(0.0, seconds[:, None] + points[:, 1] / tool_scale)
    alike = ~deviations.any(axis=1)  # one point stands for them
    points_each = np.where(alike, 1, len(along))
    kept = (np.arange(len(along)) < points_each[:, None]).ravel()

    def by_point(values: Array) -> Array:
        return np.repeat(values, points_each)

    return Members(
        np.repeat(bins, points_each),
        by_point(shares / points_each),
        generated.ravel()[kept],
        by_point(column["prefill"]),
        by_point(column["turns"]),
        tools.ravel()[kept],
    )


def of_classes(members: Members, of_bin: Indices) -> list[tuple[Member, ...]]:
    """[class] its members, with similar ones merged; `of_bin` is the class of each bin."""
    found = []
    for number in range(int(of_bin[-1]) + 1):
        rows = np.flatnonzero(of_bin[members.bins] == number)
        shares = members.shares[rows] / members.shares[rows].sum()
        columns = np.column_stack(
            [each[rows] for each in (members.generated, members.prefill, members.turns, members.tool_seconds)]
        )
        ranks = [_rarity(value[rows], shares) for value in (members.work, members.generated)]
        _, group = np.unique(np.column_stack(ranks), axis=0, return_inverse=True)
        total = np.bincount(group, shares)
        merged = np.column_stack([np.bincount(group, shares * column) / total for column in columns.T])
        found.append(
            tuple(Member(*map(_short, row)) for row in np.column_stack((total, merged))[np.argsort(-merged[:, 0])])
        )
    return found


def _rarity(values: Array, shares: Array) -> Indices:
    """[member] the logarithm of the share of members beyond it, counting half of itself, in whole steps of `_ALIKE`."""
    order = np.argsort(-values, kind="stable")
    exceeds = np.empty(len(values))
    exceeds[order] = np.cumsum(shares[order]) - shares[order] / 2
    return np.asarray(np.floor(np.log(exceeds) / np.log(_ALIKE)), dtype=np.int64)


def _short(value: float) -> float:
    """A number rounded to `_DIGITS` significant digits."""
    return float(f"{value:.{_DIGITS}g}")
