"""Consecutive iterations that only generate: planned together, cut short, and updated without a visit.

Invariant: the end of the k-th iteration is one formula in whole numbers, wherever it is evaluated. So a stretch that is
cut short ends exactly at the end of an iteration, and a query in between gets the same answer as if each iteration had
been visited.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heapreplace
from itertools import accumulate, repeat
from math import sqrt

from libra.sim.engine.flight import UnderWay
from libra.sim.engine.iteration_cost import DecodeBatch, IterationCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.engine.state import EngineState, Piece
from libra.sim.engine.tiers import Tiers

LISTED = 256  # most iterations planned at once if each has its own ticks


def plan_stretch(state: EngineState, now: int, most: int, taken: int = 0) -> None:
    """Plan at most `most` iterations, until one of the requests is done or blocks run out. Blocks of the first `taken`
    (0 or 1) iterations are held already. If an iteration is in flight, it ends first, and the last planned iteration
    begins at the plan's end."""
    generation, under_way = state.flight.generation, state.under_way
    steps = 1 if most == 1 else min(generation.steps_to_end(), most)
    if state.config.speculative is not None:
        steps = min(steps, LISTED)
    if steps > 1:
        free = state.pool.free
        if state.tiers is not None:
            if state.tiers.watched and not state.tiers.prompt_only:
                steps = min(steps, min(_full_in(state, state.tiers, request) for request in _generating(state)))
            free = min(free, state.tiers.quiet(generation.demand(steps)))
        enough = generation.affordable(steps, free + generation.demand(taken) if taken else free)
        if enough < steps:
            enough = state.pool.affordable(state.running, generation, state.under_way, taken, steps, free, enough)
        steps = enough
        if generation.asks:
            steps = generation.steps_to_ask(steps)
    state.taken, state.steps = taken, steps
    if under_way is None:
        state.pieces, state.end = _of_batch(state, now, steps)
    else:
        _plan_after(state, now - under_way.ticks, under_way.ticks)


def cut_stretch(state: EngineState, now: int) -> bool:
    """End the plan at the first boundary at or after `now`. True: the plan now ends earlier."""
    if state.clock is not None:
        return state.clock.cut(state, now)
    before = state.steps
    if before <= 1 or not state.busy:
        return False
    state.steps, state.end = cut(state.pieces, before, now)
    return state.steps < before


def cut_to(state: EngineState, steps: int) -> bool:
    """End the plan after its first `steps` >= 1 iterations. True: the plan now ends earlier."""
    if not state.busy or steps >= state.steps:
        return False
    if state.clock is not None:
        return state.clock.limit(state, steps)
    state.steps, state.end = cut(state.pieces, state.steps, end_of(state.pieces, steps))
    return True


def count_stretch(state: EngineState) -> list[Request]:
    """Count the planned iterations as ended. Returns the requests that finished in them."""
    generation, pool, steps, end = state.flight.generation, state.pool, state.steps, state.end
    before = pool.blocks - pool.blank - pool.findable
    if state.trace is not None:
        _tell(state)
    if steps > state.taken:
        pool.grow(state.running, generation, state.under_way, state.taken, steps)
        state.taken = steps
    state.held_ticks += (before + pool.blocks - pool.blank - pool.findable) * (end - state.seen)
    state.seen = end
    state.busy_ticks += end - state.start
    state.iterations += steps
    following = 0
    if state.under_way is not None:
        batch, context = state.batch(generation.count), generation.context_after(steps - 1)
        base, slope, _ = state.cost.line(batch, context)
        following = base + slope * context
    if state.tiers is not None and not state.tiers.prompt_only:
        _store_filled(state, state.tiers, following)
    if state.under_way is not None:
        late = state.under_way.absent if steps == 1 else ()
        state.under_way = UnderWay(following, late=late)
    return generation.advance(steps)


def catch_up(state: EngineState, now: int) -> None:
    """Count the planned iterations that ended before `now`, except the last planned iteration. The others stay
    planned."""
    if state.clock is not None:
        state.clock.bring(state)
    steps, pieces = state.steps, state.pieces
    ended = cut([*pieces], steps, now)[0] - 1
    if not ended:
        return
    state.steps, state.end = cut(pieces, steps, end_of(pieces, ended))
    count_stretch(state)
    state.start, state.steps, state.taken = state.end, steps - ended, 0
    if state.clock is not None:
        state.clock.forward(state, ended)
    elif state.under_way is None:
        state.pieces, state.end = _of_batch(state, state.start, state.steps)
    else:
        _plan_after(state, state.start, state.under_way.ticks)


def take_blocks(state: EngineState, steps: int) -> None:
    """Take the blocks of the first `steps` planned iterations."""
    taken = state.taken
    if steps > taken:
        state.pool.grow(state.running, state.flight.generation, state.under_way, taken, steps)
        state.taken = steps


def coming_blocks(state: EngineState) -> int:
    """Blocks that the planned iterations still take."""
    demand = state.flight.generation.demand
    return (demand(state.steps) if state.steps else 0) - (demand(state.taken) if state.taken else 0)


def settle(state: EngineState, now: int) -> int:
    """Bring counts and blocks to the state that they would have if every iteration had been visited. The plan does not
    change. Returns the number of iterations, 0 or 1, that end now and are not counted yet, because the plan may still
    be cut at this tick."""
    if not state.busy or not state.steps:
        return 0
    if state.steps > 1:
        catch_up(state, now)
    elif state.clock is not None:
        state.clock.bring(state)
    if now > state.start:  # the iteration under way has its blocks
        take_blocks(state, 1)
    return int(end_of(state.pieces, 1) <= now)


def ended_by(state: EngineState, now: int) -> int:
    """Planned iterations that have ended, and are not counted yet."""
    if not state.busy or not state.steps:
        return 0
    if state.clock is not None:
        state.clock.bring(state)
    steps, end = cut([*state.pieces], state.steps, now)
    return steps if end <= now else steps - 1


def _store_filled(state: EngineState, tiers: Tiers, following: int) -> None:
    """Store the chunks that the planned iterations fill, as if each iteration had been visited. If the last iteration
    begins at the plan's end, it takes `following` ticks."""
    pieces, ahead = state.pieces, int(state.under_way is not None)
    due = [(_full_in(state, tiers, request), place, request) for place, request in enumerate(_generating(state))]
    heapify(due)
    while due and due[0][0] <= state.steps:
        step = due[0][0]
        tiers.transfers.pass_time(end_of(pieces, step - 1) if step > 1 else pieces[0][1])
        while due and due[0][0] == step:
            _, place, request = due[0]
            tiers.store(request, state.known(request, step))
            again = step + 1 if request in tiers.failed else _full_in(state, tiers, request, step)
            heapreplace(due, (again, place, request))
        last = step == state.steps
        tiers.send(state.end + following if last else end_of(pieces, step + ahead))


def _generating(state: EngineState) -> list[Request]:
    """The generating requests, in the order of their admission."""
    ending = state.ending
    return [request for request in state.running if request not in ending]


def _full_in(state: EngineState, tiers: Tiers, request: Request, after: int = 0) -> int:
    """The first iteration after the next `after` ones with which a chunk of a request is full and known."""
    tokens = tiers.full_at(request) - request.prompt_tokens
    if tokens <= 0:  # a chunk of the prompt that found no room
        return after + 1
    steps = state.flight.generation.steps_to(request, tokens)
    if steps <= 0 and after == 0 and not state.lag(request):
        return 1
    return max(after + 1, steps + 1 + (state.under_way is not None))


def _of_batch(state: EngineState, start: int, steps: int) -> tuple[list[Piece], int]:
    generation = state.flight.generation
    batch, contexts = state.batch(generation.count), generation.contexts(steps)
    if contexts is None:
        return stretch(state.cost, start, batch, generation.context, steps)
    return uneven_stretch(state.cost, start, batch, contexts)


def _plan_after(state: EngineState, start: int, ticks: int) -> None:
    """Plan a first iteration of `ticks` ticks, and then the batch's next iterations."""
    state.pieces, state.end = [(0, start, ticks, 0)], start + ticks
    if state.steps > 1:
        pieces, state.end = _of_batch(state, state.end, state.steps - 1)
        state.pieces += [(before + 1, at, first, growth) for before, at, first, growth in pieces]


def _tell(state: EngineState) -> None:
    """Report each planned iteration to the trace, as if it had been visited."""
    assert state.trace is not None
    generation = state.flight.generation
    running = _generating(state)
    if state.under_way is not None:
        batch, context = state.batch(generation.count), generation.context
        for step in range(1, state.steps + 1):
            start = end_of(state.pieces, step)
            base, slope, _ = state.cost.line(batch, context)
            take_blocks(state, step)
            scheduled = tuple((request.number, generation.row(request, step - 1)) for request in running)
            end = start + base + slope * context
            state.trace(Iteration(state.index, start, end, scheduled, (), (), state.pool.free))
            context = generation.context_after(step)
        return
    following = [piece[0] for piece in state.pieces[1:]] + [state.steps]
    for (before, at, first, growth), after in zip(state.pieces, following, strict=True):
        for step in range(after - before):
            start = at + ticks_of(step, first, growth)
            take_blocks(state, before + step + 1)
            scheduled = tuple((request.number, generation.row(request, before + step)) for request in running)
            end = start + first + step * growth
            state.trace(Iteration(state.index, start, end, scheduled, (), (), state.pool.free))


# The arithmetic


def stretch(cost: IterationCost, now: int, batch: DecodeBatch, context: int, steps: int) -> tuple[list[Piece], int]:
    """(pieces in which the ticks of an iteration grow evenly, tick at which `steps` >= 1 iterations end)."""
    pieces: list[Piece] = []
    before, decoding = 0, batch.requests
    while True:
        base, slope, limit = cost.line(batch, context)
        first, growth = base + slope * context, slope * decoding
        count = steps - before
        if context + count * decoding > limit:
            count = -(-(limit - context) // decoding)
        pieces.append((before, now, first, growth))
        now += count * first + growth * (count * (count - 1) // 2)
        before += count
        if before == steps:
            return pieces, now
        context += count * decoding


def uneven_stretch(cost: IterationCost, now: int, batch: DecodeBatch, contexts: list[int]) -> tuple[list[Piece], int]:
    """As `stretch`, for iterations whose contexts do not fall, but grow unevenly: one piece for each iteration."""
    ticks = uneven_ticks(cost, batch, contexts)
    ends = list(accumulate(ticks, initial=now))
    return list(zip(range(len(ticks)), ends, ticks, repeat(0), strict=False)), ends[-1]


def uneven_ticks(cost: IterationCost, batch: DecodeBatch, contexts: list[int]) -> list[int]:
    """Ticks of each of several iterations whose contexts do not fall."""
    ticks = list[int]()
    while len(ticks) < len(contexts):
        done = len(ticks)
        base, slope, limit = cost.line(batch, contexts[done])
        ticks += [base + slope * context for context in contexts[done : bisect_left(contexts, limit, done)]]
    return ticks


def cut(pieces: list[Piece], steps: int, now: int) -> tuple[int, int]:
    """(iterations, end) of a stretch of `steps` iterations, if it stops with the first iteration that ends at or after
    `now`. Removes the later pieces from `pieces`."""
    while len(pieces) > 1 and pieces[-1][1] >= now:
        steps = pieces.pop()[0]
    before, start, first, growth = pieces[-1]
    count = _least_steps(first, growth, now - start, steps - before)
    return before + count, start + ticks_of(count, first, growth)


def end_of(pieces: list[Piece], steps: int) -> int:
    """The tick at which the first `steps` >= 1 iterations have ended."""
    before, start, first, growth = next(piece for piece in reversed(pieces) if piece[0] < steps)
    return start + ticks_of(steps - before, first, growth)


def after(pieces: list[Piece], steps: int) -> list[Piece]:
    """The remaining pieces after the first `steps` iterations."""
    left = [(before - steps, start, first, growth) for before, start, first, growth in pieces if before > steps]
    before, start, first, growth = next(piece for piece in reversed(pieces) if piece[0] <= steps)
    ended = steps - before
    return [(0, start + ticks_of(ended, first, growth), first + ended * growth, growth), *left]


def ticks_of(steps: int, first: int, growth: int) -> int:
    """Ticks of `steps` iterations. The first takes `first` ticks, and each later one `growth` more than its
    predecessor."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def _least_steps(first: int, growth: int, ticks: int, most: int) -> int:
    """Least steps from 1 to `most` that take `ticks` or more; `most` if none does. Estimated, then corrected."""
    if growth:
        half = first - growth / 2
        steps = int(2.0 * ticks / (half + sqrt(max(0.0, half * half + 2.0 * growth * ticks))))
    else:
        steps = ticks // first
    steps = min(max(steps, 1), most)
    while steps > 1 and ticks_of(steps - 1, first, growth) >= ticks:
        steps -= 1
    while steps < most and ticks_of(steps, first, growth) < ticks:
        steps += 1
    return steps
