"""Compared clusters in words and as a table."""

from __future__ import annotations

from math import isfinite

from rich.table import Column, Table

from libra.choose.offers import Comparison, Offer
from libra.report.plan_headline import roles_of
from libra.report.tables import number, whole
from libra.report.words import MISSING, cell, count, days, dollars, duration, plural, printable

COLUMNS = ("cluster", "a step", "all steps", "cost", "GPU-hours", "split", "")


def offer_sentences(found: Comparison) -> tuple[str, ...]:
    """Which to take: the cheapest in time, and the fastest."""
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
        *map(whole, COLUMNS[1:4]),
        number("GPU-hours"),
        Column("split", overflow="fold"),
        Column("", overflow="fold"),
        title=f"{plural(found.job.steps, 'step')} on each",
    )
    for row in offer_rows(found):
        table.add_row(*map(cell, row))
    table.caption = "~: predicted, not simulated. Steps are taken to last as long as those of the plan"
    return table


def cost_words(offer: Offer, found: Comparison) -> str:
    """Dollars where all offers have a cost, otherwise GPU-hours."""
    return dollars(found.cost(offer)) if found.priced else f"{count(found.cost(offer))} GPU-hours"


def _named(what: str, offer: Offer, found: Comparison) -> str:
    assert offer.plan is not None
    kind = "predicted" if offer.plan.simulated is None else f"in simulation under {offer.plan.simulated.router}"
    return (
        f"{what}: {printable(offer.name)}, {days(offer.seconds(found.job))} and {cost_words(offer, found)}"
        f" (a step takes {duration(offer.plan.step)}, {kind})."
    )


def _row(offer: Offer, found: Comparison) -> tuple[str, ...]:
    if offer.plan is None:
        return (offer.name, *[MISSING] * 4, MISSING, offer.refusal)
    about = "" if offer.plan.simulated is not None else "~"
    amount = offer.dollars(found.job)
    verdicts = [
        word
        for word, true in (
            ("cheapest", offer is found.cheapest),
            ("fastest", offer is found.fastest),
            ("late", offer not in found.in_time),
            ("neither faster nor cheaper than another", offer not in found.front),
        )
        if true
    ]
    return (
        offer.name,
        about + duration(offer.plan.step),
        about + days(offer.seconds(found.job)),
        MISSING if amount is None else about + dollars(amount),
        about + count(offer.gpu_hours(found.job)),
        roles_of(offer.plan.allocation),
        ", ".join(verdicts),
    )
