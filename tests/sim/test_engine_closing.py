"""Engines that close, and requests that leave unfinished to go on elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driven_engine import Case, cases, drive
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Pause
from libra.sim.engine.request import Chain, Request

CONFIG = EngineConfig(max_model_len=64, kv_blocks=64, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
TEN = AffineCost(10)  # ticks for any iteration


def nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("close_at", "closed", "generated"),
    [
        (0, 0, [0, 0, 0]),  # before anything is decided
        (1, 10, [1, 1, 0]),  # two seats; the third waits
        (10, 10, [1, 1, 0]),
        (31, 40, [4, 4, 0]),
        (49, 50, [5, 5, 0]),  # 0 finishes with the iteration that is under way
        (50, 50, [5, 5, 0]),
        (51, 60, [5, 6, 1]),
        (999, 999, [5, 9, 7]),  # long idle
    ],
)
def test_a_closing_engine_stops_at_the_end_of_the_iteration(
    exact: bool, close_at: int, closed: int, generated: list[int]
) -> None:
    engine = SimEngine(CONFIG, TEN, exact=exact)
    requests = [Request(0, 0, 8, 5), Request(1, 0, 8, 9), Request(2, 0, 8, 7)]
    left: list[tuple[int, list[int]]] = []

    def look(engine: SimEngine, now: int) -> None:
        if engine.closed:
            left.append((now, [request.number for request in engine.interrupted]))

    orders = [(0, lambda engine, now, it=it: engine.submit(it, now)) for it in requests]
    drive(engine, [*orders, (close_at, lambda engine, now: engine.close(now))], nothing, look)
    unfinished = [it.number for it in requests if it.generated < it.output_tokens]
    assert left == [(closed, unfinished)]
    assert [request.generated for request in requests] == generated
    for request in requests:
        if request.number in unfinished:
            assert (request.status, request.finish) == ("interrupted", closed)
        else:
            assert request.status == "finished" and request.finish <= closed
    assert (engine.busy, engine.open, engine.load_tokens) == (False, False, 0)
    assert (engine.unfinished, engine.pool.held) == ([], 0)


def test_a_jump_ends_sooner() -> None:
    engine = SimEngine(CONFIG, TEN)
    engine.submit(Request(0, 0, 8, 50), 0)
    engine.plan(0)
    engine.commit()
    assert engine.plan(10) == 500
    assert engine.close(22)
    assert engine.end == 30
    assert not engine.close(23)  # it closes already
    engine.commit()
    assert not engine.closed
    assert engine.plan(30) is None
    assert engine.closed


def test_what_runs_comes_before_what_waits() -> None:
    engine = SimEngine(replace(CONFIG, policy="priority"), TEN)
    requests = [Request(number, 0, 8, 9, priority=priority) for number, priority in enumerate([3, 1, 2, 0])]
    for request in requests:
        engine.submit(request, 0)
    engine.plan(0)
    engine.interrupt(requests[1], 5)
    engine.cancel(requests[2], 5)
    engine.close(5)
    engine.commit()
    assert engine.plan(10) is None
    assert [request.number for request in engine.interrupted] == [3, 1, 0]
    assert requests[2].status == "cancelled"


def test_nothing_comes_to_an_engine_that_closes() -> None:
    engine = SimEngine(CONFIG, TEN, 7)
    request = Request(0, 0, 8, 9)
    engine.submit(request, 0)
    engine.plan(0)
    engine.close(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="engine 7 is closing: submit request 1 to another engine"):
            engine.submit(Request(1, 0, 8, 9), 5)
        with pytest.raises(ValueError, match="engine 7 is closing: send KV to another engine"):
            engine.adopt(Chain("a"), 8, 5)
        with pytest.raises(ValueError, match="request 0"):
            engine.ask(request, 5, 5)
        assert not engine.pause(Pause(9, refresh=False), 5)
        if engine.busy:
            engine.commit()
            assert engine.plan(10) is None
    assert engine.plan(20) is None
    assert engine.interrupted == []  # that was the plan before


def test_a_pause_under_way_comes_to_its_end_and_those_due_do_not_begin() -> None:
    engine = SimEngine(CONFIG, TEN)
    request = Request(0, 0, 8, 9)
    engine.submit(request, 0)
    engine.plan(0)
    for _ in range(2):
        engine.pause(Pause(100, refresh=True), 5)
    engine.commit()
    assert engine.plan(10) == 110
    assert not engine.close(50)
    engine.commit()
    assert engine.plan(110) is None
    assert (request.status, request.finish, request.generated) == ("interrupted", 110, 1)
    assert engine.paused_ticks == 100


def test_what_is_in_the_cache_of_a_closed_engine_can_be_looked_up() -> None:
    engine = SimEngine(CONFIG, TEN)
    chain = Chain("a")
    engine.submit(Request(0, 0, 10, 9, chain=chain), 0)
    engine.plan(0)
    engine.commit()
    engine.plan(10)
    engine.close(25)  # two more are generated; the KV of the last one is computed with the next
    engine.commit()
    engine.plan(30)
    assert engine.cached_tokens(chain, 30) == 12
    assert [request.generated for request in engine.interrupted] == [3]


@pytest.mark.parametrize("exact", [False, True])
def test_one_request_is_interrupted_and_the_others_go_on(exact: bool) -> None:
    engine = SimEngine(CONFIG, TEN, exact=exact)
    requests = [Request(0, 0, 8, 9), Request(1, 0, 8, 9), Request(2, 0, 8, 3)]
    left = []
    drive(
        engine,
        [
            *[(0, lambda engine, now, it=it: engine.submit(it, now)) for it in requests],
            (33, lambda engine, now: engine.interrupt(requests[1], now)),
            (34, lambda engine, now: engine.interrupt(requests[1], now)),
        ],
        nothing,
        lambda engine, now: left.extend((now, it.number, it.generated) for it in engine.interrupted),
    )
    assert left == [(40, 1, 4)]
    assert [(it.status, it.finish) for it in requests] == [("finished", 90), ("interrupted", 40), ("finished", 70)]
    assert engine.load_tokens == 0


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("interrupt", "cancel", "cancelled"),  # nobody wants it any more
        ("cancel", "interrupt", "cancelled"),
        ("cancel", "cancel", "cancelled"),
        ("interrupt", "interrupt", "interrupted"),
    ],
)
def test_a_request_leaves_once(first: str, second: str, status: str) -> None:
    engine = SimEngine(CONFIG, TEN)
    requests = [Request(0, 0, 8, 9), Request(1, 0, 5, 9)]
    for request in requests:
        engine.submit(request, 0)
    engine.plan(0)
    engine.commit()
    engine.plan(10)
    for method in (first, second):
        getattr(engine, method)(requests[0], 15)
        assert engine.load_tokens == 5
    engine.commit()
    engine.plan(20)
    assert (requests[0].status, requests[0].finish, requests[0].generated) == (status, 20, 2)
    assert engine.interrupted == [requests[0]] * (status == "interrupted")
    assert not engine.interrupt(requests[0], 25)
    assert not engine.cancel(requests[0], 25)


def test_who_finishes_with_the_iteration_under_way_is_not_interrupted() -> None:
    engine = SimEngine(CONFIG, TEN)
    request = Request(0, 0, 8, 1)
    engine.submit(request, 0)
    engine.plan(0)
    engine.interrupt(request, 5)
    assert engine.commit() == [request]
    assert engine.plan(10) is None
    assert (request.status, engine.interrupted, engine.load_tokens) == ("finished", [], 0)


def test_a_pipelined_engine_lets_its_batches_come_to_their_ends() -> None:
    """Two stages of 50 ticks: batches end at 100 and 150, and no other follows."""
    config = replace(CONFIG, pipeline_parallel_size=2)
    engine = SimEngine(config, AffineCost(100))
    requests = [Request(0, 0, 8, 9), Request(1, 10, 8, 9), Request(2, 20, 8, 9)]
    left = []
    drive(
        engine,
        [
            *[(it.arrival, lambda engine, now, it=it: engine.submit(it, now)) for it in requests],
            (60, lambda engine, now: engine.close(now)),
        ],
        nothing,
        lambda engine, now: left.extend((now, it.number, it.generated) for it in engine.interrupted),
    )
    assert left == [(150, 0, 1), (150, 1, 1), (150, 2, 0)]
    assert (engine.closed, engine.pool.held, engine.load_tokens) == (True, 0, 0)


@pytest.mark.parametrize("now", range(5, 100, 5))
def test_when_time_is_up_a_jump_has_come_as_far(now: int) -> None:
    seen = []
    for exact in (False, True):
        engine = SimEngine(CONFIG, TEN, exact=exact)
        request = Request(0, 0, 8, 9)
        engine.submit(request, 0)
        while engine.plan(engine.end) is not None and engine.end <= now:
            engine.commit()
        engine.stop(now)
        seen.append((request.generated, request.status, engine.iterations, engine.busy_ticks))
    assert seen == [(now // 10, "running" if now < 90 else "finished", now // 10, min(now, 90))] * 2


@settings(max_examples=100, deadline=None)
@given(cases(adopting=True, closing=True, asking=True, pausing=True), st.sampled_from([2, 3]))
def test_a_pipelined_engine_loses_nothing(case: Case, stages: int) -> None:
    served = replace(case, config=replace(case.config, pipeline_parallel_size=stages)).serve()
    engine = served.engine
    assert (engine.pool.held, engine.load_tokens, engine.unfinished) == (0, 0, [])
    assert engine.closed == (case.close_at is not None)
    left = sorted(it.number for it in served.requests if it.status == "interrupted")
    assert sorted(served.interrupted) == left
    for request in served.requests:
        assert request.engine is None or request.status in ("finished", "cancelled", "interrupted", "refused")
        assert (request.generated == request.output_tokens) == (request.status == "finished")


@settings(max_examples=100, deadline=None)
@given(cases(adopting=False, closing=True, asking=False))
def test_what_was_interrupted_can_go_on_elsewhere(case: Case) -> None:
    """With what it generated in its prompt, on the same chain: every token is generated once."""
    served = replace(case, turns=tuple(replace(turn, cancelled_after=None) for turn in case.turns)).serve()
    there = SimEngine(case.config, case.cost)
    moved = []
    for number in served.interrupted:
        request = served.requests[number]
        moved.append(
            Request(
                number,
                request.finish or 0,
                request.prompt_tokens + request.generated,
                request.output_tokens - request.generated,
                chain=request.chain,
            )
        )
    drive(there, [(it.arrival, lambda engine, now, it=it: engine.submit(it, now)) for it in moved], nothing, nothing)
    for request in moved:
        before = served.requests[request.number]
        assert request.status == "finished"
        assert before.generated + request.generated == before.output_tokens
