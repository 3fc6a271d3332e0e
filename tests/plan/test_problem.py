"""What the values of a problem refuse, and the remedy they name; one name for each family of constraints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from oracles.small_problem import LONG, ONE, PROBLEM, SHORT_FEW, one_bucket, two_buckets
from tables import by_name

from libra.plan import problem
from libra.plan.allocation import Allocation, Bucket
from libra.plan.model import feasibility
from libra.plan.model.cpsat import StepModel
from libra.plan.model.ilp import StepProgram
from libra.plan.problem import Family, Pool

REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("nodes", lambda: Pool("a", -1, 8), "nodes is -1; set it to 0 or more"),
    ("devices of a node", lambda: Pool("a", 1, 0), "devices_per_node is 0; set it to 1 or more"),
    ("devices", lambda: replace(LONG, devices=0), "devices is 0; set it to 1 or more"),
    ("max_num_seqs", lambda: replace(LONG, max_num_seqs=0), "max_num_seqs is 0; set it to 1 or more"),
    ("holds", lambda: replace(LONG, holds=0), "holds is 0; set it to 1 or more"),
    ("stall", lambda: replace(LONG, stall=-1.0),
     "engine option long/4: stall contains -1.0; prices are finite and >= 0"),
    ("work", lambda: replace(LONG, work=((1.0, float("nan")),)), "work contains nan"),
    ("refresh", lambda: replace(LONG, refresh=(1.0, float("inf"))), "refresh contains inf"),
    ("residence", lambda: replace(LONG, residence=(-1.0, 1.0)), "residence contains -1.0"),
    ("generates", lambda: replace(LONG, generates=((-1.0, 0.0),), waits=((0.0, 0.0),)), "generates contains -1.0"),
    ("waits", lambda: replace(LONG, generates=((0.0, 0.0),), waits=((0.0, float("inf")),)), "waits contains inf"),
    ("lines", lambda: replace(LONG, generates=((0.0, 0.0),)), "generates and waits differ in their number of lines"),
    ("refill", lambda: replace(LONG, refill=(1.0, 1.0)), "give refill and kv_occupancy together"),
    ("no row", lambda: replace(LONG, work=()), "its prices differ in their number of classes"),
    ("short row", lambda: replace(LONG, work=((1.0, 1.0), (1.0,))), "its prices differ in their number of classes"),
    ("short refresh", lambda: replace(LONG, refresh=(1.0,)), "its prices differ in their number of classes"),
    ("replicas", lambda: replace(ONE, replicas=0), "replicas is 0; set it to 1 or more"),
    ("training seconds", lambda: replace(ONE, seconds=float("inf")), "training option copies: seconds contains inf"),
    ("publication", lambda: replace(ONE, publish=-1.0), "publish contains -1.0"),
    ("tail", lambda: replace(ONE, tail=ONE.seconds * 2), "training option copies: tail is .*; it is a part of"),
    ("negative tail", lambda: replace(ONE, tail=-0.5), "tail is -0.5; it is a part of"),
    ("empty range", lambda: Bucket("s", 1, 100, 100), r"bucket \(100, 100\] is empty"),
    ("no engine", lambda: Bucket("s", 0, 0, 100), "engines is 0; set it to 1 or more"),
    ("gap", lambda: Allocation(1, (Bucket("s", 1, 0, 100), Bucket("t", 1, 200, 300))), "start it above 100"),
    ("allocation's replicas", lambda: Allocation(-1, ()), "replicas is -1"),
    ("staleness", lambda: replace(PROBLEM, staleness=-1), "staleness is -1; set it to 0 or more"),
    ("longest", lambda: replace(PROBLEM, longest_context=0), "longest_context is 0; set it to 1 or more"),
    ("buckets", lambda: replace(PROBLEM, most_buckets=0), "most_buckets is 0; set it to 1 or more"),
    ("colocated", lambda: replace(PROBLEM, colocated=True), "staleness is 1; colocated training is synchronous"),
    ("no class", lambda: replace(PROBLEM, peaks=(), expected=()), "at least one trajectory class"),
    ("order", lambda: replace(PROBLEM, peaks=(4000, 1000)), "sort the classes, shortest first"),
    ("beyond", lambda: replace(PROBLEM, peaks=(1000, 6000)), "none above longest_context"),
    ("same pool", lambda: replace(PROBLEM, pools=PROBLEM.pools * 2), "two pools have the same name"),
    ("no pool", lambda: replace(PROBLEM, training=(replace(ONE, pool="b"),)), "on pool 'b'; the pools are a"),
    ("same training", lambda: replace(PROBLEM, training=(ONE, ONE)), "two training options have the same layout"),
    ("shape", lambda: replace(PROBLEM, engines=(SHORT_FEW, replace(LONG, shape="short"))), "of shape short differ"),
    ("met", lambda: replace(PROBLEM, expected=(True,)),
     "there are 2 classes; expected, recall and every engine option"),
    ("recall", lambda: replace(PROBLEM, recall_possible=((1.0,), *PROBLEM.recall_possible)), "there are 2 classes"),
    ("fraction", lambda: replace(PROBLEM, recall_possible=((1.0, 1.5), *PROBLEM.recall_possible)),
     "recall has a share outside 0 to 1"),
    ("known router", lambda: replace(PROBLEM, recall_known=((0.1, 0.1),)), "list every router of recall_known"),
    ("switch", lambda: replace(PROBLEM, switch=-1.0), "problem: switch contains -1.0"),
]  # fmt: skip


@by_name("make, message", REFUSED)
def test_a_wrong_value_is_refused_with_its_field_and_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_classes_of_equal_length_are_allowed() -> None:
    assert replace(PROBLEM, peaks=(4000, 4000)).peaks == (4000, 4000)


def test_a_problem_knows_its_pools_and_shapes() -> None:
    assert PROBLEM.pool("a").devices == 8
    assert PROBLEM.shapes == ("short", "long")
    assert PROBLEM.footprint("long") == ("a", 2, 5000)
    assert (one_bucket(1, 3).engines, two_buckets(1, 3, 2).engines) == (3, 5)
    text = two_buckets(1, 3, 2).describe()
    assert (text, Allocation(2, ()).describe()) == ("train 1 | short 3 <= 1000 | long 2 <= 5000", "train 2")


FAMILIES = get_args(Family)
DOCS = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.parametrize("text", [problem.__doc__, DOCS.read_text()], ids=["problem", "docs"])
def test_every_family_stands_on_the_page_of_notation(text: str) -> None:
    assert [family for family in FAMILIES if not re.search(rf"^(\s+|\| `){family}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("model", [StepModel, StepProgram])
def test_constraints_of_a_model_are_families(model: type) -> None:
    source = inspect.getsource(model)
    named = set(re.findall(r'(?:with_name\(f?|_add\(f?|name = f?)"([a-z_]+?)(?:_?[\[{].*?)?"', source))
    assert named - {"different", "fewest", "starts"} <= set(FAMILIES)
    assert {"one_training", "every_class_once", "most_buckets", "one_bucket_per_shape", "devices"} <= named


def test_conflicts_are_of_families() -> None:
    assert set(re.findall(r'Constraint\(\s*"(\w+)"', inspect.getsource(feasibility))) <= set(FAMILIES)
