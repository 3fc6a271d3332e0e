"""Members: trajectories that each represent similar trajectories, with their tokens and tool seconds.

Invariant: tokens and tool seconds of a member come from the same trajectories, so their correlation is kept. Members do
not depend on engines, so a faster engine never makes a member take longer. Each cell of the evidence becomes four
members with the means and covariances of the cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.lengths.cohorts import GENERATED, SECOND, Sums

_ALIKE = 1.5  # members of a class are merged if the shares beyond them differ by less than this factor
_DIGITS = 5  # significant digits

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Member(NamedTuple):
    """One trajectory that represents similar trajectories of a class."""

    share: float  # share of the trajectories of its class
    generated: float  # tokens
    prefill: float  # tokens
    turns: float
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Members:
    """Columns of members of all bins."""

    bins: Indices
    shares: Array  # shares of all trajectories, which sum to 1
    generated: Array
    prefill: Array
    turns: Array
    tool_seconds: Array

    @property
    def work(self) -> Array:
        """Work of each member in prefilled tokens; see `cohorts.work`."""
        return self.prefill + GENERATED * self.generated + SECOND * self.tool_seconds


def spread(bins: Indices, shares: Array, means: Array, peaks: Array) -> Members:
    """Members with the means and covariances of cells.

    `means` is [cell, field of `Sums`] for one trajectory of a cell; `peaks` [cell] limits the generated tokens of a
    member. Four points lie along the main axis of tokens and tool seconds, both in seconds of engines. Cells are
    narrow, so the points are spaced as in a uniform distribution. The points also deviate along the other axis, with
    alternating signs.
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
    variances, axes = np.linalg.eigh(covariance)  # the larger eigenvalue is last
    # Squares of equal values cancel to rounding noise.
    noise = 1e-9 * (squares[0] * generated_scale**2 + squares[1] * tool_scale**2)
    deviations = np.sqrt(np.where(variances > noise[:, None], variances, 0.0))
    along = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5.0)
    across = np.array([1.0, -1.0, -1.0, 1.0])
    steps = np.stack((across, along)) * deviations[:, :, None]  # [cell, axis, point]
    points = axes @ steps  # [cell, tokens or seconds, point]
    generated = np.clip(tokens[:, None] + points[:, 0] / generated_scale, 0.0, peaks[:, None])
    tools = np.maximum(0.0, seconds[:, None] + points[:, 1] / tool_scale)
    alike = ~deviations.any(axis=1)  # one point represents equal points
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
    """[class] members of each class, with similar members merged; `of_bin` is the class of each bin."""
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
    """[member] logarithm of the share beyond the member, including half of its own share, rounded to steps of
    `_ALIKE`.
    """
    order = np.argsort(-values, kind="stable")
    exceeds = np.empty(len(values))
    exceeds[order] = np.cumsum(shares[order]) - shares[order] / 2
    return np.asarray(np.floor(np.log(exceeds) / np.log(_ALIKE)), dtype=np.int64)


def _short(value: float) -> float:
    """A number rounded to `_DIGITS` significant digits."""
    return float(f"{value:.{_DIGITS}g}")
