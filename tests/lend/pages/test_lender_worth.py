"""The worth of loans on the page of an explanation."""

from __future__ import annotations

from dataclasses import replace

from report.made_explanation import CLASSES, EXPLANATION
from report.pages import Page

from libra.plan.explain.explanation import LenderView, Relief
from libra.report.explain_page import explain_page

CHAT = LenderView("chat", 4, (0.6,), 0.75, 0.1, 100.0, 104.0, 140.0, 125.0, 120.0, "")
MORE = Relief("one more node of chat", "devices", "chat", 95.0, 5.0, 0.05, True)


def test_a_page_says_what_a_loan_is_worth() -> None:
    assert "Borrowed engines" not in explain_page(EXPLANATION, "own", CLASSES)
    lent = replace(EXPLANATION, lenders=(CHAT,), reliefs=(*EXPLANATION.reliefs, MORE))
    said = Page(explain_page(lent, "lent")).text
    for words in (
        "a step of 1 min 40 s instead of 2 min 05 s, 20.0 % shorter",
        "the loan would save 5.00 s. In 10.0 % of cases",
        "One more node of chat would save 5.00 s a step (5.0 %).",
        "chat the plan, with a loan of 4 engines 1 min 40 s -",
        "chat the plan on average, as traffic may take the loan away 1 min 44 s +4.0 %",
        "chat the plan while nothing is lent 2 min 20 s +40.0 %",
        "chat the loan, with training as in the best plan without it 2 min 00 s +20.0 %",
        "chat the best plan without the loan 2 min 05 s +25.0 %",
        "chat with one more node of the pool 1 min 35 s -5.0 %",
    ):
        assert words in said, words


def test_a_page_says_why_nothing_is_borrowed_and_what_binds() -> None:
    none = replace(CHAT, engines=0, why_not="no step would be shorter: it is rollout-bound")
    said = Page(explain_page(replace(EXPLANATION, lenders=(none,)), "lent")).text
    assert (
        "chat lends nothing: no step would be shorter: it is rollout-bound. One more node of chat would save nothing:"
        " the step is bound by generation."
    ) in said
