"""The grid that a planner looks at has the simulator's price of an iteration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST, HostCost, default_host
from libra.cost.kernels import NO_TERMS, KernelTerms, default_terms
from libra.cost.lines import iteration_lines, prefill_line
from libra.cost.sources.engine_fit import EngineFit
from libra.cost.sources.files import load_fit, save_fit
from libra.cost.sources.profiles import engine_profiles
from libra.cost.sources.roofline import roofline
from libra.cost.whole_iterations import RunningBatch, running_batch, whole_iterations
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.lengths import TrajectoryClass
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import Admitted, DecodeBatch

MODEL = load_model("Qwen3-8B")
KERNELS = roofline(GPUS["H100"], MODEL, [1]).grid(1)
SIZES = capture_sizes(512, 8192)
CONFIG = EngineConfig(
    max_model_len=40_960, kv_blocks=1 << 20, max_num_seqs=512, max_num_batched_tokens=8192, capture_sizes=SIZES
)
HOST, TERMS = default_host(MODEL.layers), default_terms(MODEL.layers)


def grid_of(host: HostCost = HOST, terms: KernelTerms = TERMS) -> EngineGrid:
    return replace(KERNELS, host=host, terms=terms)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("batch", KERNELS.batches[::3])
@pytest.mark.parametrize("context", [256, 4096, 32768])
def test_a_decode_takes_what_it_takes_the_simulator(batch: int, context: int, overlapped: bool) -> None:
    grid = grid_of(replace(HOST, overlapped=overlapped), replace(TERMS, decode=1.2))
    base, slope, _ = GridCost(grid, CONFIG).line(DecodeBatch(batch), batch * context)
    wanted = (base + slope * batch * context) / TICKS
    assert whole_iterations(grid, 512, 8192).decode_seconds(batch, context) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("chunk", KERNELS.chunks[:-1:2])
@pytest.mark.parametrize("prefix", [0, 4096, 32768])
def test_a_chunk_takes_what_it_takes_the_simulator_beside_what_the_host_takes_anyway(chunk: int, prefix: int) -> None:
    cost = GridCost(grid_of(), CONFIG)
    host = HOST.seconds(1) + HOST.admitting(1, chunk + prefix, prefix)
    wanted = cost.mixed(DecodeBatch(0), 0, [(chunk, prefix)], Admitted(1, chunk + prefix, prefix)) / TICKS - host
    assert whole_iterations(grid_of(), 512, 8192).prefill_seconds(chunk, prefix) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("max_num_seqs", [1, 7, 68, 200, 2000])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_however_few_sequences_an_engine_has_its_decodes_are_whole_graphs(max_num_seqs: int, tp: int) -> None:
    grid = replace(roofline(GPUS["A800"], load_model("Qwen3-14B"), [tp]).grid(tp), host=HOST, terms=TERMS)
    whole = whole_iterations(grid, max_num_seqs, 8192)
    for batch in {1, max_num_seqs - 1 or 1, max_num_seqs}:
        wanted = grid.decode_seconds(batch, 300) + HOST.seconds(batch)
        assert whole.decode_seconds(batch, 300) == pytest.approx(wanted)


@pytest.mark.parametrize("sequences", [2, 24, 128, 256])
@pytest.mark.parametrize(("turns", "tokens", "above"), [(0.002, 300, 0.06), (0.02, 100, 0.06), (0.01, 1500, 0.17)])
def test_turns_that_are_admitted_meanwhile_cost_what_they_cost_the_simulator(
    sequences: int, turns: float, tokens: int, above: float
) -> None:
    """In the mean over Poisson arrivals of chunks with exponential lengths: all that iterations take beyond the
    prefill's own price, by its tokens in full chunks. Long chunks save the weights that decodes read anyway, which is
    not priced."""
    context, uneven = 3000, 0.6
    cost, draw = GridCost(grid_of(), CONFIG), np.random.default_rng(sequences)
    whole = whole_iterations(grid_of(), 512, 8192, RunningBatch(uneven, turns, tokens))
    batch = DecodeBatch(sequences, spread=round(uneven * context) * sequences)
    token = whole.prefill_seconds(8192, 0) / 8192
    base, slope, _ = cost.line(batch, sequences * context)
    total = 0.0
    for admitted in draw.poisson(sequences * turns, 1500).tolist():
        chunks = [(min(8000, 1 + round(length)), 0) for length in draw.exponential(tokens, admitted)]
        room = 8192 - sequences
        while sum(new for new, _ in chunks) > room:
            chunks.pop()
        ticks = cost.mixed(batch, sequences * context, chunks) if chunks else base + slope * sequences * context
        total += ticks / TICKS - token * sum(new for new, _ in chunks)
    assert -0.06 < whole.decode_seconds(sequences, context) / (total / 1500) - 1 < above


def test_a_running_batch_is_that_of_a_random_token() -> None:
    one = TrajectoryClass(0.5, 1000, 1000.0, 500.0, 250_000.0, 700.0, 2.0, 0.0, 0.5)
    two = TrajectoryClass(0.5, 4000, 4000.0, 1500.0, 4_500_000.0, 2700.0, 6.0, 0.0, 0.5)
    draw = np.random.default_rng(0)
    # Contexts of the first go from 0 to 1,000, of the other, met three times as often, from 2,000 to 4,000.
    contexts = np.concatenate([draw.uniform(0, 1000, 100_000), draw.uniform(2000, 4000, 300_000)])
    running = running_batch((one, two), overlapping=True)
    assert running.uneven == pytest.approx(contexts.std() / contexts.mean(), rel=0.01)
    assert (running.turns, running.tokens) == (pytest.approx(4 / 1000), pytest.approx(1700 / 4))
    assert running_batch((one, two), overlapping=False) == replace(running, uneven=0.0)
    assert running_batch((), overlapping=True) == RunningBatch()


@pytest.mark.parametrize("terms", [TERMS, replace(TERMS, longest=0.0), replace(TERMS, spread=0.0, longest=0.0)])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-14B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("budget", [512, 8192])
def test_no_host_makes_times_that_fall_below_0(name: str, terms: KernelTerms, budget: int) -> None:
    model = load_model(name)
    for gpu, tp in (("A800", 2), ("H100", 1), ("L40S", 8)):
        grid = replace(roofline(GPUS[gpu], model, [tp]).grid(tp), host=default_host(model.layers), terms=terms)
        for max_num_seqs in (4, 68, 500):
            running = RunningBatch(0.8, 0.004 if max_num_seqs > 4 else 0.0, 900)
            whole = whole_iterations(grid, max_num_seqs, budget, running)
            below = grid.decode_seconds(max_num_seqs, 2000)
            assert whole.decode_seconds(max_num_seqs, 2000) > below


def test_kernels_alone_stay_as_they_are() -> None:
    assert whole_iterations(KERNELS, 512, 8192) == KERNELS
    uneven = KernelTerms(spread=0.7, shared=0.5)  # which no planner sees
    assert whole_iterations(grid_of(NO_HOST, uneven), 512, 8192) == KERNELS


def test_bounds_from_below_have_the_host() -> None:
    whole = whole_iterations(grid_of(), 512, 8192)
    lines = iteration_lines(whole, 256, contexts=(256.0, 8192.0))
    for batch in (1, 7, 64, 200):
        for context in (300, 5000):
            base, slope, _ = GridCost(grid_of(), CONFIG).line(DecodeBatch(batch), batch * context)
            below = max(it.step + it.per_sequence * batch + it.per_context_token * batch * context for it in lines)
            assert below <= (base + slope * batch * context) / TICKS * (1 + 1e-5)  # slopes are whole ticks
            assert below >= HOST.seconds(batch)
    assert prefill_line(whole, 8192).per_token > 1.1 * prefill_line(KERNELS, 8192).per_token
    slow = grid_of().slowed(2.0)
    assert slow.host.iteration == 2 * HOST.iteration
    assert whole_iterations(slow, 512, 8192).decode_seconds(9, 999) == pytest.approx(2 * whole.decode_seconds(9, 999))


def test_a_profile_gets_the_host_that_was_asked_for(tmp_path: Path) -> None:
    cluster = Cluster((NodeClass("n", 1, 8, GPUS["H100"], GPUS["H100"].link, 25e9),))
    recipe = Recipe(batch=16, samples_per_prompt=16, max_length=4096)
    notes: list[str] = []
    (none,) = engine_profiles(cluster, MODEL, recipe, "roofline")
    (default,) = engine_profiles(cluster, MODEL, recipe, "roofline", host="default")
    assert (none.host, none.terms) == (NO_HOST, NO_TERMS)
    assert (default.host, default.terms) == (HOST, TERMS)
    fit = EngineFit(replace(HOST, iteration=1e-3, source="measured: here"), TERMS, 0.05, 0.06)
    save_fit(tmp_path / "fit.json", fit)
    assert load_fit(tmp_path / "fit.json") == fit
    (measured,) = engine_profiles(cluster, MODEL, recipe, "roofline", notes.append, host=str(tmp_path / "fit.json"))
    assert (measured.host, measured.terms) == (fit.host, fit.terms)
    assert "measured: here" in notes[-1]
    with pytest.raises(ConfigError, match=r"absent: No such file.*fit the engine again, or give none, default or fast"):
        engine_profiles(cluster, MODEL, recipe, "roofline", host=str(tmp_path / "absent"))


@settings(deadline=None, max_examples=200)
@given(
    model=st.sampled_from(("Qwen3-0.6B", "Qwen3-14B", "Qwen3-30B-A3B")),
    gpu=st.sampled_from(("H100", "A800", "L40S")),
    tp=st.sampled_from((1, 8)),
    batch=st.builds(
        RunningBatch,
        uneven=st.floats(0, 3),
        turns=st.one_of(st.just(0.0), st.floats(1e-5, 1)),
        tokens=st.floats(1, 20_000),
    ),
    seats=st.integers(1, 512),
)
@example("Qwen3-8B", "H800", 8, RunningBatch(turns=0.0083, tokens=508), 512)  # launching ends before the largest batch
def test_any_batch_has_a_grid(model: str, gpu: str, tp: int, batch: RunningBatch, seats: int) -> None:
    """No time of it falls below 0, wherever it is asked for: a grid that did would be refused."""
    spec = load_model(model)
    kernels = roofline(GPUS[gpu], spec, [tp]).grid(tp)
    grid = replace(kernels, host=default_host(spec.layers), terms=default_terms(spec.layers))
    found = np.array(whole_iterations(grid, seats, 8192, batch).decode)
    assert (found >= np.array(whole_iterations(grid, seats, 8192).decode) * (1 - 1e-9)).all()
