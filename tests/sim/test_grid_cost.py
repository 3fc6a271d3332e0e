"""Times of iterations from a grid: the grid's own where it has them, and what is made of them in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import UNLIMITED, Admitted, AffineCost, DecodeBatch
from libra.sim.engine.speculative import Speculative

GRID = EngineGrid(
    tp=1,
    batches=(1, 8, 64),
    contexts=(256, 1024, 4096),
    decode=((0.0100, 0.0102, 0.0110), (0.0110, 0.0125, 0.0200), (0.0150, 0.0270, 0.0800)),
    chunks=(64, 512, 2048),
    prefixes=(0, 1024, 4096),
    prefill=((0.0120, 0.0125, 0.0140), (0.0500, 0.0540, 0.0660), (0.2000, 0.2160, 0.2640)),
)
CONFIG = EngineConfig(max_model_len=8192, kv_blocks=65_536, max_num_seqs=64, max_num_batched_tokens=4096)
PER_TOKEN = (0.0110 - 0.0102) / (4096 - 1024)  # seconds, of one sequence near the last point
MOST = 1.0001  # what rounding slopes to ticks may add, and more


def cost_of(host: HostCost = HostCost(), **changes: Any) -> GridCost:  # noqa: B008
    return GridCost(GRID, replace(CONFIG, **changes), host)


COST = cost_of()
PADDED = cost_of(capture_sizes=(1, 2, 4, 8, 16, 32, 64))


def decode_ticks(cost: GridCost | AffineCost, decoding: int, context: int) -> int:
    base, slope, limit = cost.line(DecodeBatch(decoding), context)
    assert context < limit
    return base + slope * context


def rounded(seconds: float, context: int = 0) -> Any:
    """A slope is a whole number of ticks per token, so it is off by half a tick for each."""
    return pytest.approx(seconds * TICKS, abs=2 + context)


@pytest.mark.parametrize("batch", GRID.batches)
@pytest.mark.parametrize("context", GRID.contexts)
def test_decoding_takes_what_the_grid_says_at_its_points(batch: int, context: int) -> None:
    seconds = GRID.decode[GRID.batches.index(batch)][GRID.contexts.index(context)]
    assert decode_ticks(COST, batch, batch * context) == rounded(seconds, batch * context)
    assert decode_ticks(COST, batch, batch * context - 1) == rounded(seconds, 300 * TICKS // 10**9)


@pytest.mark.parametrize("chunk", GRID.chunks)
@pytest.mark.parametrize("prefix", GRID.prefixes)
def test_one_chunk_takes_what_the_grid_says_at_its_points(chunk: int, prefix: int) -> None:
    seconds = GRID.prefill[GRID.chunks.index(chunk)][GRID.prefixes.index(prefix)]
    assert COST.mixed(DecodeBatch(0), 0, [(chunk, prefix)]) == rounded(seconds)


@given(st.integers(1, 64), st.integers(1, 8192))
def test_between_the_points_times_are_linear_in_batch_and_context(batch: int, context: int) -> None:
    wanted = rounded(GRID.decode_seconds(batch, context), batch * max(context, GRID.contexts[0]))
    assert decode_ticks(COST, batch, batch * context) == wanted


@given(st.integers(2, 4096), st.integers(0, 8192))
def test_one_chunk_alone_is_the_grid_s_prefill(new: int, before: int) -> None:
    assert COST.mixed(DecodeBatch(0), 0, [(new, before)]) == rounded(GRID.prefill_seconds(new, before))


@given(st.integers(1, 64), st.integers(1, 8000))
def test_a_line_goes_to_its_limit_and_the_next_begins_there(batch: int, context: int) -> None:
    tokens = batch * context
    base, slope, limit = COST.line(DecodeBatch(batch), tokens)
    assert tokens < limit
    assert COST.line(DecodeBatch(batch), min(limit - 1, 10**9)) == (base, slope, limit)
    if limit != UNLIMITED:
        following = COST.line(DecodeBatch(batch), limit)
        assert following[2] > limit
        assert following[0] + following[1] * limit == pytest.approx(base + slope * limit, abs=2 + limit)


@given(st.integers(1, 63), st.integers(64, 8000 * 64), st.integers(0, 10_000))
def test_more_is_never_sooner(batch: int, tokens: int, more: int) -> None:
    least = decode_ticks(COST, batch, tokens)
    assert least <= decode_ticks(COST, batch, tokens + more) + 1
    assert least <= decode_ticks(COST, batch + 1, tokens + more + -(-tokens // batch)) * MOST  # as long as the others
    chunk = (2 + tokens % 2000, tokens % 4000)
    alone = COST.mixed(DecodeBatch(batch), tokens, [chunk])
    assert alone <= COST.mixed(DecodeBatch(batch), tokens, [(chunk[0] + more % 2000, chunk[1])]) * MOST
    assert alone <= COST.mixed(DecodeBatch(batch), tokens, [(chunk[0], chunk[1] + more % 4000)]) * MOST
    assert alone <= COST.mixed(DecodeBatch(batch), tokens, [chunk, (1 + more % 50, 0)]) * MOST


@given(st.integers(0, 40), st.integers(1, 24), st.integers(1, 4000), st.booleans())
def test_chunks_of_one_token_are_run_as_the_decodes_that_vllm_takes_them_for(
    decoding: int, chunks: int, before: int, overlapped: bool
) -> None:
    host = HostCost(2e-3, 20e-6, overlapped, 2e-4, 3e-7, 2e-7, piecewise=11e-3, eager=38e-3)
    cost = cost_of(host, capture_sizes=(1, 2, 4, 8, 16, 32, 64))
    requests, context = decoding + chunks, decoding * 500 + chunks * (before + 1)
    mean, squares = context / requests, decoding * 500**2 + chunks * (before + 1) ** 2
    spread = round((requests * max(0.0, squares - requests * mean * mean)) ** 0.5)
    base, slope, _ = cost.line(DecodeBatch(requests, 1, spread), context)
    wanted = base + slope * context
    admitted = Admitted(chunks, chunks * (before + 1), chunks * before)
    admitting = host.admitting(*admitted)
    found = cost.mixed(DecodeBatch(decoding), decoding * 500, [(1, before)] * chunks, admitted)
    if overlapped:
        assert found == pytest.approx(max(wanted, (host.seconds(requests) + admitting) * TICKS), rel=1e-6)
    else:
        assert found == pytest.approx(wanted + admitting * TICKS, rel=1e-6)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("each", [1, 3])
def test_chunks_of_as_many_tokens_as_a_decode_has_are_decoded(overlapped: bool, each: int) -> None:
    host = HostCost(2e-3, 20e-6, overlapped, admission=1e-3, piecewise=0.05, eager=0.2)
    drafts = {"speculative": Speculative("ngram", each - 1, accepted=(1,))} if each > 1 else {}
    cost = cost_of(host, capture_sizes=(1, 2, 4, 8, 16, 32, 64), **drafts)
    both = [(each, 999), (each, 1999)]
    base, slope, _ = cost.line(DecodeBatch(7, each), 5000 + 1000 + 2000 + 2 * (each - 1))
    decoded = base + slope * (5000 + 1000 + 2000 + 2 * (each - 1))
    assert cost.mixed(DecodeBatch(5, each), 5000, both) == decoded < 0.05 * TICKS
    hidden = max(decoded, round((host.seconds(7) + 2e-3) * TICKS))
    assert cost.mixed(DecodeBatch(5, each), 5000, both, Admitted(2)) == (
        hidden if overlapped else decoded + 2e-3 * TICKS
    )
    assert cost.mixed(DecodeBatch(5, each), 5000, [both[0], (each + 1, 1999)]) >= 0.05 * TICKS


@given(st.integers(1, 64), st.integers(64, 200_000))
def test_a_batch_is_padded_to_the_next_graph(batch: int, tokens: int) -> None:
    size = next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= batch)
    assert (
        PADDED.line(DecodeBatch(batch), tokens)
        == PADDED.line(DecodeBatch(size), tokens)
        == COST.line(DecodeBatch(size), tokens)
    )


def test_a_host_that_does_not_overlap_adds_the_seconds_of_admissions() -> None:
    host = HostCost(2e-3, 20e-6, admission=1e-3)
    cost, batch, chunks = cost_of(host), DecodeBatch(9), [(500, 0), (300, 200)]
    admitted = Admitted(2, 1000, 200)
    added = cost.mixed(batch, 10_000, chunks, admitted) - cost.mixed(batch, 10_000, chunks)
    assert 0 < added == rounded(host.admitting(*admitted))


def test_an_affine_iteration_is_the_sum_of_its_parts() -> None:
    cost = AffineCost(10, per_sequence=2, per_context_token=3, per_new_token=5, per_pair=7, per_chunk=11)
    assert decode_ticks(cost, 4, 100) == 10 + 2 * 4 + 3 * 100
    pairs = (21 + 22 + 23) + 1  # each new token attends to those before it and to itself
    chunks = 11 * 2 + 5 * (3 + 1) + 7 * pairs
    assert cost.mixed(DecodeBatch(4), 100, [(3, 20), (1, 0)]) == 10 + 2 * 4 + 3 * 100 + chunks


def test_beyond_the_largest_graph_a_batch_runs_as_it_is() -> None:
    few = cost_of(capture_sizes=(1, 2, 4, 8))
    assert few.line(DecodeBatch(5), 10_000) == COST.line(DecodeBatch(8), 10_000)
    assert few.line(DecodeBatch(9), 10_000) == COST.line(DecodeBatch(9), 10_000)
    assert few.mixed(DecodeBatch(9), 10_000, [(500, 0)]) == COST.mixed(DecodeBatch(9), 10_000, [(500, 0)])


@pytest.mark.parametrize("requests", [5, 12, 16])
def test_drafts_are_verified_on_the_whole_graph(requests: int) -> None:
    """However few of its requests there are, and however many graphs it may have been."""
    drafts = Speculative("ngram", 3, accepted=(1,))
    whole = cost_of(speculative=drafts)
    for sizes in ((64,), (64, 256)):
        padded = cost_of(speculative=drafts, capture_sizes=sizes)
        assert padded.line(DecodeBatch(requests, 4), 20_000) == whole.line(DecodeBatch(16, 4), 20_000)


# Iterations of several parts


@settings(max_examples=300)
@given(
    st.integers(0, 64),
    st.integers(1, 6000),
    st.lists(st.tuples(st.integers(2, 1000), st.integers(0, 6000)), min_size=1, max_size=4),
)
def test_parts_together_take_as_long_as_the_longest_and_no_longer_than_one_after_the_other(
    decoding: int, context: int, chunks: list[tuple[int, int]]
) -> None:
    tokens = decoding * context
    alone = [COST.mixed(DecodeBatch(0), 0, [chunk]) for chunk in chunks]
    if decoding:
        alone.append(decode_ticks(COST, decoding, tokens))
    together = COST.mixed(DecodeBatch(decoding), tokens, chunks)
    assert max(alone) <= together * MOST + 2
    assert together <= sum(alone) * MOST + 2


def test_the_order_of_chunks_does_not_matter() -> None:
    chunks = [(700, 0), (64, 4000), (10, 10)]
    orders = ((0, 1, 2), (2, 1, 0), (1, 2, 0))
    times = {COST.mixed(DecodeBatch(20), 9000, [chunks[place] for place in order]) for order in orders}
    assert max(times) - min(times) <= 1  # sums of floats, before they are rounded


# The CPU


def test_overhead_is_added_for_the_iteration_and_each_request() -> None:
    with_cpu = cost_of(HostCost(iteration=0.003, request=0.0002))
    assert decode_ticks(with_cpu, 8, 8 * 1024) == rounded(0.0125 + 0.003 + 8 * 0.0002, 8 * 1024)
    assert with_cpu.mixed(DecodeBatch(0), 0, [(512, 1024)]) == rounded(0.0540 + 0.003 + 0.0002)
    assert with_cpu.mixed(DecodeBatch(8), 8 * 1024, [(512, 1024), (64, 0)]) - COST.mixed(
        DecodeBatch(8), 8 * 1024, [(512, 1024), (64, 0)]
    ) == (rounded(0.003 + 10 * 0.0002, 8 * 1024))


@pytest.mark.parametrize(
    ("cpu", "wanted"),
    [
        (0.005, 0.0125),  # hidden behind the GPU
        (0.0125, 0.0125),
        (0.016, 0.016),  # the GPU waits for the CPU
    ],
)
def test_of_overlapped_overhead_only_the_longer_counts(cpu: float, wanted: float) -> None:
    cost = cost_of(HostCost(iteration=cpu, overlapped=True))
    assert decode_ticks(cost, 8, 8 * 1024) == rounded(wanted, 8 * 1024)
    assert cost.mixed(DecodeBatch(0), 0, [(64, 0)]) == rounded(max(cpu, 0.0120))


@given(st.integers(1, 64), st.integers(1, 8192))
def test_where_the_gpu_becomes_the_longer_one_a_line_ends(batch: int, context: int) -> None:
    cpu = HostCost(iteration=0.012, request=0.0001, overlapped=True)
    wanted = max(GRID.decode_seconds(batch, context), cpu.seconds(batch))
    # The knee is at a whole token, which moves the line after it a little.
    assert decode_ticks(cost_of(cpu), batch, batch * context) == pytest.approx(wanted * TICKS, rel=1e-4)


@pytest.mark.parametrize(
    "cpu",
    [
        0.00996,  # the longer one only before the first point
        0.0110 - 1.4 * PER_TOKEN,  # until a token and a half before the last point: a knee is at a whole token
        0.0110 + 900 * PER_TOKEN,  # until after the last point
    ],
)
@pytest.mark.parametrize("context", [1, 128, 256, 1000, 4095, 4096, 5000, 8192])
def test_the_longer_one_counts_outside_the_points_too(cpu: float, context: int) -> None:
    cost = cost_of(HostCost(iteration=cpu, overlapped=True))
    wanted = max(cpu, GRID.decode_seconds(1, context))
    assert decode_ticks(cost, 1, context) == pytest.approx(wanted * TICKS, rel=1e-4)


# What is not known


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_num_seqs": 257}, "max_num_seqs 257"),
        ({"max_num_batched_tokens": 8193}, "max_num_batched_tokens 8193"),
        ({"max_model_len": 16_385}, "max_model_len 16385"),
        ({"max_num_seqs": 200, "capture_sizes": (512,)}, "max_num_seqs 200"),
    ],
)
def test_an_engine_that_the_grid_does_not_reach_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"times are not known up to .*{named}.*the grid goes from 1 x 0 to"):
        cost_of(**changes)


def test_the_grid_reaches_four_times_its_last_points() -> None:
    cost = cost_of(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=16_384)
    assert decode_ticks(cost, 256, 256 * 16_384) == rounded(GRID.decode_seconds(256, 16_384), 256 * 16_384)
    assert cost.mixed(DecodeBatch(0), 0, [(8192, 8192)]) == rounded(GRID.prefill_seconds(8192, 8192))


@pytest.mark.parametrize("field", ["iteration", "request"])
def test_no_overhead_is_negative(field: str) -> None:
    with pytest.raises(ValueError, match="finite and 0 or more"):
        HostCost(**{field: -0.001})  # type: ignore[arg-type]


def test_drafts_cost_their_linear_layers() -> None:
    """As many tokens more as a chunk of them would cost beside the batch, without its attention."""
    base, slope, limit = COST.line(DecodeBatch(8), 8 * 1024)
    drafted = COST.line(DecodeBatch(8, 3), 8 * 1024)
    assert drafted[1:] == (slope, limit) and drafted[0] > base
    assert COST.mixed(DecodeBatch(8, 3), 8 * 1024, [(64, 0)]) > COST.mixed(DecodeBatch(8), 8 * 1024, [(64, 0)])
    affine = AffineCost(100, per_sequence=5, per_new_token=7)
    assert affine.line(DecodeBatch(4, 3), 10)[0] == 100 + 4 * 5 + 4 * 2 * 7
