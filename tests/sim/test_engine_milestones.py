"""Milestones: an engine stops where somebody wants to be asked, and nothing else is different for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from driven_engine import Case, Served, cases, drive
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Pause
from libra.sim.engine.request import Request

CONFIG = EngineConfig(max_model_len=64, kv_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
TEN = AffineCost(10)  # ticks for any iteration


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("prompt", "outputs", "ask_at", "asked"),
    [
        (8, 5, 1, [(10, 1)]),  # the end of the prompt gives the first token
        (8, 5, 4, [(40, 4)]),
        (17, 5, 2, [(40, 2)]),  # after three chunks
        (8, 5, 5, []),  # it finishes with that token
        (8, 5, 6, []),
        (60, 9, 4, []),  # the longest context cuts it at four
        (60, 9, 3, [(100, 3)]),
    ],
)
def test_where_an_engine_asks(
    exact: bool, prompt: int, outputs: int, ask_at: int, asked: list[tuple[int, int]]
) -> None:
    engine = SimEngine(CONFIG, TEN, exact=exact)
    request = Request(0, 0, prompt, outputs, ask_at=ask_at)
    seen = []

    def look(engine: SimEngine) -> None:
        seen.extend((engine.end, it.generated) for it in engine.asked)
        assert all(it is request and it.ask_at is None for it in engine.asked)

    drive(engine, [(0, lambda engine, now: engine.submit(request, now))], look, lambda engine, now: None)
    assert seen == asked
    assert request.status == "finished"


def test_an_unasked_engine_jumps_and_an_asked_one_stops_once() -> None:
    events = []
    for ask_at in (None, 20):
        engine = SimEngine(CONFIG, TEN)
        engine.submit(Request(0, 0, 8, 40, ask_at=ask_at), 0)
        while (end := engine.plan(engine.end)) is not None:
            assert end <= 400
            engine.commit()
        events.append(engine.events)
    assert events == [2, 3]  # the prompt, and everything else


def test_asked_is_as_of_the_last_commit() -> None:
    engine = SimEngine(CONFIG, TEN)
    request = Request(0, 0, 8, 9, ask_at=2)
    engine.submit(request, 0)
    for end in (10, 20):
        assert engine.plan(end - 10) == end
        assert engine.asked == []
        engine.commit()
    asked = engine.asked
    assert asked == [request] and request.generated == 2
    assert not engine.ask(request, 3, 20)  # nothing is planned that could end sooner
    assert engine.plan(20) == 30
    assert engine.asked == []
    assert asked == [request]  # whoever has the list keeps it
    engine.commit()
    assert engine.asked == [request] and request.generated == 3


@pytest.mark.parametrize("exact", [False, True])
def test_asked_in_the_middle(exact: bool) -> None:
    """Ends move to where the token comes; those that are there already cannot be asked for."""
    request, waiting = Request(0, 0, 8, 30), Request(1, 0, 8, 30)
    engine = SimEngine(replace(CONFIG, max_num_seqs=1), TEN, exact=exact)
    asked, moved = [], []

    def late(engine: SimEngine, now: int) -> None:
        assert engine.generated_by(request, now) == 5
        with pytest.raises(ValueError, match="request 0 has generated 5 tokens: set ask_at to 6 or more, not 5"):
            engine.ask(request, 5, now)
        assert not engine.ask(waiting, 1, now)
        with pytest.raises(ValueError, match="request 1 has generated 0 tokens; ask for 1 or more"):
            engine.ask(waiting, 0, now)

    drive(
        engine,
        [
            (0, lambda engine, now: (engine.submit(request, now), engine.submit(waiting, now))),
            (55, late),
            (55, lambda engine, now: moved.append(engine.ask(request, 9, now))),
            (60, lambda engine, now: moved.append(engine.ask(request, 8, now))),
            (60, lambda engine, now: moved.append(engine.ask(request, 12, now))),
        ],
        lambda engine: asked.extend((engine.end, it.number, it.generated) for it in engine.asked),
        lambda engine, now: None,
    )
    assert asked == [(120, 0, 12), (310, 1, 1)]
    assert moved == ([False] * 3 if exact else [True, True, False])
    assert (request.finish, waiting.finish) == (300, 600)


def test_who_is_not_there_is_not_asked_about() -> None:
    engine = SimEngine(CONFIG, TEN)
    request = Request(0, 0, 8, 9)
    with pytest.raises(ValueError, match="request 0 is not on engine 0"):
        engine.ask(request, 1, 0)
    with pytest.raises(ValueError, match="request 1 has generated 0 tokens; ask for 1 or more"):
        engine.submit(Request(1, 0, 8, 9, ask_at=0), 0)
    engine.submit(request, 0)
    engine.plan(0)
    engine.cancel(request, 5)
    with pytest.raises(ValueError, match="request 0 leaves engine 0"):
        engine.ask(request, 3, 5)
    engine.commit()
    assert engine.plan(10) is None
    with pytest.raises(ValueError, match="is not on engine"):
        engine.ask(request, 3, 10)


@pytest.mark.parametrize("exact", [False, True])
def test_a_milestone_outlives_preemption_and_new_weights(exact: bool) -> None:
    """Tokens generated are counted, however often they are computed again."""
    config = EngineConfig(max_model_len=32, kv_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    engine = SimEngine(config, TEN, exact=exact)
    requests = [Request(0, 0, 8, 16), Request(1, 0, 8, 16, ask_at=12)]
    asked = []
    drive(
        engine,
        [
            *[(0, lambda engine, now, it=it: engine.submit(it, now)) for it in requests],
            (35, lambda engine, now: engine.pause(Pause(7, refresh=True), now)),
        ],
        lambda engine: asked.extend((it.number, it.generated) for it in engine.asked),
        lambda engine, now: None,
    )
    assert requests[1].preemptions == 1
    assert asked == [(1, 12)]


def milestones(case: Case, tokens: dict[int, tuple[int, ...]]) -> list[tuple[int, int, int]]:
    """(tick, request, tokens) of all that were to be asked about, given when each token was generated."""
    found = []
    for number, turn in enumerate(case.turns):
        outputs = 1 if turn.trunk else min(turn.output_tokens, case.config.max_model_len - turn.prompt_tokens)
        given_up = min(at for at in (turn.cancel_at, turn.interrupt_at, case.close_at, 1 << 80) if at is not None)
        ticks = tokens[number]
        found += [
            (ticks[count - 1], number, count)
            for count in turn.asked
            if count <= len(ticks) and count < outputs and ticks[count - 1] <= given_up
        ]
    return sorted(found)


@settings(max_examples=200, deadline=None)
@given(cases(adopting=True, closing=True, asking=True))
def test_everybody_is_asked_when_the_token_comes(case: Case) -> None:
    """The naive engine knows when; nobody asks in the middle here."""
    case = replace(case, looks=())
    wanted = milestones(case, case.naive().tokens)
    for exact in (False, True):
        assert sorted(case.serve(exact=exact).asked) == wanted


@settings(max_examples=150, deadline=None)
@given(cases(adopting=False, closing=False, asking=True))
def test_also_who_has_to_sit_out_an_iteration(case: Case) -> None:
    """Blocks are short, and of low priority is who has to go: those after it do nothing until the next iteration."""
    config = replace(
        case.config,
        policy="priority",
        kv_blocks=-(-32 // case.config.block_size),
        max_num_seqs=6,
        max_num_batched_tokens=40,
        enable_prefix_caching=False,
        watermark=0.0,
    )
    turns = tuple(
        replace(turn, asked=tuple(range(1, 33)), priority=3 - turn.priority, interrupted_after=None)
        for turn in case.turns
    )
    case = replace(case, config=config, turns=turns, looks=())
    wanted = milestones(case, case.naive().tokens)
    assert sorted(case.serve().asked) == wanted


@pytest.mark.parametrize("exact", [False, True])
def test_a_request_that_sits_out_is_asked_about_an_iteration_later(exact: bool) -> None:
    """At 40 all three need a block. The first has the last one; the second is of low priority and goes; the third, who
    has two tokens, comes to nothing in this iteration."""
    config = EngineConfig(
        max_model_len=20,
        kv_blocks=5,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        policy="priority",
        enable_prefix_caching=False,
    )
    engine = SimEngine(config, TEN, exact=exact)
    requests = [
        Request(0, 0, 5, 5, priority=1),
        Request(1, 10, 2, 4, priority=2),
        Request(2, 20, 3, 5, priority=1, ask_at=3),
    ]
    asked = []
    drive(
        engine,
        [(it.arrival, lambda engine, now, it=it: engine.submit(it, now)) for it in requests],
        lambda engine: asked.extend((engine.end, it.number, it.generated) for it in engine.asked),
        lambda engine, now: None,
    )
    assert [it.preemptions for it in requests] == [0, 1, 0]
    assert asked == [(60, 2, 3)]


def but_for_asking(served: Served) -> dict[str, Any]:
    *fields, ask_at = served.outcome["requests"]
    assert len(ask_at) == len(served.requests)
    return {**served.outcome, "requests": fields}


@settings(max_examples=200, deadline=None)
@given(cases(adopting=True, closing=True, asking=True, pausing=True))
def test_nothing_else_is_different(case: Case) -> None:
    """Asked and unasked, looked at or not, jumping or not: the same iterations, and the same for every request."""
    jumping, exact, quiet = case.serve(), case.serve(exact=True), case.quiet().serve()
    assert (jumping.asked, jumping.looked) == (exact.asked, exact.looked)
    assert jumping.outcome == exact.outcome
    assert but_for_asking(jumping) == but_for_asking(quiet)


@settings(max_examples=100, deadline=None)
@given(cases(adopting=True, closing=True, asking=True, pausing=True), st.sampled_from([2, 3]))
def test_the_same_of_a_pipelined_engine(case: Case, stages: int) -> None:
    case = replace(case, config=replace(case.config, pipeline_parallel_size=stages))
    assert but_for_asking(case.serve()) == but_for_asking(case.quiet().serve())


@settings(max_examples=100, deadline=None)
@given(cases(adopting=False, closing=False, asking=True), st.sampled_from([2, 3]))
def test_a_pipelined_engine_asks_about_every_token(case: Case, stages: int) -> None:
    """Where all are asked for, each comes once, in order and at the end of an iteration that the request was in."""
    config = replace(case.config, pipeline_parallel_size=stages)
    turns = tuple(
        replace(turn, asked=tuple(range(1, 40)), cancelled_after=None, interrupted_after=None) for turn in case.turns
    )
    served = replace(case, config=config, turns=turns, looks=()).serve()
    for request in served.requests:
        asked = [(tick, count) for tick, number, count in served.asked if number == request.number]
        if request.status == "finished":
            assert [count for _, count in asked] == list(range(1, request.output_tokens))
            ends = {it.end for it in served.iterations for number, _ in it.scheduled if number == request.number}
            assert {tick for tick, _ in asked} <= ends
            assert [tick for tick, _ in asked[:1]] == [request.first_token][: len(asked)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_who_asks_for_the_same_token_twice_is_told_once(stages: int, exact: bool) -> None:
    engine = SimEngine(replace(CONFIG, pipeline_parallel_size=stages), TEN, exact=exact)
    request, told = Request(0, 0, 8, 6, ask_at=4), []
    drive(
        engine,
        [
            (0, lambda engine, now: engine.submit(request, now)),
            (25, lambda engine, now: engine.ask(request, 4, now)),
        ],
        lambda engine: told.extend((it.number, it.generated) for it in engine.asked),
        lambda engine, now: None,
    )
    assert told == [(0, 4)]
    assert request.status == "finished"
