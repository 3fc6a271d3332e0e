"""Asynchronous scheduling: an iteration is scheduled when the previous one begins, before its tokens are known.

Invariant: a token in flight counts as generated for a request that continues. A request that ends with this token keeps
its place and its blocks until the token is known. So every event takes effect one boundary later than with synchronous
scheduling. The rules are those of vLLM's `AsyncScheduler`.
"""

from __future__ import annotations

from collections.abc import Collection

from libra.sim.engine.flight import UnderWay
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
    """Schedule the iteration after the one that begins now; if no iteration is in flight, first schedule the one that
    begins now. Returns False if nothing fits."""
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
    """Let the iteration in flight end, and schedule nothing more."""
    assert state.under_way is not None
    state.start, state.end, state.ticks = now, now + state.under_way.ticks, 0


def complete_ahead(state: EngineState) -> list[Request]:
    """End the iteration in flight, or all planned iterations. The next iteration is then in flight. Returns the
    requests that finished, in order."""
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
    """Begin the scheduled iteration; `ticks` of 0: no iteration was scheduled. `late` are requests that were not in the
    previous iteration."""
    generation = state.flight.generation
    if not ticks:
        state.under_way = None
        generation.rest([request for request in state.running if request.flight >= 0])
        return
    state.under_way = UnderWay(ticks, generation.stalled, late, state.chunk)
    _land(state, generation.advance(1), stopped)


def _land(state: EngineState, last: list[Request], stopped: Collection[Request]) -> None:
    """Note the coming results of the iteration in flight. `last` are requests whose last token this iteration
    generates. They may include requests in `stopped`, whose last token came with the previous iteration."""
    under_way, flight = state.under_way, state.flight
    assert under_way is not None
    generation, longest = flight.generation, state.config.max_model_len
    ending = under_way.ending
    for request in last:
        if request in stopped:
            continue
        if generation.overruns(request, longest):
            under_way.stopping.append(request)
            continue
        request.generated = generation.generated(request, -1)
        ending[request], _ = stop_generating(state, request)
        if state.pool.caching and (request.chain is not None or request.written):
            state.write(request, request.prompt_tokens + request.generated - (request not in under_way.late))
    for request in flight.finishing:
        under_way.started.append(request)
        request.generated += 1
        if request.generated < request.output_tokens:
            start_generating(state, request)
        elif request.stop == "eos" and request.target + request.padding < longest - 1:
            start_generating(state, request)
            under_way.stopping.append(request)
        else:
            request.generated -= 1
            ending[request] = state.slots(request)
    flight.finishing = []
    for request in ending:
        request.flight = -1
        state.blocked = False  # an ending request leaves budget to other requests
    if generation.asks:
        for request in generation.reached():
            assert request.ask_at is not None
            under_way.asks.append((request, request.ask_at, generation.generated(request)))


def _results(state: EngineState, before: UnderWay, now: int) -> list[Request]:
    """Apply the results of the ended iteration. Returns the requests that finished, in order."""
    for request in before.started:
        if request.first_token is None:
            tell_first_token(request, now)
    done = [(request.admission, request) for request in (*before.ending, *before.stopping)]
    for admission, request, tokens in before.stale:
        request.generated += tokens
        if request.generated == request.output_tokens:
            done.append((admission, request))
    for request, tokens, generated in before.asks:
        if request.ask_at == tokens:
            tell_asked(state, request, generated)
    done.sort(key=lambda it: it[0])
    for _, request in done:
        if request.status == "waiting":
            state.waiting.remove(request)
            state.blocked = False
            request.status, request.finish, request.path = "finished", now, ()
            if request not in state.leaving:
                state.carry(-request.prompt_tokens)
            continue
        known = request.prompt_tokens + request.output_tokens - 1
        if request in before.ending:
            finish(state, request, before.ending[request], known, now)
        else:
            slots, _ = stop_generating(state, request)
            row = state.under_way is not None and request not in state.under_way.absent
            finish(state, request, slots, known, now, row=row)
    return [request for _, request in done]
