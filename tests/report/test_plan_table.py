"""The tables of a plan, cell by cell, and the notes on its log."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from oracles.small_cluster import A800, CLASSES, QWEN_06B, RECIPE
from oracles.small_request import LONG, REQUEST, SHORT, two_buckets
from pages import cells
from rich.console import Console

from libra.hardware.cluster import Cluster
from libra.hardware.parallel import ParallelLayout
from libra.lengths import LengthTracker
from libra.plan.allocation import Allocation, Bucket
from libra.plan.explain.explanation import Bound, PoolView
from libra.plan.offline import LogEvidence
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.slots import EngineShape
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan
from libra.plan.planner import rooflines
from libra.plan.solution import Prediction, Proof
from libra.report.plan_table import log_notes, plan_tables
from libra.trajectory import Trajectory, Turn

PLAN = Plan(
    allocation=two_buckets(1, 1, 2),
    predicted=Prediction(step=12.0, rollout=9.0, training=3.0, latency=12.0, bottleneck="latency"),
    proof=Proof("optimal", 11.994, 0.0005),
    max_num_seqs=(4, 5),
    layout=None,
    placement=(),
    loans=(),
    simulated=None,
    finalists=(),
    request=REQUEST,
)

BOUND = Bound("latency", (("latency", 9.0), ("training", 3.0)), 2, 0.25)

# Two classes of nodes; two replicas of two GPUs, and engines on nodes 0, 1, 2 and 5 of one and on 0 of the other.
NODES = (replace(A800, name="a", count=6), replace(A800, name="b"))
LAYOUT = ParallelLayout(2, 1, 2, 1, 1, 8192, "full", "zero1", chunked_logits=True)


def engine(bucket: int, pool: str, node: int, *gpus: int) -> DeviceGroup:
    return DeviceGroup("generate", f"{pool}/tp{len(gpus)}", bucket, pool, (node,), gpus)


CLUSTER_PLAN = replace(
    PLAN,
    allocation=Allocation(2, (Bucket("a/tp1", 4, 0, 1000), Bucket("b/tp4", 1, 1000, 8192)), LAYOUT.family),
    max_num_seqs=(64, 512),
    layout=LAYOUT,
    placement=(
        DeviceGroup("train", LAYOUT.family, None, "b", (1,), (0, 1)),
        DeviceGroup("train", LAYOUT.family, None, "b", (1,), (2, 3)),
        *(engine(0, "a", node, 0) for node in (5, 1, 0, 2)),
        engine(1, "b", 0, 0, 1, 2, 3),
    ),
    request=ClusterRequest(Cluster(NODES), QWEN_06B, RECIPE, CLASSES, rooflines(Cluster(NODES), QWEN_06B, RECIPE)),
)


def test_the_allocation_shows_replicas_and_the_range_of_each_bucket() -> None:
    assert cells(plan_tables(PLAN, BOUND, ())[0]) == [
        ("training replicas", "1", "one device", "-", "-"),
        ("engines", "1", "short", "4", "1 to 1,000"),
        ("engines", "2", "long", "5", "1,001 to 5,000"),
    ]


def test_on_a_cluster_it_shows_the_layout_the_devices_and_the_nodes() -> None:
    table = plan_tables(CLUSTER_PLAN, BOUND, ())[0]
    assert table.caption == f"training, in data-parallel ranks: {LAYOUT.family}"
    assert cells(table) == [
        ("training ranks", "2", "2 devices", "-", "-", "4", "b 1"),
        ("engines", "4", "a/tp1", "64", "1 to 1,000", "4", "a 0-2, 5"),
        ("engines", "1", "b/tp4", "512", "1,001 to 8,192", "4", "b 0"),
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_the_allocation_breaks_no_word(width: int) -> None:
    console = Console(file=StringIO(), width=width, record=True)
    console.print(plan_tables(CLUSTER_PLAN, BOUND, ())[0])
    said = console.export_text()
    for word in (*LAYOUT.family.split(), "max_num_seqs", "ranks", "devices"):
        assert word in said


def test_a_bucket_on_several_pools_names_each() -> None:
    placement = (*CLUSTER_PLAN.placement, engine(0, "b", 1, 4))
    rows = cells(plan_tables(replace(CLUSTER_PLAN, placement=placement), BOUND, ())[0])
    assert rows[1][5:] == ("5", "a 0-2, 5; b 1")


def test_on_a_cluster_the_work_is_that_of_the_batch() -> None:
    table = plan_tables(CLUSTER_PLAN, BOUND, ())[3]
    assert str(table.title).startswith("Work of a step: 64 trajectories, in classes, ")
    assert str(table.title).endswith(" generated tokens/s")
    assert [row[-1] for row in cells(table)] == ["a/tp1", "b/tp4"]


def test_the_parts_of_a_step_add_up_to_it_and_the_division_is_said() -> None:
    table = plan_tables(PLAN, BOUND, ())[1]
    assert table.title == "One optimiser step, predicted: 12.0 s, latency-bound"
    assert cells(table) == [
        ("the longest episodes", "9.00", "75.0 %", "largest part"),
        ("training", "3.00", "25.0 %", ""),
    ]
    assert [column.footer for column in table.columns][:2] == ["the step", "12.00"]
    assert table.caption == "each divided by 2: with staleness 1, 2 batches are under way"


def test_a_step_as_long_as_training_is_no_sum_and_one_of_no_length_has_no_shares() -> None:
    table = plan_tables(PLAN, Bound("training", (("training", 12.0),), 2, 0.25), ())[1]
    assert table.title == "One optimiser step, predicted: 12.0 s, training-bound"
    assert cells(table) == [("training", "12.00", "100.0 %", "")]
    assert (table.show_footer, table.caption) == (False, None)
    nothing = replace(PLAN, predicted=Prediction(0.0, 0.0, 0.0, 0.0, "rollout"))
    assert [row[2] for row in cells(plan_tables(nothing, BOUND, ())[1])] == ["-", "-"]


def test_idle_devices_are_shown_with_the_reason() -> None:
    table = plan_tables(PLAN, BOUND, (PoolView("a", 8, 4, 4, 0, ""), PoolView("[b]", 16, 0, 0, 16, "too slow there")))[
        1
    ]
    assert (table.title, cells(table)) == ("Idle devices", [(r"\[b]", "16", "too slow there")])


def test_the_proof_shows_status_bound_and_gap() -> None:
    assert [value for _, value in cells(plan_tables(PLAN, BOUND, ())[2])] == ["optimal", "11.99 s", "0.05 %"]


def test_the_work_shows_each_class_and_who_serves_it() -> None:
    table = plan_tables(PLAN, BOUND, ())[3]
    assert str(table.title).startswith("Work of a step: 8 trajectories, in classes, ")
    assert cells(table) == [
        ("1,000", "75.0 %", "100", "1,000", "2", "3", "short"),
        ("4,000", "25.0 %", "400", "2,000", "4", "10", "long"),
    ]
    assert (SHORT.generated, LONG.generated) == (100.0, 400.0)


def test_a_name_that_looks_like_markup_is_shown_as_it_is() -> None:
    shapes = (EngineShape("[red]", 2000, 4, 10_000), REQUEST.shapes[1])
    allocation = replace(
        PLAN.allocation, buckets=(replace(PLAN.allocation.buckets[0], shape="[red]"), PLAN.allocation.buckets[1])
    )
    console = Console(width=200, file=StringIO(), record=True)
    for table in plan_tables(replace(PLAN, request=replace(REQUEST, shapes=shapes), allocation=allocation), BOUND, ()):
        console.print(table)
    assert console.export_text().count("[red]") == 2


def evidence(unfinished: int, *tool_seconds: float | None) -> LogEvidence:
    tracker = LengthTracker()
    for seconds in tool_seconds:
        turns = (Turn(5, "tool", "ok", 3, seconds), Turn(2, None, None, 0))
        tracker.observe(Trajectory("t", "p", "task", 10, turns, None, 0, finished=True))
    return LogEvidence(tracker, len(tool_seconds), unfinished, 5, max((t or 0.0 for t in tool_seconds), default=0.0), 0)


PAUSES = evidence(0, 0.1, 25_000.0)

ALTERNATING_PLAN = replace(CLUSTER_PLAN, predicted=replace(PLAN.predicted, step_range=(3.0, 21.0)))
ALTERNATE = (
    "12.0 s is the mean of alternating steps: a batch waits for the longest episodes of the previous batch, so steps"
    " may take from 3.00 s to 21.0 s; a limit on the seconds of an episode, or more staleness, shortens them"
)

NOTES: list[tuple[str, Plan, LogEvidence, tuple[str, ...]]] = [
    ("complete", PLAN, evidence(0, 0.1, 0.0), ()),
    ("complete, for a cluster", CLUSTER_PLAN, evidence(0, 0.1, 0.0), ()),
    ("alternating", ALTERNATING_PLAN, evidence(0, 0.1, 0.0), (ALTERNATE,)),
    (
        "pauses",
        ALTERNATING_PLAN,
        PAUSES,
        (
            "the longest tool call of the log took 6 h 57 min, and waiting for the longest episodes is the largest part"
            " of a step: if calls waited for people, shorten them with --longest-tool-call SECONDS",
            ALTERNATE,
        ),
    ),
    (
        "pauses cut",
        ALTERNATING_PLAN,
        replace(PAUSES, longest_tool_call=60.0, cut_tool_calls=1),
        ("1 tool call of more than 1 min 00 s counted as 1 min 00 s", ALTERNATE),
    ),
    (
        "one unfinished",
        PLAN,
        evidence(1, 0.1),
        ("1 trajectory of 2 in the log left out: unfinished, so the tail may be longer",),
    ),
    (
        "both",
        PLAN,
        evidence(3, None),
        (
            "3 trajectories of 4 in the log left out: unfinished, so the tail may be longer",
            "tool seconds unknown for 100.0 % of the tool calls: 0 s assumed, so the longest episodes may take longer",
        ),
    ),
    (
        "both, for a cluster",
        ALTERNATING_PLAN,
        evidence(3, None, 0.1),  # the first one weighs a little less
        (
            "3 trajectories of 5 in the log unfinished: their present lengths count as lower bounds",
            "tool seconds unknown for 49.9 % of the tool calls: 1 s assumed, so the longest episodes may take longer",
            ALTERNATE,
        ),
    ),
]


@pytest.mark.parametrize(("plan", "found", "wanted"), [row[1:] for row in NOTES], ids=[row[0] for row in NOTES])
def test_notes_say_what_the_log_cannot_tell(plan: Plan, found: LogEvidence, wanted: tuple[str, ...]) -> None:
    assert log_notes(plan, BOUND, found) == wanted
