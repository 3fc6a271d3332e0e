"""Deltas of real optimiser steps: how many bf16 numbers of a model change, and what the exact delta costs.

Invariant: weights are fp32 at the trainer and published as bf16, as a run does it, and every rate goes on from the same
state. What is measured is what nodes do: the source copies, compares, packs and checks, the mirror applies and checks;
seconds are of this process's processor, so neighbours do not count.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.rows import Row, at_least, at_most
from libra.backends.transport.shared_memory import Vector
from libra.backends.weights.copying import add_difference, difference
from libra.backends.weights.grid import Grid
from libra.lend.weights.feed import Feed
from libra.lend.weights.mirror import Mirror
from libra.lend.weights.source import Source
from libra.lend.weights.wire import Chunk

_WIDTH, _LAYERS, _VOCABULARY = 768, 14, 8192  # 123 M parameters
_BATCH, _LENGTH = 4, 16  # gradients are noise either way, and a step costs what AdamW costs
_WARM_STEPS = 10  # in which the moments forget that they began with nothing
_RATES = {1e-6: 0.01, 3e-6: None, 1e-5: 0.05, 5e-5: None}  # and the most of the dense bytes that is promised
_STEPS = 3  # at each rate; the first leads from one rate to the other and is left out
_ENCODE, _APPLY = 0.4, 0.6  # GB/s of dense weights, for each core


class _Training:
    """Policy gradients with random advantages: what is left of gradients when there is little left to learn. Weights
    are of the size of a trained model's, 0.02 on average."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self._embed = nn.Embedding(_VOCABULARY, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, 12, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True, bias=False
        )
        self._blocks = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self._head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self._parameters = [p for part in (self._embed, self._blocks, self._head) for p in part.parameters()]
        for parameter in self._parameters:
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self._optimiser = torch.optim.AdamW(self._parameters, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
        self._mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)

    def step(self, rate: float) -> None:
        tokens = torch.randint(_VOCABULARY, (_BATCH, _LENGTH))
        hidden = self._blocks(self._embed(tokens), self._mask, is_causal=True)
        chances = torch.log_softmax(self._head(hidden)[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        self._optimiser.zero_grad()
        (-(chances.mean(1) * torch.randn(_BATCH)).mean()).backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()

    def published(self) -> Vector:
        """The bytes of all weights in bf16."""
        flat = [p.detach().to(torch.bfloat16).flatten() for p in self._parameters]
        content: Vector = torch.cat(flat).view(torch.uint8).numpy()
        return content


def measured() -> list[Row]:
    training = _Training()
    for _ in range(_WARM_STEPS):
        training.step(1e-6)
    rows = []
    for rate, most in _RATES.items():
        rows += list(_rows(training, rate, most))
    return rows


def _even_rate(before: Vector, after: Vector) -> float:
    """GB/s of the link on which a difference in one piece, made and applied by one core each and checked as nodes do,
    takes as long as everything."""
    into, seconds = np.full(len(before), 1, np.uint8), list[float]()
    for way in (_by_copy, _by_difference):
        began = time.process_time()
        way(before, after, into)
        seconds.append(time.process_time() - began)
    saved = len(after) - len(difference(before, after))
    return saved / (seconds[1] - seconds[0]) / 1e9


def _by_copy(before: Vector, after: Vector, into: Vector) -> None:
    np.copyto(into, after)


def _by_difference(before: Vector, after: Vector, into: Vector) -> None:
    zlib.crc32(before.data)
    packed = difference(before, after)
    zlib.crc32(before.data)
    add_difference(packed, before, into)


def _rows(training: _Training, rate: float, most: float | None) -> Iterator[Row]:
    """Rows of the last step at a rate. Rates follow each other, from small to large, on the same weights."""
    for _ in range(_STEPS - 1):
        training.step(rate)
    before = training.published()
    training.step(rate)
    after = training.published()
    size, case = len(after), f"lr {rate:g}"
    changed = float(np.mean(before.view(np.uint16) != after.view(np.uint16)))
    sent, encode, apply, exact = asyncio.run(_carried(before, after))
    yield Row(case, "weights", size / 1e6, "MB")
    yield Row(case, "numbers that change", 100 * changed, "%")
    yield Row(case, "as pairs of index and value, 6 bytes each", 100 * 3 * changed, "% of dense")
    limit = None if most is None else 100 * most
    yield at_most(case, "the delta, as sent", 100 * sent / size, "% of dense", limit)
    yield Row(case, "exact", exact, "of 1", "1", exact)
    for name, seconds, least in (("encode", encode, _ENCODE), ("apply", apply, _APPLY)):
        limit = None if most is None else least
        yield at_least(case, f"{name}, per core", size / seconds / 1e9, "GB/s of dense", limit)
    yield Row(case, "in one piece, as fast as everything on a link of", _even_rate(before, after), "GB/s")


async def _carried(before: Vector, after: Vector) -> tuple[int, float, float, bool]:
    """Bytes sent, seconds of the source's and the mirror's processor, and whether the mirror has what was published."""
    grid = Grid(len(after), "bfloat16")
    everything = np.ones(len(grid), np.bool_)
    feed = Feed(grid, everything, kept_bytes=grid.size)
    source = Source(feed, "benchmark")
    await source.publish(0, before, zlib.crc32(before.data))
    halves = np.full(grid.size, 1, np.uint8), np.full(grid.size, 1, np.uint8)  # memory that was written before
    mirror = Mirror(grid, halves, everything)
    wholes = [source.chunk(number) for number in range(len(grid))]
    for chunk in wholes:
        mirror.take(chunk)
    for kept in feed.entries():
        assert not isinstance(kept.item, Chunk)
        mirror.confirm(kept.item)
    assert mirror.settle()
    del wholes
    checksum = zlib.crc32(after.data)
    began = time.process_time()
    await source.publish(1, after, checksum)
    encoded = time.process_time()
    for kept in feed.entries():
        mirror.take(kept.item) if isinstance(kept.item, Chunk) else mirror.confirm(kept.item)
    settled = mirror.settle()
    applied = time.process_time()
    exact = settled and mirror.checksum == checksum == zlib.crc32(mirror.content().data)
    return sum(len(kept.frame) for kept in feed.entries()), encoded - began, applied - encoded, exact
