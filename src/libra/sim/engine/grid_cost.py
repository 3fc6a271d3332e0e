"""What an iteration takes on a GPU, read from the grid that the planner reads.

Invariant: the simulator and the planner have one source of times, `cost.EngineGrid`; what is added here is how the
parts of a mixed iteration come together, and what the CPU adds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from libra.cost.grid import EngineGrid
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import UNLIMITED, Chunk, DecodeBatch

_MEMORY = 1 << 16  # distinct chunks remembered


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the CPU does for an iteration, in seconds: scheduling, preparing inputs, handling outputs.

    Grids that were measured on a whole engine contain it already; tables of GPU kernels do not.
    """

    iteration: float = 0.0
    request: float = 0.0  # for each request in the iteration
    overlapped: bool = False  # prepared while the GPU is busy (asynchronous scheduling): only the longer one counts

    def __post_init__(self) -> None:
        if self.iteration < 0 or self.request < 0:
            raise ValueError(f"Overhead({self.iteration}, {self.request}): neither may be negative")

    def seconds(self, requests: int) -> float:
        return self.iteration + self.request * requests

    def beside(self, device: float, requests: int) -> float:
        """Seconds of an iteration of `requests` requests that takes the device so many."""
        cpu = self.seconds(requests)
        return max(device, cpu) if self.overlapped else device + cpu


NO_OVERHEAD = Overhead()


class GridCost:
    """`IterationCost` of one tensor-parallel engine.

    - Decoding alone takes what the grid says for the batch and its mean context: piecewise linear in their product. A
      batch is padded to the next CUDA graph; the padding has no context.
    - Drafts that are verified cost their linear layers.
    - One prefill chunk alone takes what the grid says for it.
    - Together, linear layers see all tokens at once: they cost what one chunk of so many tokens would cost more than
      the decoding batch alone; attention adds up. The attention in a chunk's grid time is what its pairs of tokens
      cost, at the rate by which the grid's largest chunk grows with what is before it.

    Raises ValueError where the grid does not reach: to `max_num_seqs`, to `max_num_batched_tokens`, or to
    `max_model_len`.
    """

    __slots__ = ("_attention", "_captures", "_grid", "_linear", "_lines", "_overhead", "_request", "_unpadded")

    def __init__(self, grid: EngineGrid, config: EngineConfig, overhead: Overhead = NO_OVERHEAD) -> None:
        largest = _padded(config.max_num_seqs, config.capture_sizes)
        longest = config.max_model_len
        try:
            grid.decode_seconds(largest, longest)
            grid.prefill_seconds(config.max_num_batched_tokens, longest)
        except ValueError as error:
            raise ValueError(
                f"the engine's times are not known up to max_num_seqs {config.max_num_seqs},"
                f" max_num_batched_tokens {config.max_num_batched_tokens} and max_model_len {longest}: {error}"
            ) from None
        self._grid = grid
        self._overhead = overhead
        self._captures = config.capture_sizes
        self._lines: dict[DecodeBatch, tuple[list[int], list[tuple[int, int, int]]]] = {}
        most = config.max_num_batched_tokens
        padded = [_padded(tokens, config.capture_sizes) for tokens in range(most + 1)]
        linear = _linear_layers(grid, padded[-1])
        self._unpadded: list[float] = linear.tolist()
        self._linear = [round(self._unpadded[tokens] * TICKS) for tokens in (0, *padded[1:])]  # ticks
        self._attention: Callable[[Chunk], int] = lru_cache(_MEMORY)(self._attention_ticks)
        self._request = round(overhead.request * TICKS)

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        lines = self._lines.get(batch)
        if lines is None:
            lines = self._lines[batch] = self._make_lines(batch)
        limits, pieces = lines
        return pieces[bisect_right(limits, context)]

    def mixed(self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk]) -> int:
        requests = batch.requests
        decoded = tokens = requests * batch.tokens_each
        ticks: int = 0
        for chunk in chunks:
            tokens += chunk[0]
            ticks += self._attention(chunk)
        ticks += self._linear[tokens] - self._linear[decoded]
        overhead = self._overhead
        if requests and not overhead.overlapped:
            base, slope, _ = self.line(batch, context)
            return max(1, ticks + self._request * len(chunks) + base + slope * context)
        seconds = ticks / TICKS
        if requests:
            padded = _padded(requests, self._captures)
            seconds += self._grid.decode_seconds(padded, context / padded) + self._draft_seconds(batch)
        return max(1, round(overhead.beside(seconds, requests + len(chunks)) * TICKS))

    def _make_lines(self, batch: DecodeBatch) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Limits of context between the pieces, and the pieces, as `line` gives them."""
        requests = batch.requests
        padded = _padded(requests, self._captures)
        contexts: Sequence[int] = self._grid.contexts
        if self._overhead.overlapped:  # the CPU may be the longer one up to anywhere that the grid reaches
            contexts = sorted({1, *contexts, 4 * contexts[-1]})
        drafts = self._draft_seconds(batch)
        knots = [(length * padded, self._grid.decode_seconds(padded, length) + drafts) for length in contexts]
        if self._overhead.overlapped:
            knots = _at_least(knots, self._overhead.seconds(requests))
        limits, pieces = [], []
        for (left, before), (right, after) in pairwise(knots):
            start = round(self._overhead.beside(before, requests) * TICKS)
            end = round(self._overhead.beside(after, requests) * TICKS)
            slope = round((end - start) / (right - left))
            limits.append(right)
            pieces.append((start - slope * left, slope, right))
        # As in the grid, times go on beyond the last point as before it.
        limits.pop()
        pieces[-1] = (*pieces[-1][:2], UNLIMITED)
        for (base, slope, _), context in zip(pieces, [requests, *limits], strict=True):
            if base + slope * context < 1:
                raise ValueError(
                    f"an iteration of {requests} requests with {context} tokens would take {base + slope * context}"
                    " ticks: measure the grid again there"
                )
        return limits, pieces

    def _draft_seconds(self, batch: DecodeBatch) -> float:
        """What the linear layers take longer for the drafts that are verified."""
        linear = self._linear
        return float(linear[batch.requests * batch.tokens_each] - linear[batch.requests]) / TICKS

    def _attention_ticks(self, chunk: Chunk) -> int:
        """What a chunk costs beyond its linear layers."""
        new, before = chunk
        return round((self._grid.prefill_seconds(new, before) - self._unpadded[new]) * TICKS)


def _linear_layers(grid: EngineGrid, most: int) -> NDArray[np.float64]:
    """[tokens] seconds of the linear layers, and of all else that looks at each token alone, for 0 to `most` tokens."""
    chunk, far, near = grid.chunks[-1], grid.prefixes[-1], grid.prefixes[0]
    pair = (grid.prefill_seconds(chunk, far) - grid.prefill_seconds(chunk, near)) / (chunk * (far - near))
    tokens = np.arange(1, most + 1)
    alone = grid.prefill_seconds_at(tokens, [0])[:, 0] - max(0.0, pair) * tokens * (tokens + 1) / 2
    # More tokens never cost less: measured tables fall here and there.
    return np.concatenate([[0.0], np.maximum.accumulate(np.maximum(alone, 0.0))])


def _padded(requests: int, captures: tuple[int, ...]) -> int:
    """The size of the CUDA graph that runs so many tokens; without one that large they run as they are."""
    place = bisect_left(captures, requests)
    return captures[place] if place < len(captures) else requests


def _at_least(knots: list[tuple[int, float]], least: float) -> list[tuple[int, float]]:
    """The line through the knots where it is above `least`, else that: with a knot where one becomes the other."""
    raised = []
    for (left, before), (right, after) in pairwise(knots):
        raised.append((left, max(before, least)))
        if (before < least) != (after < least):
            crossing = left + round((least - before) / (after - before) * (right - left))
            if left < crossing < right:
                raised.append((crossing, least))
    raised.append((knots[-1][0], max(knots[-1][1], least)))
    return raised
