"""Plans survive the file, and a file that is none is refused with the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, RECIPE
from oracles.small_request import REQUEST, slot_requests, two_buckets
from tables import by_name

from libra.config.recipe import Recipe
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import (
    Confirmation,
    DisagreementError,
    DocumentError,
    Plan,
    compare,
    confirm,
    dump_plan,
    make_plan,
    parse_plan,
)
from libra.plan.planner import Planner
from libra.plan.problem import InfeasiblePlanError
from libra.plan.solution import Solution

PLAN = make_plan(replace(REQUEST, current=two_buckets(1, 1, 2)))


@pytest.fixture(scope="module")
def cluster_plan() -> Plan:
    return Planner(CLUSTER, QWEN_06B, RECIPE).plan(CLASSES)


@settings(max_examples=30, deadline=None)
@given(slot_requests())
def test_round_trip(request: SlotRequest) -> None:
    plan = make_plan(request)
    text = dump_plan(plan)
    assert parse_plan(text) == plan
    assert parse_plan(text.encode()) == plan
    assert dump_plan(parse_plan(text)) == text


RECIPES = st.builds(
    Recipe,
    batch=st.just(64),
    samples_per_prompt=st.sampled_from([1, 64]),
    max_length=st.just(4096),
    mode=st.sampled_from(["async", "sync", "colocated"]),
    reference=st.sampled_from(["none", "resident", "offloaded"]),
    rollout_dtype=st.sampled_from([None, "fp8", "bf16"]),
    router_hit=st.floats(0, 1),
)


@settings(max_examples=8, deadline=None)
@given(RECIPES, st.booleans())
def test_round_trip_of_plans_for_clusters(recipe: Recipe, again: bool) -> None:
    planner = Planner(CLUSTER, QWEN_06B, recipe)
    plan = planner.plan(CLASSES)
    if again:
        plan = planner.plan(CLASSES, plan)
    text = dump_plan(plan)
    read = parse_plan(text)
    assert read == plan
    assert dump_plan(read) == text
    # The request is whole: it needs nothing but itself to be answered.
    assert read.request == plan.request


def test_equal_values_give_equal_bytes_even_when_a_whole_number_of_seconds_is_written_as_one() -> None:
    switch = replace(REQUEST.profile.switch, engine_start=8)
    same = replace(PLAN, request=replace(PLAN.request, profile=replace(REQUEST.profile, switch=switch)))
    assert same == PLAN
    assert dump_plan(same) == dump_plan(PLAN)


def test_a_plan_opens_with_its_format_and_ends_with_its_request_and_a_newline() -> None:
    text = dump_plan(PLAN)
    assert text.startswith('{\n  "format": 6,\n  "allocation": {')
    assert list(json.loads(text))[-1] == "request"
    assert text.endswith("}\n")


def test_a_list_of_numbers_is_one_line_and_everything_else_one_entry_a_line(cluster_plan: Plan) -> None:
    lines = dump_plan(cluster_plan).splitlines()
    batches = ", ".join(str(batch) for batch in cluster_plan.request.profiles[0].engines[0].batches)  # type: ignore[union-attr]
    assert any(line.strip() == f'"batches": [{batches}],' for line in lines)
    assert not [line for line in lines if line.count('": ') > 1]
    assert not [line for line in lines if "[[" in line]  # a table has a line for each of its rows


def spoil(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    *outer, last = path.split(".")

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in outer:
            place = place[int(key) if key.isdigit() else key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


SPOILED = [
    ("unknown key", spoil("request.fleet.tpus", 8), "request.slots.fleet.tpus: Unexpected keyword argument"),
    ("unknown key in a class", spoil("request.workload.classes.0.colour", 1), "workload.classes.0.colour"),
    ("unknown key at the top", spoil("author", "me"), "author: Unexpected keyword argument"),
    ("missing key", spoil("proof.gap", None), "proof.gap: Field required"),
    ("wrong type", spoil("allocation.replicas", "2"), "allocation.replicas: Input should be a valid integer"),
    ("unknown word", spoil("predicted.bottleneck", "publication"), "predicted.bottleneck: Input should be 'rollout'"),
    ("refused value", spoil("request.profile.engine.step", -1.0), "EngineCost.step is -1.0"),
    ("seats of no bucket", spoil("max_num_seqs", []), "max_num_seqs has 0 values, and allocation "),
    ("refused shape", spoil("request.shapes.0.max_num_seqs", 0), "max_num_seqs is 0; set it to 1 or more"),
    ("not a number", spoil("predicted.step", float("nan")), "predicted.step: Input should be a finite number"),
    ("unknown kind", spoil("request.kind", "cloud"), "request: Input tag 'cloud'"),
    ("no kind", spoil("request.kind", None), "request: Unable to extract tag"),
    ("older format", spoil("format", 2), "format is 2; this version of libra reads format 6: plan again"),
    ("no format", spoil("format", None), "format is missing"),
]


def assert_refused(plan: Plan, change: Callable[[dict[str, Any]], None], message: str) -> None:
    document = json.loads(dump_plan(plan))
    change(document)
    with pytest.raises(DocumentError) as refusal:
        parse_plan(json.dumps(document), where="run.json")
    assert str(refusal.value).startswith("run.json: ")
    assert message in str(refusal.value)


@by_name("change, message", SPOILED)
def test_a_document_that_is_no_plan_is_refused_with_the_place(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    assert_refused(PLAN, change, message)


SPOILED_CLUSTER = [
    ("GPU", spoil("request.cluster.nodes.0.gpu.memory", 80.0), "memory is 80; a GPU has 1e+09 to 4e+12"),
    ("count", spoil("request.cluster.nodes.0.count", 0), "count is 0; set it to 1 or more"),
    ("recipe", spoil("request.recipe.batch", 63), "batch is 63, which 8 samples_per_prompt do not divide"),
    ("key of the recipe", spoil("request.recipe.batches", 64), "request.cluster.recipe.batches"),
    ("model", spoil("request.model.kinds.0.mixer.kv_heads", 3), "kv_heads is 3; it must divide the 16 heads"),
    ("profile", spoil("request.profiles.0.engines.0.tp", 0), "EngineGrid.tp is 0"),
    ("layout", spoil("layout.sharding", "zero9"), "layout.sharding"),
    (
        "role",
        spoil("placement.0.role", "rest"),
        "placement.0.role: Input should be 'train', 'generate', 'prefill' or 'decode'",
    ),
]


@by_name("change, message", SPOILED_CLUSTER)
def test_so_is_one_for_a_cluster(cluster_plan: Plan, change: Callable[[dict[str, Any]], None], message: str) -> None:
    assert_refused(cluster_plan, change, message)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", b"\xff", "[" * 100_000, "9" * 5000])
def test_a_text_that_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(DocumentError, match=r"not JSON|format is missing"):
        parse_plan(text)


SHORTER = replace(PLAN.solution, predicted=replace(PLAN.predicted, step=PLAN.proof.bound * 0.99))


@pytest.mark.parametrize(
    ("one", "other", "wrong"), [(PLAN.solution, SHORTER, "cp-sat"), (SHORTER, PLAN.solution, "ilp")]
)
def test_a_plan_below_the_other_solver_s_bound_proves_that_one_wrong(
    one: Solution, other: Solution, wrong: str
) -> None:
    right = "ilp" if wrong == "cp-sat" else "cp-sat"
    message = f"{wrong} has proven .*, and {right} has a plan of .*: {wrong} is wrong"
    with pytest.raises(DisagreementError, match=message):
        compare("cp-sat", one, "ilp", other)


def test_a_solver_that_finds_no_plan_where_there_is_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> Solution:
        raise InfeasiblePlanError("devices leave no plan")

    monkeypatch.setattr("libra.plan.plan.solver_named", lambda *_: nothing)
    with pytest.raises(DisagreementError, match=r"ilp finds no plan \(devices leave no plan\), cp-sat has one"):
        confirm(PLAN, "ilp")


def test_plans_that_the_other_bound_allows_confirm_each_other() -> None:
    longer = replace(PLAN.solution, predicted=replace(PLAN.predicted, step=PLAN.predicted.step * 1.0001))
    assert compare("cp-sat", PLAN.solution, "ilp", longer) == Confirmation(
        "ilp", longer.predicted.step, longer.proof.bound
    )
