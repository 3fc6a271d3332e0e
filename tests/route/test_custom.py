"""Policies of the user's own, as path.py:Class."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra.route.custom import load_policy, restore_policy
from libra.route.policy import InstanceView, TurnRequest, View

FLEET = View(tuple(InstanceView(str(number), 0, 100, number) for number in range(3)), (100,), 10)
MINE = """
from libra.route.baselines import LeastLoaded


class Mine(LeastLoaded):
    NAME = "mine"


class Half:
    def place(self, request, fleet): ...


class Bad:
    def __init__(self):
        raise RuntimeError("not today")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


def test_a_class_of_a_file_places_and_comes_back(file: str) -> None:
    policy = load_policy(f"{file}:Mine")
    placement = policy.place(TurnRequest("t", "p", 10, 10), FLEET)
    assert placement is not None and placement.instance == "0"
    again = restore_policy(f"{file}:Mine", policy.snapshot())
    assert type(again) is type(policy) is type(load_policy(f"{file}:Mine"))  # the file ran once
    assert again.snapshot() == policy.snapshot()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{file}:None", "AttributeError"),
        ("{file}:Half", "has no tool_returned, bucket_overrun, finished, forget, instance_gone"),
        ("{file}:Bad", "RuntimeError: not today"),
        ("/nowhere/mine.py:Mine", "there is no file /nowhere/mine.py; give path.py:Class"),
        ("mine", "choose one of"),
    ],
)
def test_what_is_no_policy_is_refused(file: str, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"policy is ") as error:
        load_policy(name.format(file=file))
    assert says in str(error.value)


def test_a_class_of_its_own_has_its_own_rule_for_prefixes(file: str) -> None:
    with pytest.raises(ValueError, match="leave sticky true"):
        load_policy(f"{file}:Mine", sticky=False)


def test_a_snapshot_of_another_policy_is_refused(file: str) -> None:
    for snapshot in ({}, {"policy": "cmlfq", "format": 2}):
        with pytest.raises(ValueError, match="snapshot is of policy"):
            restore_policy(f"{file}:Mine", snapshot)
