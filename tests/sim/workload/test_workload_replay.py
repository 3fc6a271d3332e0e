"""Trajectories run again on engines that answer after given times: what is asked, when, and with which tokens known."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.route import policy
from libra.sim.clock import TICKS
from libra.sim.engine.request import Request
from libra.sim.workload.caller import Call, Caller, calls
from libra.sim.workload.distributions import Arrivals, Poisson, Ticks
from libra.sim.workload.replay import Kept, Replay, draw
from libra.sim.workload.requests import Workload
from libra.trajectory import Trajectory, Turn, read_trajectories

DATA = Path(__file__).parents[4] / "shared" / "data" / "trajectories"


def made(
    id_: str, turns: list[Turn], prompt_id: str | None = None, prompt_tokens: int = 10, finished: bool = False
) -> Trajectory:
    return Trajectory(id_, prompt_id or id_, "t", prompt_tokens, tuple(turns), None, 0, finished)


def called(
    generated: int, returned: int = 0, seconds: float | None = 1.0, context: int | None = None, tool: str = "shell"
) -> Turn:
    return Turn(generated, tool, "ok", returned, seconds, context)


def last(generated: int) -> Turn:
    return Turn(generated, None, None, 0)


def run(
    workload: Workload, service: Callable[[Request], int], fails: Callable[[Request], bool] = lambda _: False
) -> list[Request]:
    """All requests in the order of their ends, each of them served from its arrival on for `service` ticks."""
    order = count()
    ends = [(r.arrival + service(r), next(order), r) for r in workload.start()]
    heapq.heapify(ends)
    ended = []
    while ends:
        now, _, request = heapq.heappop(ends)
        request.finish = now
        request.status = "refused" if fails(request) else "finished"
        request.reason = "too long" if fails(request) else None
        ended.append(request)
        following = workload.finished(request, now)
        if following is not None:
            assert following.arrival >= now
            heapq.heappush(ends, (following.arrival + service(following), next(order), following))
    return ended


class EachSecond(Arrivals):
    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        yield np.arange(count) * TICKS

    def describe(self) -> dict[str, Any]:
        return {}


def owner(request: Request) -> Caller:
    assert isinstance(request.owner, Caller)
    return request.owner


def turn_of(request: Request) -> tuple[str, int]:
    return owner(request).trajectory.id, owner(request).call.turn


def token(request: Request, position: int) -> Hashable:
    chain = request.chain
    assert chain is not None
    while chain.parent is not None and position < chain.fork:
        chain = chain.parent
    return id(chain), position


def common(one: list[Hashable], other: list[Hashable]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def contexts_in_tokens(trajectory: Trajectory, keeps: Kept, fresh: count[int]) -> list[list[Hashable]]:
    """The context of each call, with every token named: what `Replay` says with chains, done by hand."""
    prompt: list[Hashable] = [(trajectory.prompt_id, n) for n in range(trajectory.prompt_tokens)]
    tokens, contexts, before = list(prompt), [], None
    rewritten = False
    for turn in trajectory.turns:
        context = len(tokens) if turn.context_tokens is None else turn.context_tokens
        rewritten = rewritten or context != len(tokens)
        if rewritten:
            if turn.generated_tokens and keeps == "last prompt" and before is not None and context >= len(before):
                kept = list(before)
            else:
                kept = list(prompt) if context >= len(prompt) else []
            tokens = kept + [next(fresh) for _ in range(context - len(kept))]
        if turn.generated_tokens:
            contexts.append(list(tokens))
            before, rewritten = list(tokens), False
        tokens = tokens + [next(fresh) for _ in range(turn.generated_tokens + turn.returned_tokens)]
    return contexts


few = st.integers(min_value=0, max_value=6)
turns = st.builds(
    Turn,
    few,
    st.just("shell"),
    st.just("ok"),
    few,
    st.none() | st.sampled_from([0.0, 0.5, 2.0]),
    st.none() | st.integers(min_value=1, max_value=20),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Trajectory]:
    return [
        made(str(n), draw(st.lists(turns, max_size=5)), draw(st.sampled_from("pq")), draw(st.integers(1, 6)))
        for n in range(draw(st.integers(1, 5)))
    ]


@settings(deadline=None)
@given(logs(), st.sampled_from(["prompt", "last prompt"]), st.none() | st.integers(1, 3), st.booleans())
def test_requests_share_the_tokens_that_their_contexts_share(
    log: list[Trajectory], keeps: Kept, concurrency: int | None, shared: bool
) -> None:
    replay = Replay(log, rewrite_keeps=keeps, concurrency=concurrency, share_prompts=shared)
    requests = sorted(run(replay, lambda _: TICKS), key=lambda r: r.number)
    fresh = count()
    wanted = [(t.id, context) for t in log for context in contexts_in_tokens(t, keeps, fresh)]
    assert [(owner(r).trajectory.id, r.prompt_tokens) for r in requests] == [(t, len(c)) for t, c in wanted]
    known: list[list[Hashable]] = [[token(r, n) for n in range(r.prompt_tokens)] for r in requests]
    for (one, (id_one, context)), (other, (id_other, its)) in combinations(zip(known, wanted, strict=True), 2):
        assert common(one, other) == (common(context, its) if shared or id_one == id_other else 0)


@settings(deadline=None)
@given(logs(), st.none() | st.integers(1, 3), st.lists(st.integers(1, 3 * TICKS), min_size=30, max_size=30))
def test_every_turn_that_generates_is_asked_once_after_its_tools(
    log: list[Trajectory], concurrency: int | None, service: list[int]
) -> None:
    asking = [t for t in log if t.generated_tokens]
    replay = Replay(log, arrivals=EachSecond(), concurrency=concurrency, seed=1)
    ended = run(replay, lambda r: service[r.number])
    assert sorted(r.number for r in ended) == list(range(replay.requests))
    assert replay.requests == sum(turn.generated_tokens > 0 for t in log for turn in t.turns)
    assert (replay.completed, replay.silent, replay.unfinished) == (len(asking), len(log) - len(asking), {})
    spans = []
    for n, trajectory in enumerate(asking):
        own = sorted((r for r in ended if owner(r).trajectory is trajectory), key=lambda r: r.number)
        made_calls = calls(trajectory)
        assert [r.output_tokens for r in own] == [c.output_tokens for c in made_calls]
        assert [owner(r).last for r in own] == [False] * (len(own) - 1) + [True]
        ends = [r.finish or 0 for r in own]
        assert [r.arrival for r in own[1:]] == [end + c.delay for end, c in zip(ends, made_calls[1:], strict=False)]
        start = own[0].arrival - made_calls[0].delay
        assert start >= n * TICKS
        spans.append((start, ends[-1]))
    for start, _ in spans:
        assert concurrency is None or sum(s <= start < end for s, end in spans) <= concurrency
    if concurrency is None:
        assert [start for start, _ in spans] == [n * TICKS for n in range(len(asking))]


def test_a_slot_is_taken_as_soon_as_it_is_free() -> None:
    log = [made(name, [called(5), last(5)], finished=True) for name in "abcd"]
    ended = run(Replay(log, concurrency=2), lambda r: (1 + r.number % 4) * TICKS)
    assert [(*turn_of(r), r.arrival // TICKS, (r.finish or 0) // TICKS) for r in ended] == [
        ("a", 0, 0, 1),
        ("b", 0, 0, 3),
        ("a", 1, 2, 4),
        ("c", 0, 4, 5),
        ("b", 1, 4, 8),
        ("c", 1, 6, 8),
        ("d", 0, 8, 11),
        ("d", 1, 12, 16),
    ]


CALLS: list[tuple[str, Trajectory, list[Call]]] = [
    (
        "each turn after the one before and its tool",
        made("a", [called(5, 3, 2.0), last(4)], finished=True),
        [Call(0, 10, 5, 0, False), Call(1, 18, 4, 2 * TICKS, False)],
    ),
    (
        "an unrecorded duration is the default, no tool takes none",
        made("a", [called(5, 3, None), Turn(1, None, None, 2), last(4)], finished=True),
        [Call(0, 10, 5, 0, False), Call(1, 18, 1, 7 * TICKS, False), Call(2, 21, 4, 0, False)],
    ),
    (
        "turns that generate nothing spend their time and return their tokens",
        made("a", [called(0, 3, 2.0), called(5, 1, 1.0), called(0, 7, 0.5), last(4), last(0)], finished=True),
        [Call(1, 13, 5, 2 * TICKS, False), Call(3, 26, 4, TICKS * 3 // 2, False)],
    ),
    (
        "a context that shrank, one that grew, and one as it was to be",
        made("a", [called(5, 3), called(1, 1, context=12), called(1, 1, context=15), called(1, 1, context=17)]),
        [
            Call(0, 10, 5, 0, False),
            Call(1, 12, 1, TICKS, True),
            Call(2, 15, 1, TICKS, True),
            Call(3, 17, 1, TICKS, False),
        ],
    ),
    (
        "a rewriting during a turn that generates nothing",
        made("a", [called(5, 3), called(0, 2, context=12), called(1, 1)]),
        [Call(0, 10, 5, 0, False), Call(2, 14, 1, 2 * TICKS, True)],
    ),
    ("nothing generated", made("a", [called(0, 3)]), []),
    ("no turns", made("a", []), []),
    (
        "no prompt, but a tool return",
        made("a", [called(0, 3), called(1)], prompt_tokens=0),
        [Call(1, 3, 1, TICKS, False)],
    ),
]


@pytest.mark.parametrize(("trajectory", "wanted"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
def test_the_calls_of_a_trajectory(trajectory: Trajectory, wanted: list[Call]) -> None:
    assert list(calls(trajectory, unknown_tool_seconds=7.0)) == wanted


def test_a_refused_turn_ends_its_trajectory_and_lets_the_next_one_start() -> None:
    log = [made(name, [called(5), called(5), last(5)], finished=True) for name in "abc"]
    replay = Replay(log, concurrency=1)
    ended = run(replay, lambda _: TICKS, fails=lambda r: owner(r).trajectory.id == "b" and owner(r).call.turn == 1)
    assert [turn_of(r) for r in ended] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("c", 2),
    ]  # fmt: skip
    assert (replay.completed, replay.unfinished) == (2, {"b": "too long"})
    assert ended[5].arrival == ended[4].finish


def test_a_cancelled_turn_without_a_reason_is_cancelled() -> None:
    replay = Replay([made("a", [called(5), last(5)], finished=True)])
    (request,) = replay.start()
    request.status = "cancelled"
    assert replay.finished(request, 5) is None
    assert replay.unfinished == {"a": "cancelled"}


def test_a_second_start_says_the_same_and_knows_nothing_of_the_first() -> None:
    log = [made(str(n), [called(5, 1), last(5)], "p", finished=True) for n in range(20)]
    replay = Replay(log, arrivals=Poisson(1.0), seed=3, concurrency=4)

    def told() -> list[tuple[int, int, int]]:
        return [(r.number, r.arrival, r.prompt_tokens) for r in run(replay, lambda _: TICKS)]

    first = told()
    list(replay.start())
    assert told() == first
    assert replay.completed == 20


def test_copies_start_together_and_share_the_prompt_only() -> None:
    replay = Replay(
        [made("a", [last(5)], finished=True), made("b", [last(5)])], samples_per_prompt=3, arrivals=EachSecond()
    )
    requests = list(replay.start())
    assert [(owner(r).trajectory.id, r.arrival // TICKS) for r in requests] == [
        ("a/0", 0), ("a/1", 0), ("a/2", 0), ("b/0", 1), ("b/1", 1), ("b/2", 1),
    ]  # fmt: skip
    chains = [r.chain for r in requests if r.chain is not None]
    assert len(set(chains)) == 6
    assert [(c.parent.name, c.fork) for c in chains if c.parent is not None] == [("a", 10)] * 3 + [("b", 10)] * 3
    assert len({id(c.parent) for c in chains}) == 2
    assert (replay.requests, replay.describe()["trajectories"]) == (6, 6)


def test_start_is_in_the_order_of_arrival_when_tools_come_first() -> None:
    log = [made("a", [called(0, 3, 5.0), last(1)], finished=True), made("b", [last(1)]), made("c", [last(1)])]
    assert [(r.number, r.arrival) for r in Replay(log).start()] == [(1, 0), (2, 0), (0, 5 * TICKS)]


def test_a_caller_says_what_a_router_may_know() -> None:
    log = [made("a", [called(0, 1, tool="ls"), called(5, 3), called(0, 2, tool="cat"), last(1)], "p", finished=True)]
    first, second = run(Replay(log), lambda _: TICKS)
    assert owner(first).routing_request() == policy.TurnRequest("a", "p", 10, 11, "t")
    assert owner(first).returned() is None
    assert owner(second).routing_request() == policy.TurnRequest("a", "p", 10, 21, "t")
    assert [owner(second).returned() for _ in range(2)] == [policy.ToolReturn("cat", "ok", 2), None]  # told once
    assert (owner(first).call.turn, owner(second).call.turn) == (1, 3)
    assert (owner(first).last, owner(second).last) == (False, True)


def test_no_tool_between_two_turns_is_no_tool_return() -> None:
    _, second = run(Replay([made("a", [last(5), last(5)], finished=True)]), lambda _: TICKS)
    assert owner(second).returned() is None


REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("id twice", lambda: Replay([made("a", [last(1)])] * 2), "'a' is given twice"),
    (
        "empty context",
        lambda: Replay([made("a", [last(1)], prompt_tokens=0)]),
        "'a': turns.0: its context has no token",
    ),
    (
        "a tool beyond all time",
        lambda: Replay([made("a", [Turn(5, "cat", "ok", 2, 1e9), last(1)])]),
        r"trajectory 'a': turns.0.tool_seconds: 1e\+09 seconds is longer than 106 days",
    ),
    ("no slot", lambda: Replay([], concurrency=0), "concurrency is 0"),
    ("no sample", lambda: Replay([], samples_per_prompt=0), "samples_per_prompt is 0"),
    (
        "copies of samples",
        lambda: Replay([made("a", [], "p"), made("b", [], "p")], samples_per_prompt=2),
        "several samples of prompt 'p'",
    ),
    ("unknown rule", lambda: Replay([], rewrite_keeps="all"), "rewrite_keeps is 'all'"),  # type: ignore[arg-type]
    ("seconds", lambda: Replay([made("a", [last(1)])], unknown_tool_seconds=-1.0), "-1.0 seconds is not a duration"),
    ("not its own", lambda: Replay([]).finished(Request(3, 0, 1, 1), 0), "request 3 belongs to no trajectory"),
]


@pytest.mark.parametrize(("refused", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_run_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()


def test_it_describes_itself_in_json() -> None:
    replay = Replay([made("a", [last(1)])], arrivals=Poisson(2.0), seed=5, source={"file": "log.jsonl"})
    described = replay.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["arrivals"] == {"distribution": "Poisson", "rate": 2.0}
    assert (described["seed"], described["source"], described["requests"]) == (5, {"file": "log.jsonl"}, 1)


# Requests, prompt tokens, generated tokens of the data sets.
LOGS = [
    ("claude_code_sessions.jsonl", 355, 23_491, 2_989_357_530, 10_384_355),
    ("tau_bench_airline.jsonl", 100, 1_163, 3_016_692, 64_856),
]


@pytest.mark.parametrize(("name", "trajectories", "requests", "prompts", "outputs"), LOGS)
def test_real_logs_are_asked_in_full(name: str, trajectories: int, requests: int, prompts: int, outputs: int) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"no {name}")
    replay = Replay(read_trajectories(DATA / name), concurrency=32)
    ended = run(replay, lambda r: r.output_tokens * TICKS // 50)
    assert replay.completed == trajectories
    assert len(ended) == replay.requests == requests
    assert sum(r.prompt_tokens for r in ended) == prompts
    assert sum(r.output_tokens for r in ended) == outputs


def numbered(size: int) -> list[Trajectory]:
    turns = (Turn(5, None, None, 0),)
    return [Trajectory(f"t{i}", f"p{i // 2}", "x", 10 + i, turns, None, 0, True) for i in range(size)]


@given(size=st.integers(1, 30), count=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_as_many_as_wanted_each_as_often_as_fair(size: int, count: int, seed: int) -> None:
    drawn = draw(numbered(size), count, seed)
    assert drawn == draw(numbered(size), count, seed)
    assert len({trajectory.id for trajectory in drawn}) == len(drawn) == count
    times = Counter(trajectory.id.partition(" ")[0] for trajectory in drawn)
    if count <= size:
        assert max(times.values()) == 1
    else:
        assert len(times) == size
        assert len({trajectory.id for trajectory in drawn[:size]} & {it.id for it in numbered(size)}) == size
    prompts = {trajectory.id: trajectory.prompt_id for trajectory in numbered(size)}
    for trajectory in drawn:
        assert trajectory.prompt_id == prompts[trajectory.id.partition(" ")[0]]


def test_prompts_of_their_own_where_samples_are_made() -> None:
    drawn = draw(numbered(1), 3, 0, same_prompts=False)
    assert [(it.id, it.prompt_id) for it in drawn] == [
        ("t0", "p0"),
        ("t0 (drawn 2)", "p0 (drawn 2)"),
        ("t0 (drawn 3)", "p0 (drawn 3)"),
    ]


def test_the_order_is_random() -> None:
    assert draw(numbered(20), 20, 0) != draw(numbered(20), 20, 1)
    assert set(draw(numbered(20), 20, 0)) == set(numbered(20))


def test_nothing_to_draw_or_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no finished trajectory to draw; give a log with at least one"):
        draw([], 1, 0)
    with pytest.raises(ValueError, match="count is 0; draw 1 trajectory or more"):
        draw(numbered(1), 0, 0)
