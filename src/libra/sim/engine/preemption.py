"""Requests that stop running before they finish: preempted to make room, or leaving.

Invariant: a stopped request keeps its generated tokens and loses its blocks; full blocks of known tokens stay findable.
When blocks run out, the last admitted request is preempted, or with priorities the request of lowest priority. It
computes its context again later.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra.sim.engine.arriving import give_up
from libra.sim.engine.request import Request, Status
from libra.sim.engine.state import EngineState


def make_room(state: EngineState) -> tuple[list[Request], dict[Request, int], dict[Request, int]]:
    """Give budget and blocks to the running requests in order. Returns the preempted requests, the tokens of each
    request that generates in this iteration, and the chunk of each request whose prompt is computed."""
    config, pool, generation = state.config, state.pool, state.flight.generation
    budget = config.step_budget
    scheduled: dict[Request, int] = {}
    chunks: dict[Request, int] = {}
    preempted: list[Request] = []
    for request in state.members():
        if request.admission < 0 or request in state.ending:
            continue
        if budget <= 0:
            break
        if request in state.partials:
            computed = request.computed
            new = pool.clip(request, computed, min(request.target - computed, budget))
            if not new:
                continue
            needed = config.new_blocks(computed, computed + new)
        else:
            new = min(generation.row(request), budget)
            if not new:
                continue
            computed = generation.computed(request)
            needed = generation.needs(request, new)
        pool.slide(request, computed, state.under_way)
        while needed > pool.free:
            victim = _victim(state)
            if state.defers and state.is_under_way(victim):
                return preempted, scheduled, chunks  # the blocks of the victim would not be free yet
            row = chunks.pop(victim, 0) or scheduled.pop(victim, 0)
            if row:
                budget += row + config.input_slots
            _preempt(state, victim, row)
            preempted.append(victim)
            if victim is request:
                break
        if request.admission < 0:
            break
        pool.extend(request, computed + new, needed)
        budget -= new + config.input_slots
        (chunks if request in state.partials else scheduled)[request] = new
    return preempted, scheduled, chunks


def _victim(state: EngineState) -> Request:
    """The request of this batch to preempt; vLLM would also preempt a request whose batch is in flight."""
    members = state.members()
    if state.config.policy == "fcfs":
        return members[-1]
    return max(members, key=lambda it: (it.priority, it.arrival))


def _preempt(state: EngineState, request: Request, row: int) -> None:
    """Return a request to the queue; `row` of its tokens are already in this iteration."""
    state.preemptions += 1
    request.preemptions += 1
    admission, under_way = request.admission, state.under_way
    more = _let_go(state, request, row)
    if more and under_way is not None:
        if request.keeps:  # the KV that another engine waits for is lost, so the token does not count
            under_way.forget(request)
        else:
            under_way.stale.append((admission, request, more))
    request.status = "waiting"
    state.waiting.requeue(request)


def _let_go(state: EngineState, request: Request, row: int = 0, *, ends: bool = False) -> int:
    """Stop running an unfinished request; `ends`: for good. Returns its tokens in flight, with asynchronous
    scheduling."""
    more, under_way, partial = 0, state.under_way, request in state.partials
    request.reserves, in_iteration = False, state.is_under_way(request)
    if partial:
        del state.partials[request]
        tokens, known = state.slots(request, row), request.computed
    elif under_way is not None:
        if request in under_way.ending:
            tokens, more = under_way.ending.pop(request), request.output_tokens - request.generated
        else:
            generation = state.flight.generation
            request.generated = generation.generated(request, -state.lag(request))
            more = generation.generated(request) - request.generated
            tokens, _ = stop_generating(state, request, row)
            if request in under_way.stopping:
                under_way.stopping.remove(request)
        # Blocks become findable when an iteration is decided, for the tokens known at that time; or when it has ended,
        # for all tokens except the last.
        decided = row or (more and request in under_way.late)
        known = max(request.prompt_tokens + request.generated - (not decided), request.target)
    else:
        flight = state.flight = state.flights.all[request.flight]
        if request in flight.finishing:  # its last chunk is under way
            flight.finishing.remove(request)
            tokens, known = state.slots(request), request.computed
        else:
            request.generated = flight.generation.generated(request)
            # While the batch of a request is under way, its next token already has a place.
            tokens, known = stop_generating(state, request, 1 if flight.under_way else row)
    if state.pool.caching:
        state.write(request, known)
    if state.tiers is not None and ends:
        state.tiers.end(request, known if partial else request.prompt_tokens + request.generated - (not more))
    state.release(request, tokens, known, row=in_iteration)
    return more


def stop_generating(state: EngineState, request: Request, row: int = 0) -> tuple[int, int]:
    """Take a request out of its `Generation`, with the results of `Generation.remove`."""
    if request.chain is not None and state.pool.caching:
        del state.writers[request.chain]
    return state.flight.generation.remove(request, row)


def refresh(state: EngineState) -> None:
    """Return all running requests to the queue, in their order, and forget every computed token."""
    for request in reversed(list(state.running)):
        _let_go(state, request)
        request.status = "waiting"
        state.waiting.requeue(request)
    state.pool.clear()


def mark(state: EngineState, request: Request, status: Status) -> None:
    """Let a request leave at the next boundary, with this status."""
    if request not in state.leaving:
        state.carry(-request.prompt_tokens)
    state.leaving[request] = status
    request.ask_at = None


def leave(state: EngineState, requests: Iterable[Request], now: int) -> None:
    """Let marked requests leave, at a boundary. Some may have finished with the last iteration."""
    for request in requests:
        status = state.leaving.pop(request)
        if request.status == "running":
            _let_go(state, request, ends=True)
            if state.under_way is not None:
                state.under_way.forget(request)
        elif request in state.arriving:
            give_up(state, request)
        elif request.status == "waiting":
            state.waiting.remove(request)
            state.blocked = False
        else:
            continue
        if state.tiers is not None:
            state.tiers.end(request, 0)
        request.status, request.finish = status, now
        if request not in state.orphans:
            request.path = ()
        if status == "interrupted":
            state.interrupted.append(request)
