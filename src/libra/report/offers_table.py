"""A comparison of clusters, as sentences and as a table."""

from __future__ import annotations

from math import isfinite

from rich.table import Column, Table

from libra.choose.offers import Comparison, OfferedCluster
from libra.plan.plan import Plan
from libra.report.tables import whole
from libra.report.words import MISSING, cell, count, days, dollars, duration, plural, printable

COLUMNS = ("cluster", "a step", "all steps", "cost", "train + generate", "")
CAPTION = (
    "~: predicted, not simulated; dominated: another is cheaper and no slower. Every step is assumed to take as long"
    " as the plan's."
)
UNPRICED = "Some clusters have no cost, so GPU-hours are compared: give --cost."


def offer_sentences(found: Comparison) -> tuple[str, ...]:
    """The recommended clusters: the cheapest in time, and the fastest."""
    cheapest, fastest, job = found.cheapest, found.fastest, found.job
    if fastest is None:
        return ("No offered cluster has a plan.",)
    within = f" within {days(job.deadline)}" if isfinite(job.deadline) else ""
    if cheapest is None:
        return (
            f"No offered cluster makes {plural(job.steps, 'step')}{within}. {_named('The fastest', fastest, found)}",
        )
    if cheapest is fastest:
        return (_named(f"The cheapest{within} and the fastest", cheapest, found),)
    return (_named(f"The cheapest{within}", cheapest, found), _named("The fastest", fastest, found))


def offer_rows(found: Comparison) -> list[tuple[str, ...]]:
    """A row for each offer, in `COLUMNS`."""
    return [_row(it, found) for it in found.offers]


def offers_table(found: Comparison) -> Table:
    table = Table(
        Column("cluster", no_wrap=True),
        *map(whole, COLUMNS[1:-1]),
        Column("", overflow="fold", min_width=8),
        title=f"{plural(found.job.steps, 'step')} on each",
    )
    for row in offer_rows(found):
        table.add_row(*map(cell, row))
    table.caption = CAPTION
    return table


def cost_words(offer: OfferedCluster, found: Comparison) -> str:
    """Dollars if all offers have a cost, otherwise GPU-hours."""
    return dollars(found.cost(offer)) if found.priced else f"{count(found.cost(offer))} GPU-hours"


def split_words(plan: Plan) -> str:
    """GPUs that train, and GPUs that generate, as a text: `16 + 32`."""
    training = sum(group.devices for group in plan.placement if group.role == "train")
    generating = sum(group.devices for group in plan.placement if group.role != "train")
    return f"{training} + {generating}"


def _named(what: str, offer: OfferedCluster, found: Comparison) -> str:
    assert offer.plan is not None
    kind = "predicted" if offer.plan.simulated is None else f"in simulation under {offer.plan.simulated.router}"
    return (
        f"{what}: {printable(offer.name)}, {days(offer.seconds(found.job))} and {cost_words(offer, found)}"
        f" (a step takes {duration(offer.plan.step)}, {kind})."
    )


def _row(offer: OfferedCluster, found: Comparison) -> tuple[str, ...]:
    if offer.plan is None:
        return (offer.name, *[MISSING] * 4, "no plan")
    about = "" if offer.plan.simulated is not None else "~"
    verdicts = [
        word
        for word, true in (
            ("cheapest", offer is found.cheapest),
            ("fastest", offer is found.fastest),
            ("late", offer not in found.in_time),
            ("dominated", offer not in found.front),
        )
        if true
    ]
    return (
        offer.name,
        about + duration(offer.plan.step),
        about + days(offer.seconds(found.job)),
        about + cost_words(offer, found),
        split_words(offer.plan),
        ", ".join(verdicts),
    )
