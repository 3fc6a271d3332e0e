"""Random sessions with a policy: what a caller may do, in any order it may do it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from libra.route.policy import Instance, InstanceView, Placement, Policy, ToolReturn, TurnRequest, View
from libra.trajectory import ToolStatus, Trajectory, Turn

OK = ToolReturn("search", "ok", 5)
LIMITS = (100, 1_000, 9_000)
STATUSES: list[ToolStatus] = ["ok", "error", "timeout", "unknown"]
tool_returns = st.builds(
    ToolReturn, st.sampled_from(["search", "code"]), st.sampled_from(STATUSES), st.sampled_from([0, 600, 6_000])
)
finished = st.builds(
    lambda id, prompt_id, prompt_tokens, returns, generated: Trajectory(
        id,
        prompt_id,
        "task",
        prompt_tokens,
        (*(Turn(generated, r.tool, r.status, r.returned_tokens) for r in returns), Turn(generated, None, None, 0)),
        None,
        0,
        finished=True,
    ),
    st.sampled_from("tuv"),
    st.sampled_from("pq"),
    st.integers(0, 100),
    st.lists(tool_returns, max_size=3),
    st.integers(0, 900),
)
instances = st.builds(
    InstanceView,
    st.sampled_from("abcdefg"),
    st.integers(0, 2),
    st.sampled_from([50, 100, 1_000, 9_000]),
    st.integers(0, 3),
)
views = st.builds(
    View,
    st.lists(instances, max_size=6, unique_by=lambda instance: instance.id).map(tuple),
    st.just(LIMITS),
    st.integers(0, 60),
)
requests = st.builds(
    TurnRequest, st.sampled_from("tuv"), st.sampled_from("pqr"), st.integers(0, 100), st.sampled_from([0, 40, 90, 950])
)
Event = Trajectory | str | tuple[TurnRequest, ToolReturn | None, View]
events: st.SearchStrategy[Event] = st.one_of(
    finished, st.sampled_from("abcdefg"), st.tuples(requests, st.none() | tool_returns, views)
)


def tell(policy: Policy, event: Event) -> Placement | None:
    if isinstance(event, Trajectory):
        policy.finished(event)
        return None
    if isinstance(event, str):
        policy.instance_gone(event)
        return None
    request, returned, now = event
    known = {entry[0] for entry in policy.snapshot()["live"]}
    if returned is None or request.trajectory_id not in known:
        return policy.place(request, now)
    return policy.tool_returned(request, returned, now)


Step = Event | tuple[TurnRequest, int, View]  # the latter: the turn has generated so many tokens
outlives = st.tuples(requests, st.integers(1, 2_000), views)
steps: st.SearchStrategy[Step] = st.one_of(events, outlives)


def follow(policy: Policy, step: Step) -> Placement | None:
    if isinstance(step, tuple) and isinstance(step[1], int):
        known = {entry[0] for entry in policy.snapshot()["live"]}
        return policy.bucket_overrun(step[0], step[1], step[2]) if step[0].trajectory_id in known else None
    return tell(policy, step)  # type: ignore[arg-type]


class Decision(NamedTuple):
    """A placement, with what it was asked about."""

    request: TurnRequest
    generated: int
    attained: int  # the longest context that the trajectory has had since it was placed
    now: View
    fit: dict[str, Instance]  # instances that hold the turn
    prefix_at: str | None  # the latest turn went there, and that instance has not gone since
    placement: Placement


def decisions(policy: Policy, session: Iterable[Step]) -> Iterator[Decision]:
    """Every placement of a session, each of which is eligible and told truly; where there is none, nothing fits."""
    served: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    longest: dict[str, int] = {}
    for step in session:
        placement = follow(policy, step)
        if isinstance(step, Trajectory):
            for of_live in (served, prefixes, longest):
                of_live.pop(step.id, None)  # type: ignore[attr-defined]
        elif isinstance(step, str):
            prefixes = {trajectory: instance for trajectory, instance in prefixes.items() if instance != step}
        else:
            request, asked, now = step
            generated = asked if isinstance(asked, int) else 0
            id, attained = request.trajectory_id, request.context_tokens + generated
            if generated == 0 or id in longest:
                longest[id] = max(longest.get(id, 0), attained)
            needed = max(request.context_tokens + now.turn_tokens, attained + (generated > 0))
            fit: dict[str, Instance] = {it.id: it for it in now.instances if needed <= it.capacity_tokens}
            if placement is None:
                assert generated or not fit
                continue
            assert placement.bucket == fit[placement.instance].bucket
            assert placement.migrated == (served.get(id, placement.instance) != placement.instance)
            yield Decision(request, generated, longest[id], now, fit, prefixes.get(id), placement)
            served[id] = prefixes[id] = placement.instance
