"""The sentence and the tables of an explanation, cell by cell."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from made_explanation import EXPLANATION
from pages import cells
from rich.console import Console

from libra.plan.explain.explanation import Bound, Routing, Split
from libra.plan.solution import Proof
from libra.report.explain_table import (
    MOST_KINDS,
    MOST_SPLITS,
    alternation,
    crossing,
    explain_tables,
    headline,
    routing_sentence,
)

HEADLINES = [
    (
        {},
        "Rollout-bound: a step is as long as generation, 1 min 40 s; without this bottleneck, a step could be "
        "20.0 % shorter."
        " No plan is shorter by more than 0.01 %.",
    ),
    (
        {"bound": Bound("latency", (("training", 50.0), ("latency", 49.0), ("publication", 1.0)), 1, 0.5)},
        "Latency-bound: a step is as long as the latency of a batch, 1 min 40 s; without this bottleneck, a step "
        "could be 50.0 %"
        " shorter. Its parts: training 50.0 s; the longest episodes 49.0 s; publication of weights 1.00 s."
        " No plan is shorter by more than 0.01 %.",
    ),
    (
        {"bound": Bound("latency", (("publication", 70.0), ("rollout", 30.0), ("training", 0.0)), 3, 0.0)},
        "Latency-bound: a step is as long as the latency of a batch, 1 min 40 s. Its parts, each divided by the 3"
        " batches under way (staleness 2): publication of weights 1 min 10 s; generation 30.0 s. No plan is shorter by"
        " more than 0.01 %.",
    ),
    (
        {"bound": Bound("training", (("training", 100.0),), 2, 0.5), "proof": Proof("feasible", 97.0, 0.03)},
        "Training-bound: a step is as long as training, 1 min 40 s; without this bottleneck, a step could be 50.0 "
        "% shorter."
        " The search ended early: a plan may be up to 3.0 % shorter.",
    ),
]


@pytest.mark.parametrize(("changed", "wanted"), HEADLINES)
def test_the_headline_names_the_parts_of_the_step_and_the_proof(changed: dict[str, object], wanted: str) -> None:
    assert headline(replace(EXPLANATION, **changed)) == wanted  # type: ignore[arg-type]


def test_steps_that_alternate_are_said_to() -> None:
    predicted = EXPLANATION.plan.predicted
    assert alternation(predicted) == ""
    assert alternation(replace(predicted, step_range=(80.0, 120.0))) == (
        "1 min 40 s is the mean of alternating steps: a batch waits for the longest episodes of the previous batch, so"
        " steps may take from 1 min 20 s to 2 min 00 s; a limit on the seconds of an episode, or more staleness,"
        " shortens them"
    )


@pytest.mark.parametrize(
    ("best", "wanted"),
    [
        (90.0, "A router that knew all lengths in advance would save 10.0 s a step (10.0 %)."),
        (102.0, "A router that knew all lengths in advance would cost 2.00 s a step (2.0 %)."),
        (99.95, "A router that knew all lengths in advance would not change the step."),
    ],
)
def test_routing_is_said_to_save_to_cost_or_to_change_nothing(best: float, wanted: str) -> None:
    assert routing_sentence(replace(EXPLANATION, routing=Routing(100.0, 95.0, best))) == wanted


def test_the_tables_show_the_numbers_of_the_explanation() -> None:
    buckets, pools, plans, reliefs, fewer, splits, rejected = (cells(table) for table in explain_tables(EXPLANATION))
    assert buckets == [
        ("1 to 8,000", "3 a/tp1", "32", "1 min 15 s", "2 min 00 s", "75.0 %"),
        ("8,001 to 40,960", "1 a/tp8", "8", "1 min 40 s", "2 min 30 s", "100.0 %"),
    ]
    assert pools == [("a", "48", "32", "11", "5", "others suffice"), (r"\[b]", "8", "0", "0", "8", "too slow")]
    assert plans == [
        ("no. 2", "none", "1 min 40 s", "32 of a train, 2 a/tp4 generate"),
        ("no. 3", "+10.0 %", "1 min 50 s", "24 of a train, 3 a/tp1 + 1 a/tp8 generate"),
        ("a single bucket", "+50.0 %", "2 min 30 s", "24 of a train, 3 a/tp8 generate"),
        ("no a/tp8", "-", "-", "no plan"),
    ]
    assert reliefs == [
        ("one more node of a (8 devices)", "12.5 s", "12.5 %"),
        ("at most 3 buckets instead of 2", "nothing", ""),
    ]
    assert fewer == [
        ("5 of 6 a", "8", "4.00 s longer (4.0 %)"),
        (r"0 of 1 \[b]", "8", "the same step"),
        (r"the fewest: 0 of 1 \[b]", "8", "the same step"),
    ]
    assert splits == [
        ("24", "1 min 47 s", "1 min 20 s", "1 min 47 s"),
        ("32", "1 min 20 s", "1 min 40 s", "1 min 40 s"),
        ("40", "1 min 04 s", "3 min 10 s", "3 min 10 s"),
    ]
    assert rejected == [("2", "needs 200 GB")]


def test_tables_fit_and_show_names_that_look_like_markup_as_they_are() -> None:
    console = Console(width=80, file=StringIO(), record=True)
    for table in explain_tables(EXPLANATION):
        console.print(table)
    shown = console.export_text()
    assert shown.count("[b]") == 3
    assert "…" not in shown  # rich cuts words off with an ellipsis where a table is too wide


def test_what_is_not_there_is_said() -> None:
    smaller = replace(EXPLANATION.fewer_nodes[0], seconds=None)
    rejected = tuple(replace(EXPLANATION.rejected[0], kind=str(kind)) for kind in range(MOST_KINDS + 1))
    found = explain_tables(replace(EXPLANATION, fewer_nodes=(smaller,), smallest=None, rejected=rejected))
    assert cells(found[4]) == [("5 of 6 a", "8", "no plan"), ("no smaller cluster", "", "has the same step")]
    assert cells(found[6])[-1] == ("2", "other reasons")


def test_nothing_rejected_has_no_table() -> None:
    assert len(explain_tables(replace(EXPLANATION, rejected=()))) == len(explain_tables(EXPLANATION)) - 1


@pytest.mark.parametrize(
    ("chosen", "first", "last"),
    [(1, 1, MOST_SPLITS), (30, 30 - MOST_SPLITS // 2, 29 + MOST_SPLITS // 2), (50, 51 - MOST_SPLITS, 50)],
)
def test_the_splits_shown_are_those_around_the_plan(chosen: int, first: int, last: int) -> None:
    every = tuple(Split("t", "a", devices, 1.0, 1.0, 1.0) for devices in range(1, 51))
    elsewhere = (Split("t", "[b]", 4, 1.0, 1.0, 1.0),)
    plan = replace(EXPLANATION.plan, training_devices=chosen)
    table = explain_tables(replace(EXPLANATION, splits=every + elsewhere, plan=plan))[5]
    shown = [int(row[0]) for row in cells(table)]
    assert (shown[0], shown[-1], len(shown)) == (first, last, MOST_SPLITS)
    assert [row.style for row in table.rows].index("bold") == shown.index(chosen)


def sides(*seconds: tuple[float, float]) -> list[Split]:
    return [
        Split("t", "a", devices, train, generate, 0.0) for devices, (train, generate) in enumerate(seconds, start=1)
    ]


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ([(9.0, 1.0), (5.0, 2.0), (3.0, 4.0)], (2, 3)),
        ([(9.0, 1.0), (5.0, 5.0), (3.0, 9.0)], (1, 2)),
        ([(5.0, 5.0), (3.0, 9.0)], (1, 2)),
        ([(9.0, 1.0), (5.0, 2.0)], None),
        ([(1.0, 9.0), (1.0, 9.0)], None),
        ([], None),
    ],
)
def test_the_sides_cross_where_training_becomes_the_faster_one(
    seconds: list[tuple[float, float]], wanted: tuple[int, int] | None
) -> None:
    assert crossing(sides(*seconds)) == wanted
