"""Asynchronous scheduling: an iteration is decided when the one before it begins, before that one's tokens are known.

Invariant: a token under way counts as there for whoever goes on; what ends with it keeps its place and its blocks until
it is known. So every event reaches a boundary one later than with synchronous scheduling. vLLM's `AsyncScheduler`.
"""

from __future__ import annotations

from collections.abc import Collection

from libra.sim.engine.flight import UnderWay
from libra.sim.engine.generation import Even
from libra.sim.engine.iteration_cost import UNLIMITED
from libra.sim.engine.jump import count_stretch
from libra.sim.engine.preemption import stop_generating
from libra.sim.engine.request import Request
from libra.sim.engine.running import (
    count_iteration,
    finish,
    schedule,
    start_generating,
    tell_asked,
    tell_first_token,
)
from libra.sim.engine.state import EngineState


def plan_ahead(state: EngineState, now: int) -> bool:
    """Decide the iteration after the one that begins now; from rest, that one first. There is a request, or one is
    under way. False: nothing fits."""
    if state.under_way is None:
        if not schedule(state, now, 0):
            return False
        _depart(state, state.end - now, set(state.running))
    under_way = state.under_way
    assert under_way is not None
    begin = now + under_way.ticks
    most = 1 if state.exact or under_way.eventful else UNLIMITED
    decided = (
        schedule(state, begin, most)
        if state.running or state.waiting or state.ready or state.tiers is not None
        else False
    )
    if not state.steps:
        state.ticks = state.end - begin if decided else 0
        state.end = begin
    return True


def drain_ahead(state: EngineState, now: int) -> None:
    """Decide nothing more: what is under way ends."""
    assert state.under_way is not None
    state.start, state.end, state.ticks = now, now + state.under_way.ticks, 0


def complete_ahead(state: EngineState) -> list[Request]:
    """End the iteration under way, or as many as are planned; the next one is under way then. Returns the requests that
    finished, in order."""
    before, now = state.under_way, state.end
    assert before is not None
    if state.steps:
        last = count_stretch(state)
        state.let_go_deferred(before.deferred)
        _land(state, last, before.stopping)
    else:
        count_iteration(state)
        state.let_go_deferred(before.deferred)
        _depart(state, state.ticks, before.absent, before.stopping)
    return _results(state, before, now)


def _depart(state: EngineState, ticks: int, late: Collection[Request], stopped: Collection[Request] = ()) -> None:
    """The iteration that was decided begins, if any was. `late` were not in the one before."""
    if not ticks:
        state.under_way = None
        return
    generation = state.flight.generation
    absent = generation.stalled if isinstance(generation, Even) else ()
    state.under_way = UnderWay(ticks, absent, late, state.chunk)
    _land(state, generation.advance(1), stopped)


def _land(state: EngineState, last: list[Request], stopped: Collection[Request]) -> None:
    """What is to come of the iteration that is under way now. `last` are those whose last token it generates, and maybe
    some of the `stopped`, whose last token has come with the one before."""
    under_way, flight = state.under_way, state.flight
    assert under_way is not None
    generation, longest = flight.generation, state.config.max_model_len
    ending = []
    for request in last:
        if request in stopped:
            continue
        if request.stop == "eos" and request.prompt_tokens + request.output_tokens < longest:
            under_way.stopping.append(request)
            continue
        request.computed, _ = stop_generating(state, request)
        tokens = request.computed
        if state.pool.caching and (request.chain is not None or request.written):
            state.write(request, tokens - (request not in under_way.late))
        ending.append(request)
    for request in flight.finishing:
        under_way.started.append(request)
        request.generated += 1
        if request.generated < request.output_tokens:
            start_generating(state, request)
        elif request.stop == "eos" and request.target < longest - 1:
            start_generating(state, request)
            under_way.stopping.append(request)
        else:
            ending.append(request)
    flight.finishing = []
    for request in ending:
        request.generated, request.flight = request.output_tokens - 1, -1
        state.blocked = False  # it leaves budget to others
    under_way.ending = ending
    if generation.asks:
        for request in generation.reached():
            assert request.ask_at is not None
            under_way.asks.append((request, request.ask_at))


def _results(state: EngineState, before: UnderWay, now: int) -> list[Request]:
    """What came of the iteration that has ended."""
    for request in before.started:
        if request.first_token is None:
            tell_first_token(request, now)
    done = [(request.admission, request) for request in before.ending]
    done += [(request.admission, request) for request in before.stopping]
    for admission, request in before.stale:
        request.generated += 1
        if request.generated == request.output_tokens:
            done.append((admission, request))
    for request, tokens in before.asks:
        if request.ask_at == tokens:
            tell_asked(state, request, tokens)
    done.sort(key=lambda it: it[0])
    for _, request in done:
        if request.status == "waiting":
            state.waiting.remove(request)
            state.blocked = False
            request.status, request.finish, request.path = "finished", now, ()
            if request not in state.leaving:
                state.carry(-request.prompt_tokens)
        elif request.flight < 0:
            finish(state, request, request.computed, request.computed, now)
        else:
            tokens, _ = stop_generating(state, request)
            row = int(state.under_way is not None and request not in state.under_way.absent)
            finish(state, request, tokens, tokens - row, now, row=row > 0)
    return [request for _, request in done]
