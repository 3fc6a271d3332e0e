"""One iteration: the tokens that each running request computes in it, and its results at its end.

Invariant: running requests come first, in the order of their admission. Each gets a token, or the next chunk of its
prompt. Waiting requests are admitted only if no request was preempted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from libra.sim.engine.admission import admit, may_admit
from libra.sim.engine.iteration_cost import NONE_ADMITTED, Admitted, Chunk, DecodeBatch
from libra.sim.engine.jump import LISTED, count_stretch, plan_stretch
from libra.sim.engine.messages import Iteration
from libra.sim.engine.preemption import make_room, stop_generating
from libra.sim.engine.request import Request
from libra.sim.engine.state import EngineState
from libra.sim.engine.tiers import Tiers


def schedule(state: EngineState, now: int, most: int) -> bool:
    """Schedule one iteration of `state.flight`, or up to `most` iterations that only generate, from `now` to
    `state.end`. Returns False if nothing fits."""
    config, pool, generation, tiers = state.config, state.pool, state.flight.generation, state.tiers
    state.chunk = None
    demand, partials = generation.demand(), tuple(state.partials)
    slots, left = 0, config.max_num_batched_tokens - generation.count  # parts of the budget
    if config.speculative is not None:
        slots = config.input_slots
        left = config.step_budget - generation.rows - slots * generation.count
    fits = demand <= pool.blank + pool.findable and left >= -slots and not generation.at_limit
    still = tiers is None or (not tiers.restless(now) and tiers.quiet(demand) >= demand)
    if most and generation.count and not partials and fits and still and not _admits(state):
        plan_stretch(state, now, most)
        return True
    order = state.members() if state.trace is not None else ()
    batch, context, parts, left, room = _batch(state, demand, partials, fits, left, slots)
    chunks: list[Chunk] = []
    for partial, chunk in parts.items():
        chunks.append((chunk, partial.computed))
        state.compute(partial, chunk)
        left -= chunk + slots
    cached: list[tuple[int, int]] = []
    contexts = 0 if room.preempted else admit(state, left, now, chunks, cached, batch.requests)
    if (room.skipped or room.cut) and (batch.requests or chunks):
        context = generation.stall(set(room.skipped), room.cut)
        batch = state.batch(batch.requests, room.skipped, context)
    plain = batch.requests and room is _ENOUGH and not (chunks or partials)
    if tiers is not None:
        most = _conclude(state, tiers, now, most, bool(plain), room, bool(chunks))
    if chunks:
        told = cached and (state.uneven or state.clock is not None)
        admitted = _admitted(contexts, cached) if told else NONE_ADMITTED
        ticks = state.cost.mixed(batch, context, chunks, admitted)
    elif not batch.requests:
        ticks = 0
    elif plain and most:
        plan_stretch(state, now, _patience(state, most) if state.restless and _admits(state) else most, 1)
        return True
    else:
        base, slope, _ = state.cost.line(batch, context)
        ticks = base + slope * context
    state.end = state.flights.end_of(now, ticks) if state.overlapping and ticks else now + state.wait + ticks
    if tiers is not None:
        tiers.send(state.end)
    if state.trace is not None and (ticks or room.preempted):
        _trace(state, now, order, room, partials, parts, chunks, cached)
    if batch.requests or chunks:
        return True
    # Only one request was tried, and it was preempted. Such a step takes no time, unless an iteration is under way, or
    # other ranks compute meanwhile.
    if state.clock is not None:
        return bool(room.preempted)
    return bool(room.preempted) and state.under_way is None and not state.wait and schedule(state, now, most)


class _Room(NamedTuple):
    """Requests that were preempted so that the others of a batch have blocks and budget."""

    preempted: Sequence[Request] = ()
    skipped: Collection[Request] = ()  # requests that get no token in this iteration
    cut: Mapping[Request, int] = {}  # requests that get fewer tokens than they want: number of tokens


_ENOUGH = _Room()


def _batch(
    state: EngineState, demand: int, partials: tuple[Request, ...], fits: bool, left: int, slots: int
) -> tuple[DecodeBatch, int, Mapping[Request, int], int, _Room]:
    """The requests that generate, their contexts, the next chunks of partly computed prompts, the remaining budget, and
    the preempted requests."""
    config, pool, generation = state.config, state.pool, state.flight.generation
    pool.new_step_starts()
    parts: Mapping[Request, int] = {}
    blocks = 0
    if partials and left > 0:
        partial = partials[0]
        chunk = pool.clip(partial, partial.computed, min(partial.target - partial.computed, left))
        if chunk:
            parts = {partial: chunk}
            blocks = config.new_blocks(partial.computed, partial.computed + chunk)
    batch, context = state.batch(generation.count), generation.context
    if fits and (not partials or (demand + blocks <= pool.free and partials[0] is next(reversed(state.running)))):
        pool.grow(state.running, generation, state.under_way, 0, 1)
        if parts:
            partial = partials[0]
            pool.slide(partial, partial.computed, state.under_way)
            pool.extend(partial, partial.computed + parts[partial], blocks)
        return batch, context, parts, left, _ENOUGH
    preempted, rows, parts = make_room(state)
    members = [it for it in state.members() if it not in state.partials and it not in state.ending]
    limited = generation.at_limit
    skipped = {it for it in members if it not in rows}
    cut = {it: row for it, row in rows.items() if row < generation.row(it) or it in limited}
    left = config.step_budget - sum(rows.values()) - slots * len(rows)
    room = _Room(preempted, skipped, cut) if preempted or skipped or cut else _ENOUGH
    return state.batch(len(rows)), generation.context, parts, left, room


def _conclude(state: EngineState, tiers: Tiers, now: int, most: int, plain: bool, room: _Room, chunks: bool) -> int:
    """Offer the KV of the iteration to the tiers. Returns how many iterations may be planned at once: `most`, or 0 if
    the tiers have to be checked again before the next one."""
    if (not tiers.prompt_only and tiers.restless(now)) or (_admits(state) and not tiers.patient):
        most = 0
    known = [] if plain and most and not tiers.prompt_only else _known(state, room.skipped, chunks)
    state.wait = tiers.conclude(known, room.preempted, now)
    return 0 if state.wait or tiers.stirred else most


def _trace(
    state: EngineState,
    now: int,
    order: Sequence[Request],
    room: _Room,
    partials: Sequence[Request],
    parts: Mapping[Request, int],
    chunks: Sequence[Chunk],
    cached: Sequence[tuple[int, int]],
) -> None:
    """Report the iteration: `order` are the running requests before it, `parts` the chunks of prompts in progress."""
    assert state.trace is not None
    generation = state.flight.generation
    gone = {*room.preempted, *room.skipped, *state.ending, *partials} - {*parts}
    scheduled = [
        (request.number, parts[request] if request in parts else generation.row(request))
        for request in order
        if request not in gone
    ]
    new = [tokens for tokens, _ in chunks[len(parts) :]]
    scheduled += zip((number for number, _ in cached), new, strict=True)
    numbers = tuple(request.number for request in room.preempted)
    state.trace(Iteration(state.index, now, state.end, tuple(scheduled), numbers, tuple(cached), state.pool.free))


def _known(state: EngineState, skipped: Collection[Request], chunks: bool) -> list[tuple[Request, int]]:
    """(request, known tokens with KV) of the requests in an iteration. Generating requests store no KV unless a tier
    keeps generated tokens, or earlier chunks did not fit."""
    tiers, flight = state.tiers, state.flight
    assert tiers is not None
    if not chunks and not tiers.failed and tiers.prompt_only:
        return []
    rows = []
    for request in state.running:
        if request is state.chunk or request in flight.finishing:
            rows.append((request, request.computed))
        elif request.flight >= 0 and request not in skipped and (request in tiers.failed or not tiers.prompt_only):
            rows.append((request, state.known(request)))
    return rows


def _patience(state: EngineState, most: int) -> int:
    """Iterations, at most `most`, before the head of the queue may fit although no request ends. Room comes from
    requests that get fewer tokens near `max_model_len`, with drafts, and from windows that release blocks."""
    generation = state.flight.generation
    if most == 1 or not state.wanted:
        return 1
    steps = min(most, generation.steps_to_end(), LISTED)
    return state.pool.steady(state.running, generation, state.under_way, steps, state.wanted)


def _admits(state: EngineState) -> bool:
    """Whether a request may be admitted with the next iteration."""
    return bool(state.waiting or state.ready) and not state.blocked and len(state.running) < state.config.max_num_seqs


def fill(state: EngineState, now: int) -> int:
    """Give a batch to every free pipeline stage, as vLLM's batch queue does. Returns the number of batches in flight;
    the first of these batches ends at `state.end`."""
    flights = state.flights
    for flight in flights.free:
        state.flight = flight
        if not (flight.generation.count or state.partials or may_admit(state)):
            continue
        state.start = now
        state.events += 1
        sent = schedule(state, now, 0)  # requests that do not fit wait for the batches that hold the blocks
        flight.waits = not sent and flight.generation.count > 0
        if sent:
            flight.chunk = state.chunk
            flights.depart(flight, now, state.end)
    if flights.under_way:
        state.end = flights.under_way[0].end
    elif state.waiting and not (state.arriving or state.orphans or state.sending):
        raise nothing_fits(state)
    return len(flights.under_way)


def _admitted(contexts: int, cached: Sequence[tuple[int, int]]) -> Admitted:
    return Admitted(len(cached), contexts, sum(found for _, found in cached))


def nothing_fits(state: EngineState) -> AssertionError:
    return AssertionError(f"engine {state.index}: nothing fits, and nothing will be released")


def complete(state: EngineState) -> list[Request]:
    """End the planned iterations. Returns the requests that finished with them, in order."""
    flight = state.flight
    generation = flight.generation
    if state.steps:
        done = count_stretch(state)
    else:
        count_iteration(state)
        done = generation.advance(1)
        if flight.deferred:
            deferred, flight.deferred = flight.deferred, []
            state.let_go_deferred(deferred)
    if generation.asks:
        for request in generation.reached():
            tell_asked(state, request, generation.generated(request))
    finishing = flight.finishing
    if done and finishing and finishing[0].admission < done[-1].admission:
        return _complete_in_order(state, done)
    for request in done:
        finish(state, request, *stop_generating(state, request), state.end)
    if finishing:
        flight.finishing = []
        for request in finishing:
            if _ends_with_prompt(state, request):
                done.append(request)
    return done


def _complete_in_order(state: EngineState, done: list[Request]) -> list[Request]:
    """As `complete`, but strictly in the order of admission: a request whose prompt waited for budget may come before
    requests that generate."""
    finishing, state.flight.finishing = state.flight.finishing, []
    both = sorted([*done, *finishing], key=lambda it: it.admission)
    ended: list[Request] = []
    for request in both:
        if request not in finishing:
            finish(state, request, *stop_generating(state, request), state.end)
        elif not _ends_with_prompt(state, request):
            continue
        ended.append(request)
    return ended


def _ends_with_prompt(state: EngineState, request: Request) -> bool:
    """Whether a request whose prompt is complete ends with its first token; otherwise let it generate."""
    if request.first_token is None:
        tell_first_token(request, state.end)
    request.generated += 1
    if request.generated == request.output_tokens:
        finish(state, request, state.slots(request), request.target, state.end)
        return True
    if request.generated == request.ask_at:
        tell_asked(state, request, request.generated)
    start_generating(state, request)
    return False


def count_iteration(state: EngineState) -> None:
    """Count the ending iteration as visited."""
    now, pool = state.end, state.pool
    state.held_ticks += 2 * (pool.blocks - pool.blank - pool.findable) * (now - state.seen)
    state.seen = now
    state.busy_ticks += now - state.start
    state.iterations += 1


def tell_first_token(request: Request, now: int) -> None:
    """Note the tick of a request's first token, and of the end of its prompt if no other engine computed the prompt."""
    request.first_token = now
    if request.prefill_end is None:
        request.prefill_end = now


def tell_asked(state: EngineState, request: Request, generated: int) -> None:
    """Record that a request has generated its `ask_at` tokens, or more of them with drafts."""
    request.generated, request.ask_at = generated, None
    state.asked.append(request)


def start_generating(state: EngineState, request: Request) -> None:
    """Let a request with a computed prompt generate. Raises ValueError if another request generates on its chain."""
    state.flight.generation.add(request, state.slots(request))
    request.reserves = False
    chain = request.chain
    if chain is not None and state.pool.caching:
        other = state.writers.setdefault(chain, request)
        if other is not request:
            raise ValueError(
                f"requests {other.number} and {request.number} generate on {chain} at the same time: give each a fork"
            )


def finish(state: EngineState, request: Request, tokens: int, known: int, now: int, row: bool = False) -> None:
    """End a request that has generated all its tokens. It holds blocks for `tokens` tokens, of which `known` are final.
    `row`: it is also in the iteration in flight, whose result for it is not used."""
    request.generated = request.output_tokens
    request.status = "finished"
    request.finish = now
    if request not in state.leaving:
        state.carry(-request.prompt_tokens)
    if state.pool.caching and (request.chain is not None or request.written or state.tiers is not None):
        state.write(request, known)
    if state.tiers is not None:
        state.tiers.end(request, request.prompt_tokens + request.output_tokens - 1)
    if request.keeps:
        state.keep(request, tokens, known)
        return
    state.release(request, tokens, known, row)
    request.path = ()
