"""Packing and dealing of a batch against the algorithms they stand for, run trajectory by trajectory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.train_batch import Batch, batch_of
from libra.lengths import TrajectoryClass


def trajectory_class(share: float, mean: float) -> TrajectoryClass:
    return TrajectoryClass(share, math.ceil(mean), mean, mean / 2, 1.0, 1.0, 1.0, 0.0, 1.0)


def first_fit_decreasing(lengths: list[int], room: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for packed in bins:
            if sum(packed) + length <= room:
                packed.append(length)
                break
        else:
            bins.append([length])
    return bins


batches = st.dictionaries(st.integers(1, 60), st.integers(1, 12), min_size=1, max_size=6).map(
    lambda counts: Batch(*zip(*((float(n), float(counts[n])) for n in sorted(counts, reverse=True)), strict=True))
)


def expanded(batch: Batch) -> list[int]:
    return [int(n) for n, count in zip(batch.lengths, batch.counts, strict=True) for _ in range(int(count))]


@given(batches, st.integers(1, 100))
def test_packing_is_first_fit_decreasing(batch: Batch, room: int) -> None:
    packed, wanted = batch.packed(room), first_fit_decreasing(expanded(batch), room)
    found = sorted(t for t, repeats in zip(packed.tokens, packed.repeats, strict=True) for _ in range(round(repeats)))
    assert found == sorted(sum(lengths) for lengths in wanted)
    assert packed.count == len(wanted)
    assert float(packed.repeats @ packed.keys) == pytest.approx(batch.context_sum)


@given(batches, st.integers(1, 100), st.floats(0.01, 3))
def test_expected_counts_keep_every_token(batch: Batch, room: int, scale: float) -> None:
    expected = Batch(batch.lengths, tuple(count * scale for count in batch.counts))
    packed = expected.packed(room)
    assert float(packed.repeats @ packed.tokens) == pytest.approx(expected.tokens)
    assert float(packed.repeats @ packed.keys) == pytest.approx(expected.context_sum)
    assert packed.tokens.max() <= max(room, max(batch.lengths)) + 1e-9


def test_packing_by_hand() -> None:
    packed = Batch((6.0, 3.0, 1.0), (2.0, 2.0, 4.0)).packed(10)
    assert packed.repeats.tolist() == [2.0, 1.0]  # 6 + 3 + 1 twice, then the ones that are left
    assert packed.tokens.tolist() == [10.0, 2.0]
    assert packed.keys.tolist() == [21 + 6 + 1, 2]


def test_a_trajectory_longer_than_a_micro_batch_has_one_to_itself() -> None:
    packed = Batch((50.0, 2.0), (1.0, 5.0)).packed(10)
    assert packed.tokens.tolist() == [50.0, 10.0]


def test_a_rank_gets_its_turn_lightest_at_both_ends() -> None:
    packed = Batch((9.0, 8.0, 7.0, 6.0), (2.0, 2.0, 2.0, 2.0)).packed(9)
    tokens, keys = packed.of_rank(2, 4)
    assert tokens.tolist() == [7.0, 9.0, 8.0, 6.0]
    assert keys.tolist() == [28.0, 45.0, 36.0, 21.0]


def longest_first(lengths: Sequence[float], ranks: int, per_token: float, per_key: float) -> float:
    loads = [0.0] * ranks
    for n in sorted(lengths, reverse=True):
        heapq.heappush(loads, heapq.heappop(loads) + per_token * n + per_key * n * (n + 1) / 2)
    return max(loads)


@given(batches, st.integers(1, 12), st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, 0.05)]))
def test_imbalance_is_below_longest_first_dealing_and_near_it(
    batch: Batch, ranks: int, costs: tuple[float, float]
) -> None:
    mean = (costs[0] * batch.tokens + costs[1] * batch.context_sum) / ranks
    dealt = longest_first(expanded(batch), ranks, *costs) / mean
    bound = float(batch.imbalance(np.array([float(ranks)]), *costs)[0])
    assert 1 <= bound <= dealt * (1 + 1e-9)
    assert dealt <= bound * 2  # what dealing guarantees: the mean, and once the longest


@pytest.mark.parametrize("ranks", [2, 6, 12, 48, 96, 192, 512])
def test_imbalance_of_a_long_tail_is_that_of_longest_first_dealing(ranks: int) -> None:
    lengths = np.geomspace(36000, 1500, 24)
    batch = Batch(tuple(lengths.tolist()), tuple(np.ceil(40000 / lengths).tolist()))
    trajectories = [n for n, count in zip(batch.lengths, batch.counts, strict=True) for _ in range(int(count))]
    dealt = longest_first(trajectories, ranks, 1.0, 5e-5) * ranks / (batch.tokens + 5e-5 * batch.context_sum)
    assert float(batch.imbalance(np.array([float(ranks)]), 1.0, 5e-5)[0]) == pytest.approx(dealt, rel=0.03)


@pytest.mark.parametrize(("count", "ranks", "wanted"), [(3, 2, 2 / 1.5), (7, 3, 3 / (7 / 3)), (10, 3, 4 / (10 / 3))])
def test_one_trajectory_too_many_is_a_round_more(count: int, ranks: int, wanted: float) -> None:
    equal = Batch((1000.0,), (float(count),))
    assert float(equal.imbalance(np.array([float(ranks)]), 1.0, 0.0)[0]) == pytest.approx(wanted)


def test_classes_become_a_batch_longest_first() -> None:
    batch = batch_of([trajectory_class(0.75, 1000), trajectory_class(0.25, 4000), trajectory_class(0.0, 9000)], 512)
    assert batch.lengths == (4000, 1000)
    assert batch.counts == (128, 384)
    assert batch.trajectories == 512
    assert batch.tokens == 128 * 4000 + 384 * 1000
    assert batch.context_sum == 128 * 4000 * 4001 / 2 + 384 * 1000 * 1001 / 2


@pytest.mark.parametrize(
    ("lengths", "counts", "message"),
    [
        ((), (), "give each its count"),
        ((1.0,), (1.0, 2.0), "give each its count"),
        ((1.0, 0.0), (1.0, 1.0), "0 or less"),
        ((1.0, 2.0), (1.0, 1.0), "longest first"),
    ],
)
def test_an_impossible_batch_is_refused(lengths: tuple[float, ...], counts: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch(lengths, counts)


def test_a_batch_has_a_trajectory() -> None:
    with pytest.raises(ValueError, match="trajectories is 0"):
        batch_of([trajectory_class(1.0, 1000)], 0)
