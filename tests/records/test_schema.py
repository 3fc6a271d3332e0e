from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from libra.plan.transition import Role
from libra.records.schema import (
    EventRecord,
    Record,
    RecordFormatError,
    RunSummary,
    StepRecord,
    parse_record,
    read_records,
    role_of,
    styles,
)

EVENT = '{"time": 1.5, "kind": "checkpoint", "worker": null, "text": "saved"}'


def test_every_record_comes_back_as_it_was(example_records: Mapping[str, Record]) -> None:
    for record in example_records.values():
        line = record.to_json()
        assert "\n" not in line
        assert parse_record(type(record), line, "x:1") == record


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (EVENT.replace('"text"', '"txt"'), "x.jsonl:3: text: Field required"),
        (EVENT.replace("}", ', "extra": 1}'), "x.jsonl:3: extra: Unexpected"),
        (EVENT.replace("1.5", '"1.5"'), "x.jsonl:3: time: Input should be a valid number"),
        (EVENT.replace("1.5", "NaN"), "time is nan: a record has only finite numbers"),
        (EVENT.replace("1.5", "9" * 400), "time"),
        (EVENT[:20], "x.jsonl:3: line: Invalid JSON"),
        ("", "x.jsonl:3: line: Invalid JSON"),
    ],
)
def test_a_line_that_breaks_the_schema_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(RecordFormatError) as caught:
        parse_record(EventRecord, line, "x.jsonl:3")
    assert str(caught.value).startswith("x.jsonl:3: ")
    assert complaint in str(caught.value)


def test_reading_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{EVENT}\n{EVENT}\n")
    assert [event.time for event in read_records(EventRecord, path)] == [1.5, 1.5]
    path.write_text(f"{EVENT}\n\n")
    with pytest.raises(RecordFormatError, match=r"events\.jsonl:2: line"):
        list(read_records(EventRecord, path))


def test_an_error_inside_the_summary_names_its_place(example_records: Mapping[str, Record]) -> None:
    summary = json.loads(example_records["summary"].to_json())
    assert parse_record(RunSummary, json.dumps(summary, indent=2), "summary.json") == example_records["summary"]
    summary["evaluations"][1]["questions"] = "many"
    with pytest.raises(RecordFormatError, match=r"summary\.json: evaluations\.1\.questions"):
        parse_record(RunSummary, json.dumps(summary), "summary.json")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("peak_memory_bytes", 10**400, "peak_memory_bytes has 401 digits: a record has only integers of 64 bits"),
        ("device_seconds", {"generating": float("inf")}, "device_seconds is inf: a record has only finite numbers"),
    ],
)
def test_a_number_that_no_sum_can_hold_is_refused(
    example_records: Mapping[str, Record], field: str, value: object, complaint: str
) -> None:
    summary = json.loads(example_records["summary"].to_json()) | {field: value}
    with pytest.raises(RecordFormatError, match=complaint):
        parse_record(RunSummary, json.dumps(summary), "summary.json")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"grad_norm": float("inf")}, "grad_norm is inf"),
        ({"step_seconds": 0.0}, "step_seconds must be > 0"),
        ({"roles": {"w0": "sleeping"}}, "role 'sleeping': unknown; use one of idle, joining"),
    ],
)
def test_a_step_that_cannot_be_is_refused_where_it_is_made(
    example_records: Mapping[str, Record], changes: dict[str, object], complaint: str
) -> None:
    step = example_records["step"]
    assert isinstance(step, StepRecord)
    with pytest.raises(ValueError, match=complaint):
        replace(step, **changes)  # type: ignore[arg-type]


def test_integers_serve_as_seconds(example_records: Mapping[str, Record]) -> None:
    summary = example_records["summary"]
    assert isinstance(summary, RunSummary)
    line = summary.to_json().replace(f'"wall_seconds":{summary.wall_seconds}', '"wall_seconds":600')
    assert parse_record(RunSummary, line, "x").wall_seconds == 600


@pytest.mark.parametrize("role", ["sleeping", "train:core", "rollout:", "", "Rollout"])
def test_roles_that_do_not_exist_are_refused(role: str) -> None:
    with pytest.raises(ValueError, match="role "):
        role_of(role)


def test_buckets_are_told_apart_in_the_order_in_which_they_appear() -> None:
    labels = ["train", "rollout:short", "train", "rollout:long", "rollout:short", "rollout:a", "rollout:b"]
    given = styles(labels, {role: role.value for role in Role}, ("first", "second", "third"))
    assert given == {
        "train": "train",
        "rollout:short": "first",
        "rollout:long": "second",
        "rollout:a": "third",
        "rollout:b": "third",
    }
