"""Policies of the user's own, as path.py:Class."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from libra.route.custom import PolicyError, load_policy, restore_policy
from libra.route.policy import InstanceView, TurnRequest, View
from libra.trajectory import Trajectory, Turn

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
    assert again.snapshot() == policy.snapshot()
    assert deepcopy(again).snapshot() == policy.snapshot()


FAILING = r"""
from libra.route.baselines import LeastLoaded

class Raises(LeastLoaded):
    NAME = "raises"
    def place(self, request, fleet):
        raise KeyError("gone")
    def finished(self, trajectory):
        raise ValueError("two\nlines")

class Says(LeastLoaded):
    NAME = "says"
    def place(self, request, fleet):
        return "a100-77"
"""


def test_a_policy_without_a_snapshot_has_none(file: str) -> None:
    """The gateway asks before it starts whether its state can be kept."""
    path = Path(file)
    path.write_text(MINE + "\n\nclass Bare(Mine):\n    snapshot = None\n", encoding="utf-8")
    assert getattr(load_policy(f"{path}:Bare"), "snapshot", None) is None


def test_a_failure_names_policy_method_and_error(tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text(FAILING, encoding="utf-8")
    turn = TurnRequest("t", "p", 10, 10)
    raises = load_policy(f"{path}:Raises")
    with pytest.raises(PolicyError, match=rf"^policy {path}:Raises: place raised KeyError: 'gone'$"):
        raises.place(turn, FLEET)
    with pytest.raises(PolicyError, match=r"finished raised ValueError: two lines$"):
        raises.finished(Trajectory("t", "p", None, 10, (Turn(1, None, None, 0),), None, 0, True))
    with pytest.raises(PolicyError, match="place returned 'a100-77'; return a Placement, or None"):
        load_policy(f"{path}:Says").place(turn, FLEET)


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
