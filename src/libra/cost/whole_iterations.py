"""A grid of whole iterations for the planner: corrected kernels, host overhead, and effects between requests of a
batch.

Invariant: an iteration takes the mean time of the simulator (`libra.sim.engine.grid_cost`) over batches with the
statistics of a `RunningBatch`. Only the simulator prices shared blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from libra.cost.graphs import capture_sizes, graph_of
from libra.cost.grid import EngineGrid, linear_layers
from libra.cost.host import NO_HOST
from libra.cost.kernels import NO_TERMS
from libra.lengths import TrajectoryClass


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """Statistics of the requests that decode together."""

    uneven: float = 0.0  # standard deviation of their contexts, over the mean
    turns: float = 0.0  # turns admitted for each token that they generate
    tokens: float = 0.0  # tokens prefilled with each of these turns


EVEN = RunningBatch()  # contexts are alike, and nothing is admitted


def running_batch(classes: Sequence[TrajectoryClass], *, overlapping: bool) -> RunningBatch:
    """A batch of trajectories, each at a random token of its generation and with evenly growing context. Unless batches
    are `overlapping`, all trajectories started together and are about equally long.
    """
    generated = sum(cls.share * cls.generated for cls in classes)
    turns = sum(cls.share * cls.turns for cls in classes)
    if not generated or not turns:
        return EVEN
    means = [cls.context_sum / cls.generated if cls.generated else 0.0 for cls in classes]
    mean = sum(cls.share * cls.context_sum for cls in classes) / generated
    squares = sum(
        cls.share * cls.generated * (its**2 + (cls.mean_context - its) ** 2 / 3)
        for cls, its in zip(classes, means, strict=True)
    )
    uneven = math.sqrt(max(0.0, squares / generated / mean**2 - 1)) if overlapping and mean else 0.0
    return RunningBatch(uneven, turns / generated, sum(cls.share * cls.prefill for cls in classes) / turns)


def whole_iterations(
    grid: EngineGrid, max_num_seqs: int, max_num_batched_tokens: int, batch: RunningBatch = EVEN
) -> EngineGrid:
    """Fold terms and host into the grid of an engine with vLLM's CUDA graphs; the result has no terms and no host.

    A decode takes its kernels, with uneven contexts counted as longer contexts, and the host's overhead. Turns are
    admitted by a Poisson process. An iteration that admits a turn is launched like an iteration with prefill, and reads
    the longest context completely. Launches count only if they take longer than the kernels of decode and prefill. A
    chunk takes the longer of its kernels and their launches, without the host's time for the iteration. Neither decodes
    nor chunks include the cost of admitting turns (`EngineTiming`).
    """
    host, terms = grid.host, grid.terms
    corrected = terms.linear is not None or terms.longest or terms.decode != 1 or (terms.spread and batch.uneven)
    if not (host.priced or corrected):
        return replace(grid, terms=NO_TERMS, host=NO_HOST)
    sizes = capture_sizes(max_num_seqs, max_num_batched_tokens)

    def launching(tokens: int, *, uniform: bool) -> float:
        kind, _ = graph_of(tokens, sizes, max_num_seqs, "FULL_AND_PIECEWISE", uniform=uniform)
        return host.launching(kind)

    # With a point near 0, a lower limit in a row does not tilt the times extrapolated before the first point.
    chunks, contexts = (tuple(sorted({1, *axis})) for axis in (grid.chunks, grid.contexts))
    more = 0.0 if terms.linear is None else terms.linear - 1
    linear = linear_layers(grid, max(grid.chunks[-1], max_num_batched_tokens))
    prefill = tuple(
        tuple(
            max(float(one) + more * float(linear[chunk]) + terms.longest * prefix, launching(chunk, uniform=False))
            for prefix, one in zip(grid.prefixes, row, strict=True)
        )
        for chunk, row in zip(chunks, grid.prefill_seconds_at(chunks, grid.prefixes), strict=True)
    )
    token = (grid.prefill_seconds(max_num_batched_tokens, 0) + more * float(linear[-1])) / max_num_batched_tokens

    def with_prefill(sequences: int, context: int, device: float) -> float:
        """Expected device seconds that admitted turns add to an iteration."""
        admitted = sequences * batch.turns
        if not admitted:
            return 0.0
        likely = -math.expm1(-admitted)
        tokens = batch.tokens * admitted / likely  # in such an iteration
        room = max(0, sizes[-1] - sequences)
        eager = math.exp(-room / tokens) if tokens else float(not room)  # chunks are assumed to be exponential
        least = (1 - eager) * host.piecewise + eager * host.eager
        reading = terms.longest * context * (1 + batch.uneven)
        return likely * max(reading, least - device - token * tokens)

    counted = [length * (1 + terms.spread * batch.uneven) for length in contexts]
    kernels = grid.decode_seconds_at(grid.batches, counted) + (terms.decode - 1) * grid.decode_seconds_at(
        grid.batches, [0]
    )
    decode = []
    for sequences, row in zip(grid.batches, np.asarray(kernels).tolist(), strict=True):
        # Batches above `max_num_seqs` never run; their times serve interpolation.
        launched, cpu = launching(min(sequences, max_num_seqs), uniform=True), host.seconds(sequences)
        device = [max(seconds, launched) for seconds in row]
        decode.append(
            tuple(
                host.beside(its, cpu) + with_prefill(sequences, context, its)
                for context, its in zip(contexts, device, strict=True)
            )
        )
    # Launches may add nothing to the largest batch, whose prefill takes longer. Do not extrapolate this slope.
    decode[-1] = tuple(max(its) for its in zip(*decode[-2:], strict=True))
    return replace(
        grid, chunks=chunks, contexts=contexts, decode=tuple(decode), prefill=prefill, terms=NO_TERMS, host=NO_HOST
    )
