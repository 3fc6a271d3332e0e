"""Attained service: at every token, a trajectory is in the bucket of what it has become."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sessions import OK

from benchmarks.workloads.routing_quality import static_fleet
from libra.route.bucket import AttainedService, bucket_of
from libra.route.policy import TurnRequest
from libra.trajectory import Trajectory, Turn

LIMITS = (10, 25, 60)
FLEET = static_fleet(LIMITS, turn_tokens=0, instances=2)


@given(st.integers(0, 15), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=4))
def test_it_is_always_where_its_attained_context_belongs(prompt: int, turns: list[tuple[int, int]]) -> None:
    # Token by token, asking when the policy wants to be asked, and never else.
    policy, context = AttainedService(), prompt
    for number, (generated, returned) in enumerate(turns):
        request = TurnRequest("t", "p", prompt, context)
        if context >= LIMITS[-1]:
            return
        placement = policy.tool_returned(request, OK, FLEET) if number else policy.place(request, FLEET)
        assert placement is not None
        bucket, ask_again = placement.bucket, placement.ask_again
        assert bucket == bucket_of(context, LIMITS)
        for token in range(1, generated + 1):
            if context + token >= LIMITS[-1]:
                return
            if token == ask_again:
                moved = policy.bucket_overrun(request, token, FLEET)
                assert moved is not None and moved.migrated
                bucket, ask_again = moved.bucket, moved.ask_again
            assert bucket == bucket_of(context + token, LIMITS)
        context += generated + returned


def test_it_learns_nothing() -> None:
    policy = AttainedService()
    for number in range(5):
        turns = (Turn(50, None, None, 0),)
        policy.finished(Trajectory(str(number), "p", "task", 5, turns, None, 0, finished=True))
    assert policy.snapshot() == AttainedService().snapshot()
