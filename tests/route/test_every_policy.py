"""What every policy keeps to, whatever its rule."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, OK, Step, decisions, follow, steps

from libra.route.catalogue import POLICIES, policy_named, policy_restored
from libra.route.cmlfq import CMLFQ
from libra.route.live import FORMAT
from libra.route.policy import InstanceView, Policy, TurnRequest, View
from libra.route.published import PublishedCMLFQ
from libra.route.service_cost import MigrationCost
from libra.trajectory import Trajectory, Turn

ALWAYS_STICKY = ("cmlfq-published", "cmlfq")
LEARN = ("length-by-prompt", "length-predictor", "shortest-remaining-first", *ALWAYS_STICKY)
LOOK_AGAIN = ("length-by-prompt", "length-predictor", "mlfq", "cmlfq")
MAKE: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: policy_named(name) for name in POLICIES if name not in ALWAYS_STICKY},
    **{f"{it}, not sticky": lambda it=it: policy_named(it, sticky=False) for it in POLICIES if it not in ALWAYS_STICKY},
    # With little room, so that evidence has to go.
    "cmlfq-published": lambda: PublishedCMLFQ(max_nodes=6),
    "cmlfq": lambda: CMLFQ(MigrationCost(0.5, 1e-4), half_life=3.0, max_contexts=20),
}
every_policy = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
every_name = pytest.mark.parametrize("name", POLICIES)

REQUEST = TurnRequest("t", "p", 10, 10)
A = InstanceView("a", bucket=0, capacity_tokens=110, load_tokens=50)
B = InstanceView("b", bucket=0, capacity_tokens=110, load_tokens=0)


def view(*there: InstanceView) -> View:
    return View(there, LIMITS, 10)


@every_policy
@given(session=st.lists(steps, max_size=25))
def test_every_placement_is_eligible_and_told_truly(make: Callable[[], Policy], session: list[Step]) -> None:
    assert list(decisions(make(), session)) == list(decisions(make(), session))


@every_policy
@given(before=st.lists(steps, max_size=15), after=st.lists(steps, max_size=15))
def test_a_restored_policy_decides_as_the_original(
    make: Callable[[], Policy], before: list[Step], after: list[Step]
) -> None:
    policy = make()
    for step in before:
        follow(policy, step)
    twin = type(policy).restore(json.loads(json.dumps(policy.snapshot())))
    for step in after:
        assert follow(twin, step) == follow(policy, step)
    assert json.dumps(twin.snapshot()) == json.dumps(policy.snapshot())


@every_name
@pytest.mark.parametrize("field", [{"format": FORMAT + 1}, {"policy": "another"}])
def test_a_snapshot_of_another_policy_is_refused(name: str, field: dict[str, object]) -> None:
    snapshot = policy_named(name).snapshot()
    assert snapshot["policy"] == name
    with pytest.raises(ValueError, match=f"this is '{name}' format {FORMAT}"):
        policy_restored(name, snapshot | field)


@every_name
def test_what_was_never_placed_is_refused(name: str) -> None:
    policy = policy_named(name)
    for _ in range(2):
        with pytest.raises(ValueError, match="'t' was never placed: call place"):
            policy.tool_returned(REQUEST, OK, view(A))
        if name in LOOK_AGAIN:
            with pytest.raises(ValueError, match="'t' was never placed: call place"):
                policy.bucket_overrun(REQUEST, 5, view(A))
        assert policy.place(REQUEST, view()) is None
        waited = policy.tool_returned(REQUEST, OK, view(A))  # in vain, and was placed all the same
        assert waited is not None and not waited.migrated
        policy.forget("t")
        policy.forget("t")


@every_name
def test_nothing_is_kept_of_what_is_over(name: str) -> None:
    policy = policy_named(name)
    for number in range(20):
        policy.place(TurnRequest(f"t{number}", "p", 10, 10), view(A, B))
        policy.tool_returned(TurnRequest(f"t{number}", "p", 10, 10), OK, view(A, B))
    assert [row[0] for row in policy.snapshot()["live"]] == [f"t{number}" for number in range(20)]
    for number in range(20):
        policy.forget(f"t{number}")
    fresh = policy_named(name)
    if name not in ("round-robin", "two-choices"):  # which go on where they are
        assert policy.snapshot() == fresh.snapshot()
    policy.place(TurnRequest("t", "p", 10, 10), view(A, B))
    policy.finished(Trajectory("t", "p", "task", 10, (Turn(5, None, None, 0),), None, 0, finished=True))
    assert policy.snapshot()["live"] == []
    assert name in LEARN or name == "round-robin" or name == "two-choices" or policy.snapshot() == fresh.snapshot()


@every_name
def test_a_prefix_that_is_gone_is_not_followed(name: str) -> None:
    policy = policy_named(name)
    policy.place(REQUEST, view(A))
    stays = policy.place(REQUEST, view(A))
    assert stays is not None and not stays.migrated
    policy.instance_gone("a")
    moved = policy.tool_returned(REQUEST, OK, view(B))
    assert moved is not None and (moved.instance, moved.migrated) == ("b", True)
    policy.instance_gone("b")
    again = policy.tool_returned(REQUEST, OK, view(B))  # of the same name
    assert again is not None and not again.migrated and "holds the prefix" not in again.reason


@pytest.mark.parametrize("name", LEARN)
def test_an_unfinished_trajectory_is_refused_and_leaves_no_trace(name: str) -> None:
    policy = policy_named(name)
    with pytest.raises(ValueError, match="'t' is unfinished"):
        policy.finished(Trajectory("t", "p", "task", 5, (), None, 0, finished=False))
    assert policy.snapshot() == policy_named(name).snapshot()
