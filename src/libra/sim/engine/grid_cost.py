"""Duration of an iteration on a GPU, from the planner's grid.

Invariant: the simulator and the planner read their times from one source, `cost.EngineGrid`. This module combines the
parts of a mixed iteration, and adds the host overhead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import isqrt

from libra.cost.graphs import graph_of, padded
from libra.cost.grid import EngineGrid, linear_layers
from libra.cost.host import HostCost
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import NONE_ADMITTED, UNLIMITED, Admitted, Chunk, DecodeBatch

_MEMORY = 1 << 16  # distinct chunks whose ticks are cached
_SCALE = 1 << 16  # shares of tokens are whole numbers, in units of 1 / _SCALE


class GridCost:
    """`IterationCost` of one tensor-parallel engine.

    - Decoding alone takes the grid's time for the batch and its mean context, piecewise linear in their product. A
      batch is padded to the next CUDA graph; the padding has no context.
    - Verifying drafts takes the time of the linear layers for their tokens. Before that, each draft takes a pass of the
      drafter over all requests together. The drafter computes prompts, too.
    - One prefill chunk alone takes the grid's time for the chunk.
    - In a mixed iteration, linear layers process all tokens at once: they add the time of one chunk with all these
      tokens, minus the time of the decoding batch alone. Times of attention add up. Within a chunk's grid time,
      attention is charged per pair of tokens. Its rate is the rate at which the time of the grid's largest chunk grows
      with the context before the chunk.
    - If each chunk has as many tokens as a decoding request, the iteration counts as decoding only, since vLLM chooses
      the graph by the tokens. An example is the last token of a prompt whose KV was pulled.
    - The grid's terms and host overhead are added; see `libra.cost.kernels` and `libra.cost.host`.

    Raises ValueError if the grid does not reach `max_num_seqs`, `max_num_batched_tokens`, or `max_model_len`.
    """

    __slots__ = (
        "_alone",
        "_attention",
        "_captures",
        "_drafter",
        "_grid",
        "_host",
        "_least",
        "_linear",
        "_lines",
        "_longest",
        "_more",
        "_most",
        "_passes",
        "_request",
        "_saved",
        "_seqs",
        "_spread",
        "_together",
        "_unpadded",
        "uneven",
    )

    def __init__(
        self,
        grid: EngineGrid,
        config: EngineConfig,
        host: HostCost | None = None,
        drafter: EngineGrid | None = None,
    ) -> None:
        """`host` replaces the grid's host; `drafter` has the times of the drafting model; None: no such model."""
        self._captures = sizes = config.capture_sizes
        largest = self._size(DecodeBatch(config.max_num_seqs, config.tokens_each))
        longest = config.max_model_len
        try:
            grid.decode_seconds(largest, longest)
            grid.prefill_seconds(config.max_num_batched_tokens, longest)
        except ValueError as error:
            raise ValueError(
                f"engine times are not known up to max_num_seqs {config.max_num_seqs},"
                f" max_num_batched_tokens {config.max_num_batched_tokens} and max_model_len {longest}: {error}"
            ) from None
        self._grid, terms = grid, grid.terms
        self._host = host = grid.host if host is None else host
        self._drafter, self._passes = drafter, config.tokens_each - 1
        self._seqs, self._most = config.max_num_seqs, config.max_num_batched_tokens
        self._lines: dict[tuple[int, ...], tuple[list[int], list[tuple[int, int, int]]]] = {}
        most = config.max_num_batched_tokens
        run = [padded(tokens, sizes) for tokens in range(most + 1)]
        linear = linear_layers(grid, run[-1])
        self._unpadded: list[float] = linear.tolist()
        self._linear = [round(self._unpadded[tokens] * TICKS) for tokens in (0, *run[1:])]  # ticks
        self._together: list[int] | None = None  # ticks of an iteration with prefill; None: no such term
        if terms.linear is not None:
            self._together = [round(terms.linear * ticks) for ticks in self._linear]
        self._attention: Callable[[Chunk], int] = lru_cache(_MEMORY)(self._attention_ticks)
        self._alone: Callable[[tuple[int, int]], int] = lru_cache(_MEMORY)(self._alone_ticks)
        self._request = round(host.request * TICKS)
        self._least: list[int] = []  # least ticks of the device, by tokens; empty if the host sets none
        if host.piecewise or host.eager:
            self._least = [round(self._launching(tokens) * TICKS) for tokens in range(most + 1)]
        self._more = terms.decode - 1
        self.uneven = terms.uneven or host.admits
        self._spread, self._saved = round(terms.spread * _SCALE), round(terms.shared * _SCALE)
        self._longest = round(terms.longest * TICKS)  # ticks per token

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        if self.uneven:
            return self._uneven_line(batch, context)
        lines = self._lines.get(batch)
        if lines is None:
            lines = self._lines[batch] = self._make_lines(batch)
        limits, pieces = lines
        return pieces[bisect_right(limits, context)]

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        each = self._passes + 1
        if (
            chunks[0][0] == each
            and batch.requests + len(chunks) <= self._seqs
            and all(new == each for new, _ in chunks)
        ):
            return self._uniform(batch, context, chunks, admitted)
        requests = batch.requests
        decoded = tokens = requests * batch.tokens_each
        ticks = 0
        for chunk in chunks:
            tokens += chunk[0]
            ticks += self._attention(chunk)
        # Requests that get fewer tokens, due to `max_model_len` or the budget, count as if they got all.
        tokens, decoded = min(tokens, self._most), min(decoded, self._most)
        if self._together is None:
            ticks += self._linear[tokens] - self._linear[decoded]
        else:
            ticks += self._together[tokens]
            if requests:
                ticks -= self._alone((requests, batch.tokens_each))
        if self._longest:
            decoding = (context + batch.spread) // requests if requests else 0
            ticks += self._longest * max(decoding, *(before for _, before in chunks))
        host = self._host
        least = self._least[tokens] if self._least else 0
        if requests and not host.overlapped:
            base, slope, _ = self.line(batch, context)
            ticks += base + slope * context
            if least:
                ticks = max(ticks, least + round(host.seconds(requests) * TICKS))
            if admitted.requests:
                ticks += round(host.admitting(*admitted) * TICKS)
            return max(1, ticks + self._request * len(chunks))
        seconds = ticks / TICKS
        if requests:
            at = context + self._counted(batch)
            size = self._size(batch)
            seconds += self._decode_seconds(size, at / size) + self._draft_seconds(batch)
            if self._more:
                seconds += self._more * self._grid.decode_seconds(size, 0)
        seconds = max(seconds, least / TICKS)
        return max(
            1, round(host.beside(seconds, host.seconds(requests + len(chunks)) + host.admitting(*admitted)) * TICKS)
        )

    def _uniform(self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted) -> int:
        """Ticks of an iteration whose chunks count as decoding. The spread follows from the squares of all contexts."""
        requests, attended, squares = batch.requests, context, 0
        if requests and self.uneven:
            squares = (batch.spread * batch.spread + context * context) // requests
        for new, before in chunks:
            requests += 1
            attended += new + before
            squares += (new + before) ** 2
        spread = isqrt(max(0, requests * squares - attended * attended)) if self.uneven else 0
        base, slope, _ = self.line(DecodeBatch(requests, self._passes + 1, spread, batch.shared), attended)
        ticks, host = base + slope * attended, self._host
        admitting = host.admitting(*admitted)
        if host.overlapped:
            return max(ticks, round((host.seconds(requests) + admitting) * TICKS))
        return ticks + round(admitting * TICKS)

    def _uneven_line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        """`line` of a batch with a known spread of its contexts."""
        even = batch[:2]
        lines = self._lines.get(even)
        if lines is None:
            lines = self._lines[even] = self._make_lines(batch)
        limits, pieces = lines
        counted = self._counted(batch)
        base, slope, limit = pieces[bisect_right(limits, context + counted)]
        return base + slope * counted, slope, limit - counted

    def _launching(self, tokens: int, each: int = 0) -> float:
        """Least device seconds of a batch that only decodes, with `each` tokens per request; 0 for other batches."""
        kind, _ = graph_of(
            tokens, self._captures, self._seqs, "FULL_AND_PIECEWISE", uniform=each > 0, tokens_each=max(1, each)
        )
        return self._host.launching(kind)

    def _counted(self, batch: DecodeBatch) -> int:
        """Tokens to add to a batch's context: more for contexts of different lengths, fewer for tokens in shared
        blocks. The number is the same in all iterations of a stretch."""
        return (self._spread * batch.spread - self._saved * batch.shared) // _SCALE

    def _make_lines(self, batch: DecodeBatch) -> tuple[list[int], list[tuple[int, int, int]]]:
        """(limits of context between the pieces, the pieces in the form of `line`)."""
        requests, host = batch.requests, self._host
        size = self._size(batch)
        cpu, least = host.seconds(requests), self._launching(requests * batch.tokens_each, batch.tokens_each)
        if host.overlapped:
            least = max(least, cpu)
        contexts: Sequence[int] = self._grid.contexts
        if self._drafter is not None:
            contexts = sorted({*contexts, *self._drafter.contexts})
        if least:  # `least` may be the longer time anywhere in the grid, and beyond
            contexts = sorted({1, *contexts, 4 * contexts[-1]})
        drafts = self._draft_seconds(batch)
        if self._more:
            drafts += self._more * self._grid.decode_seconds(size, 0)
        knots = [(length * size, self._decode_seconds(size, length) + drafts) for length in contexts]
        if least:
            knots = _at_least(knots, least)
        limits, pieces = [], []
        for (left, before), (right, after) in pairwise(knots):
            start = round(host.beside(before, cpu) * TICKS)
            end = round(host.beside(after, cpu) * TICKS)
            slope = round((end - start) / (right - left))
            limits.append(right)
            pieces.append((start - slope * left, slope, right))
        # As in the grid, times beyond the last point continue the last piece.
        limits.pop()
        pieces[-1] = (*pieces[-1][:2], UNLIMITED)
        for (base, slope, _), context in zip(pieces, [requests, *limits], strict=True):
            if base + slope * context < 1:
                raise ValueError(
                    f"an iteration of {requests} requests with {context} tokens would take {base + slope * context}"
                    " ticks: measure the grid again there"
                )
        return limits, pieces

    def _alone_ticks(self, batch: tuple[int, int]) -> int:
        """Ticks of a batch without context, as part of an iteration with prefill that shares its linear layers."""
        size = self._size(DecodeBatch(*batch))
        alone = (1 + self._more) * self._grid.decode_seconds(size, 0)
        return round((alone + self._draft_seconds(DecodeBatch(*batch))) * TICKS)

    def _draft_seconds(self, batch: DecodeBatch) -> float:
        """Seconds that the tokens of drafts add to the linear layers of a batch's graph."""
        verified = self._linear[min(batch.requests * batch.tokens_each, self._most)]
        more: int = verified - round(self._unpadded[min(self._size(batch), self._most)] * TICKS)
        return more / TICKS

    def _decode_seconds(self, size: int, context: float) -> float:
        """Seconds of decoding a batch, including the drafter's passes."""
        seconds = self._grid.decode_seconds(size, context)
        if self._drafter is not None:
            seconds += self._passes * self._drafter.decode_seconds(size, context)
        return seconds

    def _size(self, batch: DecodeBatch) -> int:
        """Requests of the CUDA graph that runs a batch."""
        each = batch.tokens_each
        return -(-padded(batch.requests * each, self._captures) // each)

    def _attention_ticks(self, chunk: Chunk) -> int:
        """Ticks of a chunk in addition to its linear layers."""
        new, before = chunk
        seconds = self._grid.prefill_seconds(new, before) - self._unpadded[new]
        if self._drafter is not None:
            seconds += self._drafter.prefill_seconds(new, before)
        return round(seconds * TICKS)


def _at_least(knots: list[tuple[int, float]], least: float) -> list[tuple[int, float]]:
    """Knots of a piecewise linear line raised to at least `least`, with a further knot where the line crosses it."""
    raised = []
    for (left, before), (right, after) in pairwise(knots):
        raised.append((left, max(before, least)))
        if (before < least) != (after < least):
            crossing = left + round((least - before) / (after - before) * (right - left))
            if left < crossing < right:
                raised.append((crossing, least))
    raised.append((knots[-1][0], max(knots[-1][1], least)))
    return raised
