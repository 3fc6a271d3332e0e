"""Rows of the attack: what was measured, and whether it is within its goal.

Invariant: a row that was not run has no verdict and names the reason in place of a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

_COLOURS = {"PASS": "green", "FAIL": "red", "not run": "yellow"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One goal of one attack. `measured` is the figure with its unit; `held` is None for a row that was not run."""

    attack: str
    what: str
    measured: str
    goal: str
    held: bool | None

    @property
    def verdict(self) -> str:
        return "not run" if self.held is None else "PASS" if self.held else "FAIL"


def below(attack: str, what: str, value: float, most: float, unit: str) -> Finding:
    """A figure that has to be below `most`."""
    return Finding(attack, what, f"{value:,.4g} {unit}", f"below {most:,g} {unit}", value < most)


def none(attack: str, what: str, wrong: Sequence[str], counted: str) -> Finding:
    """A list that has to be empty; the first two of its entries are shown. `counted`: what was looked at."""
    measured = f"{len(wrong):,} of {counted}"
    return Finding(attack, what, "; ".join((measured, *wrong[:2])), "0", not wrong)


def not_run(attack: str, what: str, why: str, goal: str) -> Finding:
    return Finding(attack, what, why, goal, None)


def make_table(findings: Sequence[Finding]) -> Table:
    """One line a finding; an attack is named once."""
    table = Table()
    for name in ("attack", "what", "measured", "goal", ""):
        table.add_column(name)
    previous = None
    for it in findings:
        named = escape(it.attack) if it.attack != previous else ""
        verdict = f"[{_COLOURS[it.verdict]}]{it.verdict}[/]"
        table.add_row(named, escape(it.what), escape(it.measured), escape(it.goal), verdict)
        previous = it.attack
    return table


def lines(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{**asdict(it), "verdict": it.verdict} for it in findings]
