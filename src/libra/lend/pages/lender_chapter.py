"""The chapter on borrowed engines of an explanation's page."""

from __future__ import annotations

from markupsafe import Markup

from libra.lend.pages.lender_worth import lender_sentences, lender_steps
from libra.plan.explain.explanation import Explanation, PlanView
from libra.report.page import Bar, render_chapter
from libra.report.words import duration, signed_percent


def lender_chapter(explanation: Explanation) -> Markup:
    """The chapter of the page; empty where no pool serves."""
    if not explanation.lenders:
        return Markup()
    rows = lender_steps(explanation)
    longest = max((step for _, _, step in rows), default=1.0)
    steps = [
        (pool, case, Bar(duration(step), step / longest), _over(step, explanation.plan)) for pool, case, step in rows
    ]
    facts = {"sentences": lender_sentences(explanation), "steps": steps}
    return render_chapter("borrowed.html", "libra.lend.pages", **facts)


def _over(step: float, plan: PlanView) -> str:
    return "-" if step == plan.predicted.step else signed_percent(step / plan.predicted.step - 1, 1)
