"""`libra plan --compare`: compares offered clusters for a training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from libra.cli.errors import require
from libra.cli.output import tell_notes, write_text
from libra.config.units import duration

if TYPE_CHECKING:
    from libra.choose.offers import Comparison
    from libra.cli.cluster_plan import PlanInputs


@dataclass(frozen=True, slots=True)
class Buying:
    """Options of `libra plan` that describe offers, and the output of the comparison."""

    offers: str | None
    cost: str | None
    steps: int | None
    deadline: str | None
    output: Path | None
    html: Path | None
    as_json: bool
    confirm: bool

    def require_whole(self, model: str | None) -> None:
        """Raise ValueError if an option lacks another option that it needs."""
        if self.offers is not None:
            if model is None:
                raise ValueError("--model is missing: --compare plans clusters of GPUs for a model")
            if self.steps is None:
                raise ValueError("--steps is missing: give the optimiser steps of the training, such as --steps 1000")
            if self.confirm:
                raise ValueError("--confirm checks one plan, but --compare makes several: leave one out")
            if self.html is not None:
                require("report")
            return
        for option, given in (("--cost", self.cost), ("--deadline", self.deadline), ("--html", self.html)):
            if given is not None:
                raise ValueError(f"{option} needs --compare: name clusters, as in --compare h100:8..64")
        if self.steps is not None and model is None:
            raise ValueError("--steps is for a cluster of GPUs: the configuration of a run sets its own steps")

    def costs(self) -> dict[str, float]:
        """Dollars per GPU and hour, by name of the offer."""
        found: dict[str, float] = {}
        for part in self.cost.split(",") if self.cost else ():
            name, _, amount = (it.strip() for it in part.partition("="))
            try:
                dollars = float(amount.removeprefix("$"))
            except ValueError:
                dollars = 0.0
            if not name or not 0 < dollars < inf:
                raise ValueError(f"--cost {part.strip()}: give NAME=DOLLARS, the cost of one GPU per hour, above 0")
            if name.casefold() in map(str.casefold, found):
                raise ValueError(f"--cost {part.strip()}: {name} has a cost already; give each name once")
            found[name] = dollars
        return found


def show_offers(where: Path | None, what_if: list[str], inputs: PlanInputs, buying: Buying) -> None:
    """Compare the offers and show the result. Exits with status 3 if none meets the deadline."""
    from libra.choose.offers import Job
    from libra.cli.cluster_plan import compare_clusters
    from libra.hardware.cluster_file import load_cluster
    from libra.hardware.offers import parse_offers
    from libra.report.offers_table import UNPRICED, offer_sentences, offers_table

    assert buying.offers is not None and buying.steps is not None
    file, costs = None if where is None else load_cluster(where), buying.costs()
    try:
        clusters, notes = parse_offers(buying.offers, file, costs)
    except ValueError as error:
        raise ValueError(f"--compare {error}") from None
    job = Job(buying.steps, inf if buying.deadline is None else duration("--deadline", buying.deadline))
    found = compare_clusters(clusters, job, what_if, inputs, notes)
    text = json.dumps(document(found), indent=2) + "\n"
    if buying.output is not None:
        write_text(buying.output, text)
    if buying.html is not None:
        from libra.report.offers_page import offers_page

        write_text(buying.html, offers_page(found, f"{buying.offers}, {inputs.model}"))
    if buying.as_json:
        typer.echo(text, nl=False)
    else:
        console = Console()
        for line in offer_sentences(found):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        console.print(offers_table(found))
    if not found.priced:
        notes.append(UNPRICED)
    notes += [f"{it.name}: no plan exists: {it.refusal}" for it in found.offers if it.refusal]
    tell_notes(notes, err=buying.as_json)
    if not found.in_time:
        raise typer.Exit(3)


def document(found: Comparison) -> dict[str, Any]:
    """The comparison for programs: seconds and dollars; null for unknown values."""
    job, front = found.job, found.front
    cheapest, fastest = found.cheapest, found.fastest
    return {
        "steps": job.steps,
        "deadline": job.deadline if isfinite(job.deadline) else None,
        "cheapest": None if cheapest is None else cheapest.name,
        "fastest": None if fastest is None else fastest.name,
        "offers": [
            {
                "name": it.name,
                "gpus": it.cluster.devices,
                "nodes": it.cluster.nodes[0].count,
                "step": None if it.plan is None else it.plan.step,
                "simulated": it.plan is not None and it.plan.simulated is not None,
                "seconds": None if it.plan is None else it.seconds(job),
                "dollars": None if it.plan is None else it.dollars(job),
                "gpu_hours": None if it.plan is None else it.gpu_hours(job),
                "in_time": it in found.in_time,
                "on_front": it in front,
                "split": None if it.plan is None else it.plan.allocation.describe(),
                "refusal": it.refusal or None,
            }
            for it in found.offers
        ],
    }
