"""Lower bounds ("floors") on the times of one engine's iterations, which are the prices of a bound.

Invariant: no iteration of the simulated engine takes less than any of its floors. A floor is affine in an iteration's
outputs, tokens, context and prefill. So the floors of many iterations add up to the floor of their work, no matter how
the work is divided.

As a function of the number of computed tokens, a floor is a line below the cheapest possible iteration; parts that are
not convex are lost. Attention has the cheapest slopes between the grid's points. Host overhead that overlaps with the
GPU is a floor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from libra.cost.expert_grid import ExpertGrid
from libra.cost.graphs import padded
from libra.cost.grid import Array, EngineGrid, linear_layers
from libra.cost.host import NO_HOST
from libra.cost.lines import hull_lines, iteration_lines
from libra.sim.clock import TICKS
from libra.sim.engine.afd import AfdCost
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.group_cost import Graph

_ROUNDING = 1e-4  # the simulator rounds slopes to whole ticks for each token of context
_LINES = 3


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bound on the seconds of an iteration: the sum of its fields, each times its count, with `chunk`
    subtracted."""

    iteration: float  # once
    output: float  # per request that gets a token
    token: float  # per computed token
    context: float  # per token of context of decoding requests
    pair: float  # per pair of a prefilled token and a token that it attends to
    chunk: float  # subtracted per request that completes its prompt
    drafts: float = 0.0  # per request that verifies drafts, for all its drafts


@dataclass(frozen=True, slots=True)
class Prices:
    """All floors of an engine, and the least seconds of single iterations."""

    floors: tuple[Floor, ...]
    admission: float  # per admitted request
    admitted_token: float  # per token of an admitted request's context
    prompt: tuple[tuple[Array, float], ...]  # ([tokens + 1] of an iteration with `tokens` tokens of one prompt, pair)
    alone: tuple[tuple[Array, float, float], ...]  # ([tokens + 1] of any iteration, context, chunk)


def prices(
    grid: EngineGrid, config: EngineConfig, contexts: tuple[int, int], drafter: EngineGrid | None = None
) -> Prices:
    """Prices of an engine. `contexts` are the shortest and the longest context of decoding requests, and `drafter` the
    times of the drafter. A decoding request counts as the most tokens that it may compute, `config.tokens_each`."""
    host = grid.host
    beside, each = (0.0, 0.0) if host.overlapped else (host.iteration, host.request)
    floors, prompt, alone, drafts = [], [], [], config.tokens_each - 1
    for pair, chunk in _attention(grid, config, contexts[1], drafter):
        for slope in _slopes(grid, config, contexts):
            decode = _decode(grid, config, contexts, slope, drafter)
            # With the cost of attention added, the lower bound of launching no longer applies.
            launched = not pair and not slope
            least = _least(grid, config, decode, launched=launched) - chunk
            if least[1] >= 0:
                lines = _hull(least)
                floors += [Floor(start + beside, each, token, slope, pair, chunk) for start, token in lines]
                if drafts:  # drafts count as tokens, even drafts for which a full iteration has no room
                    lines = _hull(np.pad(least, (0, config.max_num_seqs * drafts), "edge"))
                    floors += [
                        Floor(start + beside, each, token, slope, pair, chunk, drafts * token) for start, token in lines
                    ]
                alone.append((least + beside + each, slope, chunk))
            if not slope:
                with_chunk = _least(grid, config, decode, launched=launched, chunked=True) - chunk
                if with_chunk[1] >= 0:
                    prompt.append((with_chunk + beside + each, pair))
    if host.overlapped and host.priced:
        floors.append(Floor(host.iteration, host.request, 0.0, 0.0, 0.0, 0.0))
        alone.append((np.full(2, host.seconds(1)), 0.0, 0.0))
    part = 1 - _ROUNDING
    return Prices(
        tuple(_below(floor) for floor in dict.fromkeys(floors)),
        0.0 if host.overlapped else host.admission * part,
        0.0 if host.overlapped else host.context_token * part,
        tuple((least * part, pair * part) for least, pair in prompt),
        tuple((least * part, slope * part, chunk) for least, slope, chunk in alone),
    )


def prices_of_rank(
    grid: ExpertGrid, config: EngineConfig, contexts: tuple[int, int], drafter: EngineGrid | None = None
) -> Prices:
    """Prices of one of several ranks that divide experts: the rank's own part, and the part that all ranks compute
    together. In the common part a token of any rank costs every rank its increment. The common part takes no less time
    than with this rank's tokens alone. Experts' times for drafts, and times of a drafter's experts, are left out.
    """
    own = prices(replace(grid.own, host=NO_HOST), config, contexts, drafter)
    ranks, most = grid.gpus // grid.own.tp, config.max_num_batched_tokens
    tokens = np.unique(np.concatenate([np.arange(1, 65), np.geomspace(64, ranks * most, 256).astype(int)]))
    seconds: Array = grid.layers * grid.layer_seconds(tokens / grid.gpus) * (1 - _ROUNDING)
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # tables are not monotone
    before = np.concatenate([seconds[:1], seconds[:-1]])  # seconds of the same number of tokens, or of fewer
    lines = hull_lines(tokens.astype(float), before, _LINES)
    alone: Array = np.concatenate([before[:1], np.interp(np.arange(1, most + 1), tokens, before)])

    def with_alone(least: Array, *, surely: bool) -> Array:
        found: Array = least + (alone[: len(least)] if surely else alone[1])
        return found

    drafts = config.speculative is not None  # an iteration may have fewer tokens than are counted

    return Prices(
        tuple(
            replace(it, iteration=it.iteration + start, token=it.token + ranks * more)
            for it in own.floors
            for start, more in lines
        ),
        own.admission,
        own.admitted_token,
        tuple((with_alone(least, surely=True), pair) for least, pair in own.prompt),
        tuple((with_alone(least, surely=not drafts), context, chunk) for least, context, chunk in own.alone),
    )


def group_prices(cost: AfdCost, config: EngineConfig, contexts: tuple[int, int]) -> Prices:
    """Prices of an attention rank: its own part plus the least possible times of FFN and links, and its share of the
    work that FFN and links do for all ranks.

    Each line of an iteration's cost is a floor, with the fewest possible tokens and without padding. The simulator
    rounds a rank's own part to whole ticks per token of context and layer; a floor subtracts this rounding.
    """
    config = replace(config, capture_sizes=())
    found = []
    for factor, more in cost.together(Graph("NONE"), cost.attention, 1, cost.host.seconds(1), 0).lines:
        if factor > 1:
            found.append(prices(_of_line(cost.grid, factor, more / TICKS), config, contexts))
    shared = Floor(0.0, 0.0, cost.attention * cost.least_token_seconds * (1 - _ROUNDING), 0.0, 0.0, 0.0)
    return Prices(
        (*(floor for it in found for floor in it.floors), shared),
        0.0,
        0.0,
        tuple(prompt for it in found for prompt in it.prompt),
        tuple(alone for it in found for alone in it.alone),
    )


def _of_line(grid: EngineGrid, factor: int, more: float) -> EngineGrid:
    terms = grid.terms.slowed(factor)
    more /= max(1.0, terms.linear or 0.0, terms.decode)  # these factors apply to the rank's own part only
    decode = tuple(
        tuple(factor * (one - batch * context / TICKS) + more for context, one in zip(grid.contexts, row, strict=True))
        for batch, row in zip(grid.batches, grid.decode, strict=True)
    )
    prefill = tuple(tuple(factor * one + more for one in row) for row in grid.prefill)
    return replace(grid, decode=decode, prefill=prefill, terms=terms)


def _below(floor: Floor) -> Floor:
    part = 1 - _ROUNDING
    return Floor(
        floor.iteration * part,
        floor.output * part,
        floor.token * part,
        floor.context * part,
        floor.pair * part,
        floor.chunk,
        floor.drafts * part,
    )


def _attention(
    grid: EngineGrid, config: EngineConfig, longest: int, drafter: EngineGrid | None
) -> Iterator[tuple[float, float]]:
    """Yield (pair, chunk), seconds: the attention of any chunk takes at least `pair` per pair of tokens, minus `chunk`.

    Tables are not monotone, most of all for short chunks after long prefixes, so a larger `pair` needs a larger
    `chunk`. A chunk that counts as a decoding request has no attention.
    """
    most = config.max_num_batched_tokens
    tokens = np.arange(1, most + 1)
    prefixes = grid.prefixes if drafter is None else {*grid.prefixes, *drafter.prefixes}
    knots = np.array(sorted({0, *(it for it in prefixes if it < longest), longest}), dtype=float)
    attention = grid.prefill_seconds_at(tokens, knots) - linear_layers(grid, most)[1:, None]
    if drafter is not None:
        attention = attention + drafter.prefill_seconds_at(tokens, knots)
    pairs = tokens[:, None] * knots + (tokens * (tokens + 1) / 2)[:, None]
    attention[config.tokens_each - 1] = np.minimum(attention[config.tokens_each - 1], 0.0)
    dearest = max(0.0, float((attention / pairs)[-1].min()))
    for share in (0.0, 0.5, 1.0):
        pair = share * dearest
        yield pair, max(0.0, float((pair * pairs - attention).max()))


def _slopes(grid: EngineGrid, config: EngineConfig, contexts: tuple[int, int]) -> tuple[float, ...]:
    """Prices of a token of context for which floors are made: 0, and the highest price that stays close to the grid."""
    tokens = float(config.kv_blocks * config.block_size)
    lines = iteration_lines(grid, config.max_num_seqs, contexts=contexts, kv_tokens=max(tokens, contexts[0]))
    return (0.0, lines[0].per_context_token)


def _decode(
    grid: EngineGrid, config: EngineConfig, contexts: tuple[int, int], slope: float, drafter: EngineGrid | None
) -> Array:
    """[requests + 1] seconds of the device in an iteration in which `requests` requests decode; infinite for 0
    requests. `slope` seconds per token of context are subtracted, and the linear layers of drafts are left out.

    A padded batch has a shorter mean context than its requests, but at least half of it. Different contexts may count
    as up to twice the longest context.
    """
    terms = grid.terms
    sizes = _sizes(config)
    low, high = max(0.0, contexts[0] / 2 - 1), 2.0 * contexts[1]
    if terms.shared:
        low = 0.0
    points = grid.contexts if drafter is None else sorted({*grid.contexts, *drafter.contexts})
    inside = [float(it) for it in points if low < it < high]
    lengths = np.array([low, *inside, high])
    seconds = grid.decode_seconds_at(sizes, lengths) - slope * sizes[:, None] * lengths
    if drafter is not None:
        seconds = seconds + (config.tokens_each - 1) * drafter.decode_seconds_at(sizes, lengths)
    least: Array = seconds.min(axis=1)
    if terms.decode != 1:
        least = least + (terms.decode - 1) * grid.decode_seconds_at(sizes, [0])[:, 0]
    return np.concatenate([[np.inf], least])


def _sizes(config: EngineConfig) -> Array:
    """[requests] sizes, in requests, of the CUDA graphs for 1, 2, ... decoding requests."""
    each = config.tokens_each
    sizes: Array = np.array(
        [-(-padded(requests * each, config.capture_sizes) // each) for requests in range(1, config.max_num_seqs + 1)]
    )
    return sizes


def _least(grid: EngineGrid, config: EngineConfig, decode: Array, *, launched: bool, chunked: bool = False) -> Array:
    """[tokens + 1] least seconds of the device in any iteration with `tokens` tokens or more, of prompts or of decoding
    requests. `chunked`: only iterations with a chunk of a prompt. `launched`: launches of kernels are a lower bound."""
    terms, host = grid.terms, grid.host
    seqs, most, each = config.max_num_seqs, config.max_num_batched_tokens, config.tokens_each
    run = np.array([padded(tokens, config.capture_sizes) for tokens in range(most + 1)])
    unpadded = linear_layers(grid, int(run[-1]))
    linear = unpadded[run]
    linear[0] = 0.0
    tokens = np.minimum(np.arange(seqs + 1) * each, most)  # of 0, 1, ... decoding requests
    drafts = linear[tokens] - unpadded[np.concatenate([[0], np.minimum(_sizes(config), most)])]
    decode = decode + drafts
    if terms.linear is None:
        saved = linear[tokens]
        together = linear
    else:
        saved = np.concatenate([[0.0], terms.decode * grid.decode_seconds_at(_sizes(config), [0])[:, 0]]) + drafts
        together = terms.linear * linear
    # Together with decoding requests, a chunk costs only its addition to their linear layers.
    cheaper = np.minimum.accumulate(np.concatenate([[0.0], np.minimum(0.0, decode[1:] - saved[1:])]))
    beside = cheaper[np.minimum((np.arange(most + 1) - 1) // each, seqs).clip(0)]
    if each > 1:
        beside[most] = cheaper[seqs]  # drafts beyond the token budget are left out
    mixed = together + beside
    if launched and (host.piecewise or host.eager):
        largest = config.capture_sizes[-1] if config.capture_sizes else 0
        launching = np.where(np.arange(most + 1) <= largest, host.piecewise, host.eager)
        mixed = np.maximum(mixed, launching)
    least = mixed.copy()
    if chunked:  # a chunk with as many tokens as a decoding request counts as a decoding request
        least[each] = min(least[each], decode[1:].min())
    else:
        np.minimum.at(least, tokens[1:], decode[1:])
    return np.minimum.accumulate(np.maximum(0.0, least)[::-1])[::-1]


def _hull(least: Array) -> list[tuple[float, float]]:
    """Lines below `least` that are nowhere negative, fitted to some of its points. `least` rises between two points, so
    the later point gets the value at the first token after the earlier point."""
    most = len(least) - 1
    points = np.unique(np.concatenate([np.arange(1, min(most, 64) + 1), np.arange(64, most + 1, 32), [most]]))
    points = points[points <= most]
    before = np.concatenate([[0], points[:-1]])
    return hull_lines(points.astype(float), least[before + 1], _LINES)
