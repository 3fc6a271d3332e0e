"""A fit of an engine's host and of corrections of its kernel times to measured iterations.

Invariant: the iterations are single batches on a grid, without a workload. Every constant is part of `HostCost` or
`KernelTerms`, and none is negative. A constant that the iterations hardly determine stays near its first guess. The
held-out error is for iterations outside the fit.

The method is least squares of relative errors, with a Gaussian prior on nine constants (ten with experts). The relative
standard deviations are `_TRUSTED` for a constant, `_NOISE` for one measurement of an iteration and `_FORM` for the form
of the price. The fit alternates between two problems: the constants, and the bottleneck of each iteration (kernels or
launches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.cost.graphs import padded
from libra.cost.grid import Array, EngineGrid, linear_layers
from libra.cost.host import SERVING, HostCost
from libra.cost.kernels import KernelTerms
from libra.cost.lines import least_squares

_TRUSTED = 0.2  # relative standard deviation of a constant before anything is measured
_ROUTING, _KNOWN = 0.5, 1e-6  # the same: linear layers of a mixture of experts, decodes of a dense model
_NOISE, _FORM = 0.15, 0.05  # relative standard deviations: one measured iteration, form of the price
_OUTLIER = 3.0  # standard deviations beyond which an iteration, such as a warm-up, counts less
_TURNS = 40
_BEGINNINGS = (1.0, 0.6, 1.6)  # starting values of launch times, relative to their first guess
_FOLDS = 10


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """One iteration, or the mean of several equal iterations. Lengths are tokens."""

    decodes: int
    context: int  # sum over decoding requests
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens before them) of each request in prefill
    admitted: tuple[int, int, int]  # requests, tokens of their contexts, cached tokens among these
    shared: int  # tokens of decoding contexts that another decoding request has in the same blocks
    seconds: float
    times: int = 1  # number of measurements

    @property
    def tokens(self) -> int:
        return self.decodes + sum(new for new, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class EngineFit:
    host: HostCost
    terms: KernelTerms
    error: float  # mean of the absolute relative errors
    heldout_error: float  # the same for iterations left out of the fit, a tenth at a time


def fit_engine(
    grid: EngineGrid,
    sizes: tuple[int, ...],
    iterations: Sequence[MeasuredIteration],
    host: HostCost,
    terms: KernelTerms,
    source: str,
    *,
    experts: bool = False,
) -> EngineFit:
    """Fit constants near `host` and `terms` for an engine with CUDA graphs of these `sizes` and the kernel times of
    `grid`. `source` describes the measurement. With `experts`, the grid has less weight, and decodes are fitted, too.
    Raises ValueError if there are too few measurements."""
    if len(iterations) < 2 * _FOLDS:
        raise ValueError(f"{len(iterations)} iterations are too few to fit an engine: measure {2 * _FOLDS} or more")
    if terms.linear is None:
        raise ValueError("KernelTerms.linear is None; give a first guess, such as 1")
    parts = _Parts(grid, sizes, iterations)
    before = np.array(
        [
            *(host.iteration / SERVING, host.request, host.admission, host.cached_token),
            *(host.piecewise / SERVING, host.eager / SERVING),
            *(terms.linear, terms.longest, 1 - terms.shared, terms.decode),
        ]
    )
    parts.trusted[-1] = _KNOWN
    if experts:
        parts.trusted[[6, -1]] = _ROUTING
    every = np.ones(len(iterations), dtype=bool)
    constants = _solve(parts, before, every)
    error = np.abs(parts.seconds_at(constants) / parts.measured - 1)
    heldout = np.empty(len(iterations))
    for fold in range(_FOLDS):
        out = np.arange(len(iterations)) % _FOLDS == fold
        heldout[out] = np.abs(parts.seconds_at(_solve(parts, before, ~out))[out] / parts.measured[out] - 1)
    iteration, request, admission, cached, piecewise, eager, linear, longest, unshared, decode = (
        float(value) for value in constants
    )
    return EngineFit(
        replace(
            host,
            iteration=SERVING * iteration,
            request=request,
            admission=admission,
            cached_token=cached,
            piecewise=SERVING * piecewise,
            eager=SERVING * eager,
            source=source,
        ),
        replace(
            terms,
            linear=linear,
            longest=longest,
            shared=min(0.95, max(0.0, 1 - unshared)),
            decode=decode if experts else terms.decode,
            source=source,
        ),
        float(error.mean()),
        float(heldout.mean()),
    )


class _Parts:
    """The factor of each constant in each iteration."""

    def __init__(self, grid: EngineGrid, sizes: tuple[int, ...], iterations: Sequence[MeasuredIteration]) -> None:
        most = padded(max(it.tokens for it in iterations), sizes)
        linear = linear_layers(grid, max(most, *(new for it in iterations for new, _ in it.chunks), 1))
        rows = len(iterations)
        self.measured = np.array([it.seconds for it in iterations])
        self.deviation = np.hypot(_FORM, _NOISE / np.sqrt([it.times for it in iterations]))
        self.host = np.zeros((rows, 4))
        self.linear, self.longest, self.fixed = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self.alone = np.zeros(rows)  # of a batch that only decodes, without its context
        self.trusted = np.full(10, _TRUSTED)
        self.shared = np.zeros(rows)  # seconds of the shared tokens if no block were shared
        self.graph = np.array([bool(sizes) and it.tokens <= sizes[-1] for it in iterations])
        self.prefill = np.array([bool(it.chunks) for it in iterations])
        for row, it in enumerate(iterations):
            self.host[row] = 1, it.decodes + len(it.chunks), it.admitted[0], it.admitted[2]
            alone = reads = 0.0
            if it.decodes:
                size = padded(it.decodes, sizes)
                alone = grid.decode_seconds(size, 0)
                reads = grid.decode_seconds(size, it.context / size) - alone
                self.shared[row] = reads * it.shared / it.context
            if it.chunks:
                attention = sum(grid.prefill_seconds(*chunk) - float(linear[chunk[0]]) for chunk in it.chunks)
                self.linear[row] = linear[padded(it.tokens, sizes)]
                decoding = it.context // it.decodes if it.decodes else 0
                self.longest[row] = max(decoding, *(before for _, before in it.chunks))
                self.fixed[row] = attention + reads - self.shared[row]
            else:
                self.alone[row] = alone
                self.fixed[row] = reads - self.shared[row]

    def launched_later(self, constants: Array) -> NDArray[np.bool_]:
        """For each iteration, whether launching takes longer than the kernels."""
        later: NDArray[np.bool_] = self._launching(constants) > self._kernels(constants)
        return later

    def seconds_at(self, constants: Array) -> Array:
        device = np.maximum(self._kernels(constants), self._launching(constants))
        seconds: Array = self.host @ constants[:4] + device
        return seconds

    def _launching(self, constants: Array) -> Array:
        launching: Array = np.where(self.graph, np.where(self.prefill, constants[4], 0.0), constants[5])
        return launching

    def _kernels(self, constants: Array) -> Array:
        kernels: Array = self.fixed + self._device() @ constants[6:]
        return kernels

    def _device(self) -> Array:
        return np.column_stack([self.linear, self.longest, self.shared, self.alone])

    def off(self, constants: Array) -> Array:
        """Distances from the measurements, in standard deviations."""
        distances: Array = np.abs(self.seconds_at(constants) / self.measured - 1) / self.deviation
        return distances

    def rows(self, launching: NDArray[np.bool_]) -> tuple[Array, Array]:
        """[iterations, constants] factors of the constants, and the seconds that do not depend on them."""
        device = self._device()
        device[launching] = 0.0
        piecewise, eager = launching * self.graph, launching * ~self.graph
        return np.column_stack([self.host, piecewise, eager, device]), np.where(launching, 0.0, self.fixed)


def _solve(parts: _Parts, before: Array, used: NDArray[np.bool_]) -> Array:
    """The constants, fitted to the `used` iterations. Launch times start at, above and below their first guess, since a
    launch time below all kernel times would never be fitted.
    """
    found = [_by_turns(parts, before, used, begun) for begun in _BEGINNINGS]
    return min(found, key=lambda constants: _misfit(parts, before, used, constants))


def _by_turns(parts: _Parts, before: Array, used: NDArray[np.bool_], begun: float) -> Array:
    """The constants. The fit alternates between the constants and the bottleneck of each iteration."""
    constants: Array = before * np.array([1, 1, 1, 1, begun, begun, 1, 1, 1, 1])
    trust = np.ones(len(parts.measured))
    for _ in range(_TURNS):
        rows, fixed = parts.rows(parts.launched_later(constants))
        weights = np.sqrt(trust) / parts.deviation / parts.measured
        scaled = np.vstack([(rows * weights[:, None] * before)[used], np.diag(1 / parts.trusted)])
        wanted = np.concatenate([((parts.measured - fixed) * weights)[used], 1 / parts.trusted])
        constants += (before * least_squares(scaled, wanted) - constants) / 2
        trust = np.minimum(1.0, _OUTLIER / np.maximum(parts.off(constants), 1e-9))
    return constants


def _misfit(parts: _Parts, before: Array, used: NDArray[np.bool_], constants: Array) -> float:
    """Sum of squares, linear for outliers (Huber 1964), plus the squares of the prior."""
    off = parts.off(constants)[used]
    near = np.minimum(off, _OUTLIER)
    moved = (constants / before - 1) / parts.trusted
    return float(np.sum(near * (2 * off - near)) + np.sum(moved**2))
