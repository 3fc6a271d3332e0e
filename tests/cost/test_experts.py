"""How full expert ranks are, against sums one by one; where experts go, against vLLM's balancer."""

from __future__ import annotations

import os
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.cost.experts import (
    Balancing,
    arrivals,
    fullness,
    initial_placement,
    measured,
    power_law,
    rank_shares,
    rebalanced,
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A load [layers, experts], slots, ranks."""
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]))
    experts = ranks * draw(st.integers(1, 6))
    slots = experts + ranks * draw(st.integers(0, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    return random.random((draw(st.integers(1, 3)), experts)) ** 3 + 1e-6, slots, ranks


@settings(max_examples=200, deadline=None)
@given(loads())
def test_every_copy_of_a_token_is_on_one_rank(case: tuple[np.ndarray, int, int]) -> None:
    load, slots, ranks = case
    shares = load / load.sum(axis=1, keepdims=True)
    before = initial_placement(shares.shape[1], slots, len(shares))
    after = rebalanced(load, before, ranks)
    for placement in (before, after):
        each = slots // ranks
        wanted = [
            [
                sum(row[it] / np.count_nonzero(held == it) for it in held[rank * each : (rank + 1) * each])
                for rank in range(ranks)
            ]
            for row, held in zip(shares, placement, strict=True)
        ]
        assert rank_shares(shares, placement, ranks) == pytest.approx(np.array(wanted))
        assert set(placement[0]) == set(range(shares.shape[1]))
    if slots == shares.shape[1]:  # more replicas alone may come to lie badly
        assert (arrivals(before, before, ranks) == 0).all()
    assert (fullness(shares, after, ranks) >= 1 - 1e-12).all()


def test_no_expert_has_more_than_a_copy_of_every_token() -> None:
    shares = power_law(64, 8, 3.0, 2, seed=1)
    assert shares.sum(axis=1) == pytest.approx(1)
    assert shares.max() == pytest.approx(1 / 8)
    assert power_law(64, 8, 0.0, 1, seed=1) == pytest.approx(1 / 64)
    assert measured([[4, 0, 2, 2]], 4, 2, 3)[2] == pytest.approx([0.5, 0, 0.25, 0.25])
    assert measured([[4, 0, 0, 4]], 4, 2, 1)[0] == pytest.approx([0.5, 0, 0, 0.5])


def test_frequencies_are_refused_by_name() -> None:
    for counts in ([[1.0, 2.0]], [[1.0, 0.0, 0.0, 0.0]], [[1.0, -1.0, 2.0, 3.0]], [[1.0] * 4] * 2):
        with pytest.raises(ValueError, match=r"^frequencies"):
            measured(counts, 4, 2, 3)
    with pytest.raises(ValueError, match=r"^frequencies\.1 has 3 counts; give 4, one for each expert$"):
        measured([[1.0] * 4, [1.0] * 3, [1.0] * 4], 4, 2, 3)


def test_vllm_moves_first_after_a_quarter_of_its_interval() -> None:
    balancing = Balancing()
    assert [balancing.moves(it) for it in (0, 749, 750, 3749, 3750)] == [0, 0, 1, 1, 2]
    assert balancing.next_move(0) == 750
    assert balancing.next_move(750) == 3750


@pytest.mark.integration
@patch.dict(os.environ)  # importing vLLM sets LD_PRELOAD and more, which the processes of other tests would inherit
def test_experts_go_where_vllm_sends_them() -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    import torch
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    for seed in range(300):
        random = np.random.default_rng(seed)
        ranks = int(random.choice([1, 2, 4, 8, 16]))
        experts = ranks * int(random.integers(1, 7))
        slots = experts + ranks * int(random.integers(0, 3))
        before = initial_placement(experts, slots, 2)
        for _ in range(2):
            load = random.integers(1, 10**6, (2, experts)).astype(float)
            theirs = DefaultEplbPolicy.rebalance_experts(
                torch.from_numpy(load), slots, 1, 1, ranks, torch.from_numpy(before)
            )
            after = rebalanced(load, before, ranks)
            assert (after == theirs.numpy()).all()
            before = after
