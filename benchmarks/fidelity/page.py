"""The part of a page that this benchmark writes, all findings in one place.

Invariant: equal findings give equal text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.fidelity.comparison import Comparison
from benchmarks.fidelity.tables import errors_table, goals_table, residuals_table, values_table

if TYPE_CHECKING:  # it imports vLLM
    from benchmarks.fidelity.schedule import Summary as Schedules


def generated_part(command: str, schedules: Schedules, comparisons: Sequence[Comparison]) -> str:
    """All that was found, under headings of the third level. `command` is what made it."""
    parts = [f"Made by `{command}`.", "### Schedules", _schedules(schedules), "### Times", goals_table(comparisons)]
    for comparison in comparisons:
        parts += _model(comparison)
    return "\n\n".join(parts) + "\n"


def _schedules(found: Schedules) -> str:
    told = (
        f"{found.equal} of {found.cases} random workloads have the same schedule, step by step: {found.steps:,} steps"
        f" with {found.tokens:,} tokens, {found.preemptions:,} preemptions, {found.hits:,} hits in the prefix cache and"
        f" {found.cancelled:,} cancelled requests; {found.priority_cases} of the workloads are scheduled by priority."
    )
    return told if found.difference is None else f"{told} The first difference:\n\n```text\n{found.difference}\n```"


def _model(comparison: Comparison) -> list[str]:
    same = sum(one.difference is None for one in comparison.workloads)
    steps = f"{comparison.steps:,} steps of {comparison.repeats} repeats"
    parts = [
        f"### The {comparison.model} model",
        f"On {comparison.hardware}, with {comparison.software}. At the times that the steps took, the simulator takes"
        f" the same steps as the engine in {same} of {len(comparison.workloads)} workloads ({steps}).",
    ]
    if comparison.difference is not None:
        parts.append(f"The first difference:\n\n```text\n{comparison.difference}\n```")
    return [
        *parts,
        "Errors, each with the engine's repeat error; above 0 the prediction is too large:",
        errors_table(comparison),
        "Measured / predicted:",
        values_table(comparison),
        f"The calibration: {comparison.rounds} rounds over one grid. A step, predicted from all others (means over the"
        f" rounds), is off by {100 * comparison.prices.error:.1f} %.",
        residuals_table(comparison),
    ]
