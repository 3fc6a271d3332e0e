"""Findings as Markdown tables.

Invariant: equal findings give equal text; nothing is rounded so far that an error can hide in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.fidelity.comparison import LATENCY_GOAL, THROUGHPUT_GOAL, Compared, Comparison
from benchmarks.fidelity.summary import Summary
from benchmarks.page import markdown

Value = tuple[str, Callable[[Summary], float], str]  # heading, what to show, and how

_VALUES: tuple[Value, ...] = (
    ("tokens/s", lambda it: it.throughput, ".1f"),
    ("makespan, s", lambda it: it.makespan, ".3f"),
    ("TTFT, ms", lambda it: 1000 * it.ttft_mean, ".1f"),
    ("P99", lambda it: 1000 * it.ttft_p99, ".1f"),
    ("TPOT, ms", lambda it: 1000 * it.tpot_mean, ".2f"),
    ("P99", lambda it: 1000 * it.tpot_p99, ".2f"),
    ("latency, ms", lambda it: 1000 * it.latency_mean, ".1f"),
    ("P99", lambda it: 1000 * it.latency_p99, ".1f"),
    ("preemptions", lambda it: it.preemptions, ".3g"),
    ("cached tokens", lambda it: it.cached_tokens, ".0f"),
)
_ERRORS: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("throughput", lambda it: it.throughput),
    ("TTFT", lambda it: it.ttft_mean),
    ("TPOT", lambda it: it.tpot_mean),
    ("latency", lambda it: it.latency_mean),
)


def goals_table(comparisons: Sequence[Comparison]) -> str:
    """One line a model and promise."""
    lines = []
    for comparison in comparisons:
        for (name, of), goal in ((_ERRORS[0], THROUGHPUT_GOAL), (_ERRORS[3], LATENCY_GOAL)):
            error, repeat = comparison.error(of), comparison.repeat(of)
            met = "yes" if error <= max(goal, repeat) else "no"
            lines.append([comparison.model, name, _percent(error), _percent(repeat), _percent(goal), met])
    return markdown(["model", "of", "error", "repeat error", "goal: at most the repeat error, or", "met"], lines)


def errors_table(comparison: Comparison) -> str:
    """One line a workload: signed errors, each followed by the repeat error. The last line has means of the sizes."""
    headings = ["workload", *(cell for name, _ in _ERRORS for cell in (name, "repeat")), "steps"]
    lines = [_errors_line(one) for one in comparison.workloads]
    means = [_percent(of_all(of)) for _, of in _ERRORS for of_all in (comparison.error, comparison.repeat)]
    lines.append(["mean absolute error", *means, _percent(fmean(abs(one.priced) for one in comparison.workloads))])
    return markdown(headings, lines)


def values_table(comparison: Comparison) -> str:
    """One line a workload, measured / predicted."""
    lines = [
        [
            one.workload.name,
            *(f"{of(one.measured):{shown}} / {of(one.predicted):{shown}}" for _, of, shown in _VALUES),
        ]
        for one in comparison.workloads
    ]
    return markdown(["workload", *(heading for heading, _, _ in _VALUES)], lines)


def residuals_table(comparison: Comparison) -> str:
    """One line a kind of calibration step."""
    lines = [
        [one.kind, f"{one.steps:,}", f"{one.seconds:.1f}", f"{100 * one.bias:+.1f} %", _percent(one.error)]
        for one in comparison.residuals
    ]
    return markdown(["steps", "number", "seconds in all", "error of the sum", "mean absolute error of a step"], lines)


def _errors_line(one: Compared) -> list[str]:
    cells = [one.workload.name]
    for _, of in _ERRORS:
        cells += [f"{100 * of(one.errors):+.1f} %", _percent(of(one.repeat))]
    return [*cells, f"{100 * one.priced:+.1f} %"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
