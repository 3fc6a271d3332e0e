"""Which classes are a distribution, and how much of their work the router moves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from oracles.small_cluster import CLUSTER, LONG, QWEN_06B, RECIPE, SHORT
from tables import by_name

from libra.lengths import TrajectoryClass
from libra.lengths.members import Member
from libra.plan.options.menu import SHARE_TOLERANCE, check_classes, most_buckets, reach
from libra.plan.planner import Planner


def with_shares(*shares: float) -> tuple[TrajectoryClass, ...]:
    return tuple(replace(SHORT, share=share) for share in shares)


REFUSED: list[tuple[str, Sequence[TrajectoryClass], str]] = [
    ("none", (), "classes is empty; a workload needs at least one trajectory class"),
    ("too long", (SHORT, LONG), "classes[1].peak_context is 4000; it lies between 1 and longest_context (3999): raise"),
    ("no context", (replace(SHORT, share=1.0, peak_context=0),), "classes[0].peak_context is 0; it lies between 1 and"),
    ("a part above 1", (replace(SHORT, before_first_return=1.1),), "classes[0].before_first_return is 1.1; it is a"),
    ("too much", with_shares(0.75, 0.5), "classes: the shares sum to 1.25; divide each by their sum"),
    ("too little", with_shares(0.5), "classes: the shares sum to 0.5; divide each by their sum"),
    ("members", (replace(SHORT, members=(Member(0.5, 1.0, 1.0, 1.0, 1.0),)),),
     "classes[0].members: the shares sum to 0.5; divide each by their sum"),
    ("a member", (replace(SHORT, members=(Member(1.0, -1.0, 1.0, 1.0, 1.0),)),),
     "classes[0].members[0].generated is -1"),
    ("unordered", (replace(LONG, peak_context=1500), replace(SHORT, share=0.75)),
     "classes are not ordered; sort them by peak_context, shortest first"),
]  # fmt: skip


@by_name("classes, message", REFUSED)
def test_classes_that_are_no_distribution_are_refused(classes: Sequence[TrajectoryClass], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_classes(classes, 3999)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", [field.name for field in fields(TrajectoryClass) if field.name != "members"])
def test_no_field_of_a_class_is_negative_or_beyond_measure(field: str, value: float) -> None:
    spoiled = replace(LONG, **{field: value})
    with pytest.raises(ValueError, match=rf"^classes\[1\]\.{field} is .*; every mean is 0 or more, and below 1e\+15"):
        check_classes((SHORT, spoiled), 5000)


def test_shares_need_to_sum_to_one_up_to_rounding_only() -> None:
    check_classes((SHORT, LONG), 4000)
    check_classes(with_shares(0.25 + SHARE_TOLERANCE / 2, 0.75), 4000)
    with pytest.raises(ValueError, match="the shares sum to"):
        check_classes(with_shares(0.25 + SHARE_TOLERANCE * 2, 0.75), 4000)


def test_the_router_is_as_it_was_seen_or_perfect() -> None:
    # 0.6 and 0.5 of the work are done before the first return, when nothing is known of a trajectory.
    assert reach((SHORT, LONG), 0.5) == (pytest.approx((0.2, 0.25)), pytest.approx((0.4, 0.5)))
    assert reach((SHORT, LONG), 0.0) == (pytest.approx((0.0, 0.0)), pytest.approx((0.4, 0.5)))
    assert reach((SHORT, LONG), 1.0) == (pytest.approx((0.4, 0.5)),)


def test_where_no_tool_returns_there_is_one_bucket() -> None:
    recipe = RECIPE.model_copy(update={"max_buckets": 2})
    silent = tuple(replace(cls, before_first_return=1.0) for cls in (SHORT, LONG))
    assert [most_buckets(recipe, classes) for classes in ((SHORT, LONG), silent)] == [2, 1]
    assert len(Planner(CLUSTER, QWEN_06B, recipe).plan(silent).allocation.buckets) == 1
