"""Constants of a host and of kernels from iterations whose price is known: those of the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.cost.grid import EngineGrid
from libra.cost.host import SERVING, HostCost
from libra.cost.kernels import KernelTerms
from libra.cost.sources.engine_fit import MeasuredIteration, fit_engine
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPUS
from libra.hardware.model_file import load_model
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import Admitted, DecodeBatch

SIZES = (1, 2, 4, *range(8, 257, 8), 512)
CONFIG = EngineConfig(
    max_model_len=40_960, kv_blocks=100_000, max_num_seqs=256, max_num_batched_tokens=2048, capture_sizes=SIZES
)
KERNELS = roofline(GPUS["H100"], load_model("Qwen3-8B"), [1]).grid(1)
HOST = HostCost(2e-3, 20e-6, False, 0.3e-3, 0.0, 0.2e-6, 11e-3, 33e-3, "here")
TERMS = KernelTerms(spread=0.7, shared=0.5, linear=1.1, longest=1e-7, source="here")


def grid_of(host: HostCost, terms: KernelTerms) -> EngineGrid:
    """As a host takes that measures a grid."""
    host = replace(
        host, iteration=host.iteration / SERVING, piecewise=host.piecewise / SERVING, eager=host.eager / SERVING
    )
    return replace(KERNELS, host=host, terms=terms)


def iterations(host: HostCost, terms: KernelTerms, noise: float = 0.0, times: int = 1) -> list[MeasuredIteration]:
    cost = GridCost(grid_of(host, terms), CONFIG)
    random = np.random.default_rng(1)
    found: list[MeasuredIteration] = []

    def add(decodes: int, held: int, chunks: tuple[tuple[int, int], ...] = (), admitted: Admitted = Admitted()) -> None:  # noqa: B008
        context, shared = decodes * held, max(0, decodes - 1) * held
        batch = DecodeBatch(decodes, 1, 0, shared)
        if chunks:
            ticks = cost.mixed(batch, context, chunks, admitted)
        else:
            base, slope, _ = cost.line(batch, context)
            ticks = base + slope * context
        seconds = ticks / TICKS * (1 + noise * random.standard_normal())
        found.append(MeasuredIteration(decodes, context, chunks, tuple(admitted), shared, seconds, times))

    for held in (256, 1024, 4096, 16384):
        for batch in (1, 4, 16, 64, 128, 256):
            add(batch, held)
            if batch <= 64:
                chunks = ((16, held),) * batch
                add(0, 0, chunks, Admitted(batch, batch * (held + 16), batch * held))
        for tokens in (16, 128, 512, 1024, 2048):
            add(0, 0, ((tokens, held),), Admitted(1, tokens + held, held))
            add(0, 0, ((tokens, 0),), Admitted(1, tokens, 0))
            add(32, held, ((min(tokens, 2000), 0),), Admitted(1, tokens, 0))
    return found


@pytest.mark.parametrize("host_error", [0.8, 1.25])
@pytest.mark.parametrize("terms_error", [0.9, 1.1])
def test_constants_are_found_from_others_near_them(host_error: float, terms_error: float) -> None:
    guess = replace(
        HOST,
        **{name: host_error * getattr(HOST, name) for name in ("iteration", "request", "admission", "cached_token")},
        **{name: host_error * getattr(HOST, name) for name in ("piecewise", "eager")},
    )
    assert TERMS.linear is not None
    near = replace(TERMS, linear=terms_error * TERMS.linear, longest=terms_error * TERMS.longest)
    fit = fit_engine(KERNELS, SIZES, iterations(HOST, TERMS, times=100), guess, near, "these")
    for name in ("iteration", "request", "piecewise", "eager"):
        wanted = getattr(HOST, name)
        assert abs(getattr(fit.host, name) - wanted) < 0.6 * abs(getattr(guess, name) - wanted), name
    assert fit.terms.linear == pytest.approx(TERMS.linear, rel=0.03)
    assert fit.terms.shared == pytest.approx(TERMS.shared, rel=0.1)
    assert fit.error < 0.015
    assert fit.host.source == fit.terms.source == "these"
    assert fit.terms.spread == TERMS.spread  # even contexts do not show it


def test_its_form_is_the_simulators() -> None:
    fit = fit_engine(KERNELS, SIZES, iterations(HOST, TERMS), HOST, TERMS, "these")
    assert fit.error < 1e-3
    assert fit.heldout_error < 1e-3


def test_decodes_of_experts_are_fitted_and_others_are_not() -> None:
    slower = replace(TERMS, decode=1.3)
    measured = iterations(HOST, slower, times=100)
    fit = fit_engine(KERNELS, SIZES, measured, HOST, TERMS, "these", experts=True)
    assert fit.terms.decode == pytest.approx(1.3, rel=0.05)
    assert fit.error < 0.02
    assert fit_engine(KERNELS, SIZES, measured, HOST, TERMS, "these").terms.decode == 1.0
    exact = fit_engine(KERNELS, SIZES, measured, HOST, slower, "these", experts=True)
    assert exact.error < 1e-3  # the form is the simulator's


def test_the_error_that_is_told_is_that_of_iterations_left_out() -> None:
    noisy = iterations(HOST, TERMS, noise=0.1)
    fit = fit_engine(KERNELS, SIZES, noisy, HOST, TERMS, "these")
    assert 0.05 < fit.error < fit.heldout_error < 0.12
    warm = [replace(noisy[0], seconds=10 * noisy[0].seconds), *noisy[1:]]
    spoilt = fit_engine(KERNELS, SIZES, warm, HOST, TERMS, "these")
    assert spoilt.host.iteration == pytest.approx(fit.host.iteration, rel=0.02)


def test_what_was_not_measured_stays_as_it_was() -> None:
    decodes = [it for it in iterations(HOST, TERMS) if not it.chunks]
    guess = replace(HOST, piecewise=9e-3, eager=40e-3, admission=1e-3)
    fit = fit_engine(KERNELS, SIZES, decodes, guess, TERMS, "these")
    assert (fit.host.piecewise, fit.host.eager) == pytest.approx((9e-3, 40e-3), rel=1e-6)
    assert fit.host.admission == pytest.approx(1e-3, rel=1e-6)


def test_a_handful_of_iterations_is_no_grid() -> None:
    with pytest.raises(ValueError, match="5 iterations are too few"):
        fit_engine(KERNELS, SIZES, iterations(HOST, TERMS)[:5], HOST, TERMS, "these")
