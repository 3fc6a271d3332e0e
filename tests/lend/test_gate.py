"""The gate, and the two claims of its bound against an adversary.

The adversary chooses when requests come and how long they are, how long every serving step takes (up to C) and how much
of every grant is used (up to all of it), and lets one more grant slip in that was given as a request came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.lend.gate import IDLE, Gate, Grant, Refusal, ServingView, Slo, due, ttft_bound


@dataclass
class Asked:
    """A request of the adversary. Times are whole milliseconds, so that comparisons are exact."""

    arrival: int
    prompt: int
    output: int
    left: int = 0  # prompt tokens still to be computed
    queued: int = 0  # prompt tokens waiting as it came, its own included
    tokens: tuple[int, ...] = ()  # when each was there


@dataclass(frozen=True)
class Fixed:
    """Serving costs that do not depend on the view."""

    step: float

    def longest_step(self, view: ServingView) -> float:
        return self.step

    def catch_up(self, view: ServingView) -> float:
        return self.step * (1 + view.queued)


@dataclass(frozen=True)
class Device:
    longest: int  # B
    step: int  # C
    pace: int  # tau
    budget: int  # P


def serve(device: Device, asked: list[Asked], spent: st.DataObject, *, lend: bool = True) -> None:
    """Plays one device until all requests are done: steps of the serving engine, grants between them.

    Prompts are computed first come, first served, with what decoding leaves of the token budget."""
    gate = Gate(float(device.longest), 1.0)
    to_come, live, now = sorted(asked, key=lambda it: it.arrival), [], 0

    def take_in() -> None:
        while to_come and to_come[0].arrival <= now:
            request = to_come.pop(0)
            live.append(request)
            request.left = request.prompt
            request.queued = sum(it.left for it in live)

    def view() -> ServingView:
        begun = [it for it in live if it.tokens]
        first_due = min((due(it.tokens[0], len(it.tokens), device.pace) for it in begun), default=math.inf)
        return ServingView(len(live), len(live) - len(begun), first_due)

    while to_come or live:
        take_in()
        answer = gate.decide(view(), now, Fixed(device.step)) if lend else Refusal("load")
        if isinstance(answer, Grant):
            assert answer.length <= device.longest and answer.expires == now + answer.length
            now += spent.draw(st.integers(1, int(answer.length)))
            take_in()
        if not live:
            now = max(now, to_come[0].arrival) if to_come else now
            continue
        decoding = [it for it in live if it.tokens]
        room = device.budget - len(decoding)
        done = []
        for request in live:
            if request.tokens:
                done.append(request)
            else:
                part = min(room, request.left)
                room, request.left = room - part, request.left - part
                if not request.left:
                    done.append(request)
        now += spent.draw(st.integers(1, device.step))
        for request in done:
            request.tokens += (now,)
            if len(request.tokens) == request.output:
                live.remove(request)


@st.composite
def devices(draw: st.DrawFn) -> Device:
    step = draw(st.integers(1, 40))
    return Device(draw(st.integers(1, 60)), step, draw(st.integers(step, 4 * step)), draw(st.integers(12, 40)))


TRAFFIC = st.lists(
    st.builds(Asked, st.integers(0, 400), st.integers(1, 120), st.integers(1, 12)), min_size=1, max_size=10
)


@settings(max_examples=400, deadline=None)
@given(device=devices(), asked=TRAFFIC, spent=st.data())
def test_no_later_token_is_late_and_the_first_is_within_its_bound(
    device: Device, asked: list[Asked], spent: st.DataObject
) -> None:
    serve(device, asked, spent)
    for request in asked:
        for number, at in enumerate(request.tokens):
            assert at <= due(request.tokens[0], number, device.pace)
        waited = request.tokens[0] - request.arrival
        assert waited <= ttft_bound(device.longest, device.step, request.queued, device.budget - len(asked))


@pytest.mark.parametrize(
    ("view", "now", "answer"),
    [
        (IDLE, 5.0, Grant(5.03, 0.03)),
        (ServingView(2, 1, 9.0), 5.0, Refusal("first token")),
        (ServingView(2, 0, 5.06), 5.0, Grant(5.01, 0.01)),  # a step of 50 ms fits after 10 ms
        (ServingView(2, 0, 5.054), 5.0, Refusal("due")),  # 4 ms are too short for a rollout step
        (ServingView(2, 0, 4.0), 5.0, Refusal("due")),
    ],
)
def test_what_is_granted(view: ServingView, now: float, answer: Grant | Refusal) -> None:
    given = Gate(0.03, 0.005).decide(view, now, Fixed(0.05))
    assert type(given) is type(answer)
    if isinstance(answer, Grant):
        assert isinstance(given, Grant)
        assert (given.expires, given.length) == pytest.approx((answer.expires, answer.length))
    else:
        assert given == answer


def test_nothing_is_granted_beside_users_while_a_step_may_take_longer_than_the_pace() -> None:
    due_late = ServingView(2, 0, 100.0)
    assert isinstance(Gate(0.03, 0.005, 0.05).decide(due_late, 5.0, Fixed(0.05)), Grant)
    assert Gate(0.03, 0.005, 0.04).decide(due_late, 5.0, Fixed(0.05)) == Refusal("due")
    assert isinstance(Gate(0.03, 0.005, 0.04).decide(IDLE, 5.0, Fixed(0.05)), Grant)  # nobody would be late


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Slo(0.0, 0.1), "ttft is 0 s"),
        (lambda: Slo(0.5, math.inf), "tpot is inf s"),
        (lambda: Slo(0.5, 0.1).pace(1.2), "use is 1.2"),
        (lambda: Slo(0.5, 0.1).pace(0.0), "use is 0"),
        (lambda: Gate(0.01, 0.02), "the shortest grant is 0.02, the longest 0.01"),
        (lambda: ServingView(1, 2, 0.0), "2 of 1 requests wait"),
        (lambda: ttft_bound(0.1, 0.1, 5, 0), "room for 0 prompt tokens"),
    ],
)
def test_what_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
