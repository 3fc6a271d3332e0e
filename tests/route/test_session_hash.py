"""Sessions that are hashed: shares of instances, and what moves when one goes."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from libra.route.policy import InstanceView, TurnRequest, View
from libra.route.session_hash import SessionHash

_GROUPS, _SAMPLES = 400, 8


def placed(instances: list[str]) -> dict[str, str]:
    """The instance of each trajectory, named as a run names them."""
    fleet = View(tuple(InstanceView(name, 0, 1000, 0) for name in instances), (1000,), 10)
    policy, found = SessionHash(), {}
    for name in (f"{group}/{sample}" for group in range(_GROUPS) for sample in range(_SAMPLES)):
        placement = policy.place(TurnRequest(name, "p", 10, 10), fleet)
        assert placement is not None
        found[name] = placement.instance
    return found


@pytest.mark.parametrize("names", ["rollout-{}", "{}", "http://127.0.0.1:80{:02}"])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_instances_have_equal_shares(names: str, count: int) -> None:
    """Within five standard deviations of draws."""
    found = Counter(placed([names.format(number) for number in range(count)]).values())
    expected, total = _GROUPS * _SAMPLES / count, _GROUPS * _SAMPLES
    deviation = math.sqrt(total * (1 / count) * (1 - 1 / count))
    assert len(found) == count
    assert all(abs(its - expected) < 5 * deviation for its in found.values()), found


def test_only_sessions_of_an_instance_that_goes_move() -> None:
    before, after = placed(["a", "b", "c", "d"]), placed(["a", "b", "d"])
    assert {after[name] for name, its in before.items() if its == "c"} == {"a", "b", "d"}
    assert all(after[name] == its for name, its in before.items() if its != "c")
