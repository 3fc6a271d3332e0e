"""The published rule, as a table of decisions and as properties of every decision."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, OK, Event, decisions, events

from libra.route.policy import InstanceView, Placement, ToolReturn, TurnRequest, View
from libra.route.published import PublishedCMLFQ
from libra.trajectory import Trajectory, Turn

FAIL = ToolReturn("search", "error", 5)


def done(*after_returns: int, prompt_id: str = "p", prompt_tokens: int = 10, by: ToolReturn = OK) -> list[Trajectory]:
    """Finished trajectories with one tool return, each with so many tokens after it and 15 before and in it."""
    return [
        Trajectory(
            id=f"done-{number}",
            prompt_id=prompt_id,
            task="task",
            prompt_tokens=prompt_tokens,
            turns=(Turn(10, by.tool, by.status, by.returned_tokens), Turn(after, None, None, 0)),
            reward=None,
            policy_version=0,
            finished=True,
        )
        for number, after in enumerate(after_returns)
    ]


A0 = InstanceView("a0", bucket=0, capacity_tokens=100, load_tokens=50)
B0 = InstanceView("b0", bucket=0, capacity_tokens=100, load_tokens=20)
C1 = InstanceView("c1", bucket=1, capacity_tokens=1_000, load_tokens=90)
D1 = InstanceView("d1", bucket=1, capacity_tokens=1_000, load_tokens=70)
E2 = InstanceView("e2", bucket=2, capacity_tokens=9_000, load_tokens=10)
EVERY = (A0, B0, C1, D1, E2)


def view(*instances: InstanceView, turn_tokens: int = 10) -> View:
    return View(instances, LIMITS, turn_tokens)


@dataclass(frozen=True)
class FirstTurn:
    name: str
    instances: tuple[InstanceView, ...]
    context: int
    wanted: Placement | None


FIRST_TURNS = [
    FirstTurn(
        "least loaded of the shortest bucket", EVERY, 10, Placement("b0", 0, False, "starts in the shortest bucket")
    ),
    FirstTurn("just fits", EVERY, 90, Placement("b0", 0, False, "starts in the shortest bucket")),
    FirstTurn(
        "no room for the turn",
        EVERY,
        91,
        Placement("d1", 1, False, "starts in the shortest bucket; context 91 exceeds bucket 0"),
    ),
    FirstTurn(
        "empty buckets are skipped",
        (E2,),
        10,
        Placement("e2", 2, False, "starts in the shortest bucket; bucket 0 has no instance"),
    ),
    FirstTurn(
        "equal loads go by id",
        (A0, InstanceView("A", 0, 100, 50)),
        10,
        Placement("A", 0, False, "starts in the shortest bucket"),
    ),
    FirstTurn("no instance at all", (), 10, None),
    FirstTurn("none is large enough", EVERY, 8_991, None),
]


@pytest.mark.parametrize("case", FIRST_TURNS, ids=lambda case: case.name)
def test_first_turn(case: FirstTurn) -> None:
    assert PublishedCMLFQ().place(TurnRequest("t", "p", 10, case.context), view(*case.instances)) == case.wanted


@dataclass(frozen=True)
class AfterReturn:
    """A trajectory of prompt `p` had its first turn on `first`; then `returned` came, at `context`."""

    name: str
    history: list[Trajectory]
    wanted: Placement | None
    first: InstanceView = A0
    returned: ToolReturn = OK
    context: int = 25
    instances: tuple[InstanceView, ...] = EVERY


AFTER_RETURNS = [
    AfterReturn("nothing finished yet", [], Placement("a0", 0, False, "no evidence")),
    AfterReturn(
        "both fit the own bucket",
        done(40, 60),
        Placement("a0", 0, False, "mean 50 and P90 60 remaining both fit bucket 0"),
    ),
    AfterReturn(
        "both name the next bucket",
        done(400, 600),
        Placement("d1", 1, True, "mean 500 and P90 600 remaining both fit bucket 1"),
    ),
    AfterReturn(
        "both name the last bucket",
        done(5_000, 50_000),
        Placement("e2", 2, True, "mean 27500 and P90 50000 remaining both fit bucket 2"),
    ),
    AfterReturn(
        "both name a shorter bucket",
        done(20, 30),
        Placement("b0", 0, True, "mean 25 and P90 30 remaining both fit bucket 0"),
        first=C1,
    ),
    AfterReturn(
        "mean and P90 disagree",
        done(10, 150),
        Placement("a0", 0, False, "mean 80 remaining fits bucket 0, P90 150 fits bucket 1"),
    ),
    AfterReturn(
        "mean and P90 name two different other buckets",
        done(10, 1_500),
        Placement("a0", 0, False, "mean 755 remaining fits bucket 1, P90 1500 fits bucket 2"),
    ),
    AfterReturn(
        "the mean prompt counts against the limit: 90 + 10 is 100",
        done(90),
        Placement("a0", 0, False, "mean 90 and P90 90 remaining both fit bucket 0"),
    ),
    AfterReturn(
        "the mean prompt counts against the limit: 91 + 10 is more",
        done(91),
        Placement("d1", 1, True, "mean 91 and P90 91 remaining both fit bucket 1"),
    ),
    AfterReturn(
        "prompts of every task count in the mean: 85 + (10 + 30) / 2 is more than 100",
        done(85) + done(5, prompt_id="q", prompt_tokens=30),
        Placement("d1", 1, True, "mean 85 and P90 85 remaining both fit bucket 1"),
    ),
    AfterReturn(
        "an unseen return falls back to the start of the prompt, 15 tokens earlier",
        done(400, 600),
        Placement("d1", 1, True, "mean 515 and P90 615 remaining both fit bucket 1"),
        returned=FAIL,
    ),
    AfterReturn(
        "an unseen prompt falls back to all prompts",
        done(400, 600, prompt_id="q"),
        Placement("d1", 1, True, "mean 515 and P90 615 remaining both fit bucket 1"),
    ),
    AfterReturn(
        "status tells returns apart",
        done(40) + done(500, by=FAIL),
        Placement("d1", 1, True, "mean 500 and P90 500 remaining both fit bucket 1"),
        returned=FAIL,
    ),
    AfterReturn(
        "context outgrew the own bucket",
        done(5),
        Placement("d1", 1, True, "mean 5 and P90 5 remaining both fit bucket 0; context 97 exceeds bucket 0"),
        context=97,
    ),
    AfterReturn(
        "a long context stays where it is though little remains",
        done(5),
        Placement("c1", 1, False, "mean 5 and P90 5 remaining both fit bucket 0; context 97 exceeds bucket 0"),
        first=C1,
        context=97,
    ),
    AfterReturn(
        "the wanted bucket is empty, a larger one is not",
        done(500),
        Placement("e2", 2, True, "mean 500 and P90 500 remaining both fit bucket 1; bucket 1 has no instance"),
        instances=(A0, B0, E2),
    ),
    AfterReturn(
        "only shorter buckets are left: the nearest",
        done(5_000),
        Placement("d1", 1, True, "mean 5000 and P90 5000 remaining both fit bucket 2; bucket 2 has no instance"),
        instances=(A0, B0, C1, D1),
    ),
    AfterReturn("nothing can hold it", done(5), None, context=8_995),
    AfterReturn("nothing is healthy", done(5), None, instances=()),
]


@pytest.mark.parametrize("case", AFTER_RETURNS, ids=lambda case: case.name)
def test_after_a_return(case: AfterReturn) -> None:
    policy = PublishedCMLFQ()
    for trajectory in case.history:
        policy.finished(trajectory)
    policy.place(TurnRequest("t", "p", 10, 10), view(case.first))
    assert (
        policy.tool_returned(TurnRequest("t", "p", 10, case.context), case.returned, view(*case.instances))
        == case.wanted
    )


def test_longer_sequences_are_looked_up_in_order() -> None:
    policy = PublishedCMLFQ()
    turns = (Turn(10, "search", "ok", 5), Turn(10, "search", "error", 5), Turn(500, None, None, 0))
    policy.finished(Trajectory("done", "p", "task", 10, turns, None, 0, finished=True))
    policy.place(TurnRequest("t", "p", 10, 10), view(*EVERY))
    policy.tool_returned(TurnRequest("t", "p", 10, 25), OK, view(*EVERY))
    second = policy.tool_returned(TurnRequest("t", "p", 10, 40), FAIL, view(*EVERY))
    assert second == Placement("d1", 1, False, "mean 500 and P90 500 remaining both fit bucket 1")


def test_a_trajectory_whose_instance_went_away_keeps_its_bucket() -> None:
    policy = PublishedCMLFQ()
    request = TurnRequest("t", "p", 10, 10)
    policy.place(request, view(C1))
    policy.instance_gone("c1")
    assert policy.place(request, view(A0, D1, E2)) == Placement("d1", 1, True, "keeps bucket 1")


def test_a_tool_return_that_found_no_room_is_asked_again_with_place() -> None:
    policy = PublishedCMLFQ()
    for trajectory in done(500):
        policy.finished(trajectory)
    request = TurnRequest("t", "p", 10, 25)
    policy.place(request, view(A0))
    assert policy.tool_returned(request, OK, view()) is None
    assert policy.place(request, view()) is None
    assert policy.place(request, view(*EVERY)) == Placement("d1", 1, True, "keeps bucket 1")


def test_a_plan_with_fewer_buckets_is_followed() -> None:
    policy = PublishedCMLFQ()
    request = TurnRequest("t", "p", 10, 10)
    policy.place(request, view(E2))
    smaller = View((InstanceView("a", 0, 100, 0), InstanceView("b", 1, 9_000, 0)), (100, 9_000), 10)
    assert policy.place(request, smaller) == Placement("b", 1, True, "keeps bucket 1")
    policy.place(TurnRequest("u", "p", 10, 10), view(E2))
    assert policy.tool_returned(TurnRequest("u", "p", 10, 10), OK, smaller) == Placement("b", 1, True, "no evidence")


# Every decision, over random sessions.


@given(st.lists(events, max_size=25))
def test_every_placement_follows_the_prefix_in_its_bucket(session: list[Event]) -> None:
    for it in decisions(PublishedCMLFQ(), session):
        bucket = {id: each for id, each in it.fit.items() if each.bucket == it.placement.bucket}
        least = min(bucket, key=lambda id: (bucket[id].load_tokens, id))
        assert it.placement.instance == (it.prefix_at if it.prefix_at in bucket else least)
