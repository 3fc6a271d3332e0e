"""Load of expert ranks: frequencies of experts, their placement, and the load of the fullest rank.

Invariant: every token goes to `active` different experts of a layer, so no expert gets more than 1 / `active` of all
copies of tokens. Replicas of an expert share its tokens evenly. Placement is vLLM's: ranks first hold consecutive
experts, and vLLM's balancer (`vllm.distributed.eplb`, after DeepSeek's EPLB) moves and replicates experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float64]  # [layers, experts] shares of all copies of tokens; each row sums to 1
Placement = NDArray[np.int64]  # [layers, slots] expert in each slot; ranks have consecutive slots


@dataclass(frozen=True, slots=True)
class Balancing:
    """vLLM's `eplb_config`: every `step_interval` iterations, experts move according to the load of the last
    `window_size` iterations.
    """

    num_redundant_experts: int = 0
    window_size: int = 1000
    step_interval: int = 3000

    def __post_init__(self) -> None:
        if self.num_redundant_experts < 0:
            raise ValueError(f"num_redundant_experts is {self.num_redundant_experts}; give 0 or more")
        for field in ("window_size", "step_interval"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; set it to 1 or more")

    def moves(self, iteration: int) -> int:
        """Number of expert moves before `iteration` is computed; the first iteration is 0. vLLM starts its counter of
        iterations at three quarters of `step_interval`.
        """
        return (iteration + self._ahead) // self.step_interval

    def moved_at(self, moves: int) -> int:
        """The iteration that begins with the `moves`-th move of experts."""
        return moves * self.step_interval - self._ahead

    def next_move(self, iteration: int) -> int:
        """The first iteration after `iteration` that begins with a move of experts."""
        return self.moved_at(self.moves(iteration) + 1)

    @property
    def _ahead(self) -> int:
        return max(0, self.step_interval - self.step_interval // 4)


def power_law(experts: int, active: int, exponent: float, layers: int, seed: int) -> Shares:
    """Shares by a power law: the share of the i-th most frequent expert is proportional to i ** -exponent, and at most
    1 / `active`. The order of the experts is drawn for each layer. Exponent 0: all shares are equal.
    """
    if not 0 <= exponent < 100:
        raise ValueError(f"power_law is {exponent}; give 0 (all experts are equally frequent) or more")
    ranked = _capped(np.arange(1, experts + 1, dtype=float) ** -exponent, active)
    if exponent == 0:
        return np.tile(ranked, (layers, 1))
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(ranked) for _ in range(layers)])


def measured(counts: Sequence[Sequence[float]], experts: int, active: int, layers: int) -> Shares:
    """Shares from counts of the tokens that chose each expert: a row for each layer, or one row for all layers. Raises
    a ValueError whose message begins with `frequencies`.
    """
    if len(counts) not in (1, layers):
        raise ValueError(f"frequencies are {len(counts)} rows; give 1 or {layers} of {experts} counts each")
    for place, row in enumerate(counts):
        if len(row) != experts:
            raise ValueError(f"frequencies.{place} has {len(row)} counts; give {experts}, one for each expert")
    table = np.array(counts, dtype=float)
    if not (np.isfinite(table).all() and (table >= 0).all() and (np.count_nonzero(table, axis=1) >= active).all()):
        raise ValueError(f"frequencies: give counts of 0 or more, with {active} or more experts above 0 in each row")
    shares: Shares = np.stack([_capped(row, active) for row in table])
    return shares if len(shares) == layers else np.tile(shares, (layers, 1))


def initial_placement(experts: int, slots: int, layers: int) -> Placement:
    """Experts in their order, repeated from the first if there are more slots."""
    return np.tile(np.arange(slots, dtype=np.int64) % experts, (layers, 1))


def rank_shares(shares: Shares, placement: Placement, ranks: int) -> Shares:
    """[layers, ranks] shares of all copies of tokens that each rank computes."""
    layers, slots = placement.shape
    each = shares / np.stack([np.bincount(row, minlength=shares.shape[1]) for row in placement])
    found: Shares = np.take_along_axis(each, placement, axis=1).reshape(layers, ranks, slots // ranks).sum(axis=2)
    return found


def fullness(shares: Shares, placement: Placement, ranks: int) -> Shares:
    """[layers] load of the fullest rank, relative to the mean of all ranks."""
    found: Shares = rank_shares(shares, placement, ranks).max(axis=1) * ranks
    return found


def rebalanced(load: Shares, placement: Placement, ranks: int) -> Placement:
    """The placement for this load: the most loaded experts get replicas, a greedy packing balances the ranks, and an
    expert that stays on a rank keeps its slot.
    """
    slots = placement.shape[1]
    replicas, counts = _replicated(load, slots)
    packed = _packed(np.take_along_axis(load / counts, replicas, axis=1), ranks)
    placed = np.take_along_axis(replicas, packed, axis=1)
    return _kept_in_place(placed, placement, ranks)


def arrivals(before: Placement, after: Placement, ranks: int) -> NDArray[np.int64]:
    """[layers, ranks] number of experts that a rank has in `after`, but not in `before`."""
    layers, slots = before.shape
    each = slots // ranks
    counts = np.zeros((layers, ranks), np.int64)
    for layer in range(layers):
        for rank in range(ranks):
            of_rank = slice(rank * each, (rank + 1) * each)
            counts[layer, rank] = len(set(after[layer, of_rank]) - set(before[layer, of_rank]))
    return counts


def _capped(weights: Shares, active: int) -> Shares:
    """Shares in proportion to the weights, each at most 1 / `active`."""
    most = 1 / active
    shares: Shares = weights / weights.sum()
    while (over := shares > most * (1 + 1e-12)).any():
        full = over | (shares >= most)
        rest = ~full & (weights > 0)
        if not rest.any():
            break
        shares = np.where(full, most, weights * (1 - most * full.sum()) / weights[rest].sum())
    return shares


def _replicated(load: Shares, slots: int) -> tuple[Placement, Shares]:
    """[layers, slots] expert of each replica, and [layers, experts] number of replicas. The expert whose replicas have
    the most load gets one more replica, until all slots are full.
    """
    layers, experts = load.shape
    replicas = np.tile(np.arange(slots, dtype=np.int64), (layers, 1))
    counts, each = np.ones((layers, experts)), np.arange(layers)
    for slot in range(experts, slots):
        most = np.argmax(load / counts, axis=1)
        replicas[:, slot] = most
        counts[each, most] += 1
    return replicas, counts


def _packed(load: Shares, ranks: int) -> Placement:
    """[layers, slots] replica in each slot. The most loaded replica goes first, to the least loaded rank with a free
    slot.
    """
    layers, slots = load.shape
    each = slots // ranks
    order = np.argsort(-load, axis=1)
    packed = np.empty((layers, slots), np.int64)
    if each == 1:
        packed[:] = np.arange(slots)
        return packed
    for layer in range(layers):
        held, taken = np.zeros(ranks), [0] * ranks
        for replica in order[layer]:
            rank = int(np.argmin(held))
            packed[layer, rank * each + taken[rank]] = replica
            held[rank] += load[layer, replica]
            taken[rank] += 1
            if taken[rank] == each:
                held[rank] = np.inf
    return packed


def _kept_in_place(after: Placement, before: Placement, ranks: int) -> Placement:
    """The same experts on each rank, reordered: experts that stay keep their slots, and new experts fill the free
    slots.
    """
    each, kept = after.shape[1] // ranks, after.copy()
    for layer in range(len(after)):
        for start in range(0, after.shape[1], each):
            new = after[layer, start : start + each].tolist()
            slots: list[int | None] = [None] * each
            for slot, expert in enumerate(before[layer, start : start + each].tolist()):
                if expert in new:
                    slots[slot] = expert
                    new.remove(expert)
            rest = iter(new)
            kept[layer, start : start + each] = [next(rest) if it is None else it for it in slots]
    return kept
