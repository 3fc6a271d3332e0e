"""Plans and requests survive the file, and a file that is not one of them is refused with the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from oracles.enumerate_plans import requests
from oracles.small_request import REQUEST, two_buckets

from libra.plan.cpsat import solve
from libra.plan.document import DocumentError, dump_plan, dump_request, parse_plan, parse_request
from libra.plan.problem import PlanRequest

PLAN = solve(replace(REQUEST, current=two_buckets(1, 1, 2)))


@settings(max_examples=30, deadline=None)
@given(requests(with_current=True))
def test_round_trip(request: PlanRequest) -> None:
    plan = solve(request)
    text = dump_plan(plan)
    assert parse_plan(text) == plan
    assert dump_plan(parse_plan(text)) == text
    assert parse_request(dump_request(request)) == request
    assert dump_request(parse_request(dump_request(request))) == dump_request(request)


def test_equal_values_give_equal_bytes_even_when_a_whole_number_of_seconds_is_written_as_one() -> None:
    switch = replace(REQUEST.profile.switch, engine_start=8)
    same = replace(REQUEST, profile=replace(REQUEST.profile, switch=switch))
    assert same == REQUEST
    assert dump_request(same) == dump_request(REQUEST)


def test_a_plan_opens_with_its_format_and_ends_with_a_newline() -> None:
    text = dump_plan(PLAN)
    assert text.startswith('{\n  "format": 1,\n  "request": {')
    assert text.endswith("}\n")


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
    ("unknown key", spoil("request.fleet.tpus", 8), "request.fleet.tpus: Unexpected keyword argument"),
    ("unknown key in a class", spoil("request.workload.classes.0.colour", 1), "request.workload.classes.0.colour"),
    ("unknown key at the top", spoil("author", "me"), "author: Unexpected keyword argument"),
    ("missing key", spoil("proof.gap", None), "proof.gap: Field required"),
    ("wrong type", spoil("allocation.replicas", "2"), "allocation.replicas: Input should be a valid integer"),
    ("unknown word", spoil("predicted.bottleneck", "network"), "predicted.bottleneck: Input should be 'rollout'"),
    ("refused value", spoil("request.profile.engine.step", -1.0), "EngineCost.step is -1.0"),
    ("not a number", spoil("predicted.step", float("nan")), "predicted.step: Input should be a finite number"),
    ("newer format", spoil("format", 2), "format is 2; this version of libra reads format 1"),
    ("no format", spoil("format", None), "format is missing"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in SPOILED], ids=[row[0] for row in SPOILED])
def test_a_document_that_is_no_plan_is_refused_with_the_place(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = json.loads(dump_plan(PLAN))
    change(document)
    with pytest.raises(DocumentError) as refusal:
        parse_plan(json.dumps(document), where="run.json")
    assert str(refusal.value).startswith("run.json: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_a_text_that_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match=r"not JSON|format is missing"):
        parse_plan(text)


def test_a_plan_is_no_request() -> None:
    with pytest.raises(DocumentError, match="this one has allocation, format, predicted, proof, request"):
        parse_request(dump_plan(PLAN))


def test_a_spoiled_request_is_refused_with_the_place() -> None:
    document = json.loads(dump_request(REQUEST))
    document["request"]["shapes"][0]["max_num_seqs"] = 0
    with pytest.raises(DocumentError, match=r"request: shapes.0: .*max_num_seqs is 0; set it to 1 or more"):
        parse_request(json.dumps(document))
