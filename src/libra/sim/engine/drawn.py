"""Requests that generate with drafts: each iteration gives the accepted drafts and one more token.

Invariant: when a request joins the batch, its computation, blocks and tokens are known for each of its iterations, as
if it ran alone. The batch is kept as sums over its requests for each future iteration. A request that gets fewer tokens
in an iteration than it wants, or no token, leaves the batch and joins it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappush
from math import isqrt
from typing import Final

import numpy as np

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.generation import Generation
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import Draws, Ints, Speculative

# Columns of sums, with a line for each iteration.
ATTENDED: Final = 0  # tokens that are attended to
BLOCKS: Final = 1  # blocks held from the iteration on
ROWS: Final = 2  # tokens computed in the iteration
_FEWEST = 1024  # least number of iterations for which an array of sums has room


class Course:
    """One request's iterations from `start` on."""

    __slots__ = ("generated", "held", "known", "offset", "start", "sums", "tokens", "undrawn")

    def __init__(
        self,
        start: int,
        known: int,
        generated: int,
        held: int,
        tokens: Ints,
        sums: Ints,
        undrawn: int,
        offset: int,
    ) -> None:
        self.start = start
        self.known = known  # tokens that other requests can find before `start`
        self.generated = generated  # tokens generated before `start`
        self.held = held  # blocks held before `start`
        self.tokens = tokens  # tokens of the context, with the next to compute, before each iteration and at the end
        self.sums = sums  # the request's part of the batch's sums
        self.undrawn = undrawn  # iterations that verify nothing: 1 if the first iteration verifies nothing, otherwise 0
        self.offset = offset


class Drawn(Generation):
    """The generating requests of a batch with drafts, as vLLM schedules them. A running request gets its next token and
    `num_speculative_tokens` drafts, or as many as `max_model_len` allows. When drafts are rejected, the request keeps
    their blocks and the drafter's lookahead blocks."""

    __slots__ = (
        "_block",
        "_draws",
        "_each",
        "_end",
        "_held",
        "_length",
        "_lookahead",
        "_mean",
        "_more",
        "_offsets",
        "_origin",
        "_size",
        "_slack",
        "_squares",
        "_sums",
    )

    def __init__(self, config: EngineConfig, speculative: Speculative) -> None:
        super().__init__()
        self._draws, self._mean = Draws(speculative), speculative.mean_tokens
        self._size, self._length = config.block_size, config.max_model_len
        self._each, self._lookahead = speculative.tokens_each, speculative.lookahead
        # Operands of array operations are arrays: numpy would convert a number to an array each time.
        self._more, self._slack = np.array(self._each - 1), np.array(self._lookahead + self._size - 1)
        self._block = np.array(self._size)
        self._sums = np.zeros((_FEWEST, 3), np.int64)
        self._origin = self._end = 0  # iterations of the first line of the sums, and of the first unused line
        self._held = 0  # blocks held before the next iteration
        self._offsets = self._squares = 0

    @property
    def rows(self) -> int:
        return self._sums.item(self.iteration - self._origin, ROWS) if self.count else 0

    def spread(self, absent: Collection[Request] = ()) -> int:
        """As `Generation.spread`, if every context grows by the mean number of tokens."""
        count, offsets, squares = self.count, self._offsets, self._squares
        for request in absent:
            offset = _course(request).offset
            count, offsets, squares = count - 1, offsets - offset, squares - offset * offset
        return isqrt(count * squares - offsets * offsets)

    def add(self, request: Request, slots: int) -> None:
        tokens = request.target
        self._enter(request, self.iteration, tokens, request.generated, -(-slots // self._size), None)

    def remove(self, request: Request, row: int = 0) -> tuple[int, int]:
        course, at = self._leave(request)
        size = self._size
        if row:
            tokens = int(course.tokens[at])
            slots = min(tokens - 1 + row + self._lookahead, self._length)
            return max(slots, held_by(course, at) * size), tokens
        return held_by(course, at) * size, _known(course, at)

    def computed(self, request: Request, more: int = 0) -> int:
        course = _course(request)
        return _known(course, min(self.iteration + more - course.start, len(course.tokens) - 1))

    def generated(self, request: Request, more: int = 0) -> int:
        course = _course(request)
        at = self.iteration + more - course.start
        if at <= 0:
            return course.generated
        return course.tokens.item(min(at, len(course.tokens) - 1)) - request.prompt_tokens

    def row(self, request: Request, after: int = 0) -> int:
        course = _course(request)
        return course.sums.item(self.iteration + after - course.start, ROWS)

    def needs(self, request: Request, row: int) -> int:
        course = _course(request)
        at = self.iteration - course.start
        slots = min(course.tokens.item(at) - 1 + row + self._lookahead, self._length)
        return max(-(-slots // self._size) - held_by(course, at), 0)

    def stall(self, skipped: set[Request], cut: Mapping[Request, int]) -> int:
        for request in skipped:
            generated, computed = self.generated(request), self.computed(request)
            course, at = self._leave(request)
            self._enter(request, self.iteration + 1, computed, generated, held_by(course, at), None)
        for request, row in cut.items():
            generated, computed = self.generated(request), self.computed(request)
            course, at = self._leave(request)
            self._enter(request, self.iteration, computed, generated, held_by(course, at), row)
        return self.context

    def reaches(self, request: Request, tokens: int) -> int:
        course = _course(request)
        return course.start + int(course.tokens.searchsorted(request.prompt_tokens + tokens)) - 1

    def alike(self, steps: int) -> int:
        at = self.iteration - self._origin
        others = self._sums[at : at + steps, ROWS] != self._sums[at, ROWS]
        return int(others.argmax()) or steps

    def contexts(self, steps: int) -> list[int]:
        at = self.iteration - self._origin
        contexts: list[int] = self._sums[at : at + steps, ATTENDED].tolist()
        return contexts

    def context_after(self, steps: int) -> int:
        return self._sums.item(self.iteration - self._origin + steps, ATTENDED) if self.count else 0

    def demand(self, steps: int = 1) -> int:
        at = self.iteration - self._origin
        return self._sums.item(at + steps - 1, BLOCKS) - self._held if self.count else 0

    def affordable(self, steps: int, blocks: int) -> int:
        if self.demand(steps) <= blocks:
            return steps
        at = self.iteration - self._origin
        return int(self._sums[at : at + steps, BLOCKS].searchsorted(self._held + blocks, side="right"))

    def advance(self, steps: int) -> list[Request]:
        self._held += self.demand(steps)
        self.iteration += steps
        self._look()
        return self._done()

    def _enter(self, request: Request, start: int, known: int, generated: int, held: int, first: int | None) -> None:
        """Let a request generate from the iteration `start` on. It holds `held` blocks, and other requests can find its
        first `known` tokens. In the first iteration it gets at most `first` tokens; None: no such limit."""
        undrawn, tokens = self._tokens(request, generated, first)
        before, begin, steps = tokens[:-1], tokens.item(0), len(tokens) - 1
        sums = np.empty((steps, 3), np.int64)
        attended, blocks, rows = sums[:, ATTENDED], sums[:, BLOCKS], sums[:, ROWS]
        rows.fill(self._each)
        np.add(before, self._more, attended)
        limited = attended.item(steps - 1) + self._lookahead >= self._length
        if limited:
            np.minimum(attended, self._length - 1, attended)
            np.subtract(attended, before - 1, rows)
        if first is not None:
            rows[0], attended[0] = first, begin + first - 1
        np.add(attended, self._slack, blocks)
        if limited:
            np.minimum(blocks, self._length + self._size - 1, blocks)
        np.floor_divide(blocks, self._block, blocks)
        if blocks.item(0) < held:  # the request took blocks for more tokens in an earlier iteration
            np.maximum(blocks, held, blocks)
        offset = begin - round(self._mean * start)
        self._put(request, Course(start, known, generated, held, tokens, sums, undrawn, offset), start + steps - 1)
        if request.ask_at is not None:
            self.ask(request)

    def _tokens(self, request: Request, generated: int, first: int | None) -> tuple[int, Ints]:
        """Returns the number of iterations without verification (0 or 1), and the tokens of a request's context before
        each iteration and after the last. The request gets `first` tokens in the next iteration; None: all that it
        wants."""
        draws, number, verified = self._draws, request.number, request.verifications
        begin, end = request.prompt_tokens + generated, request.prompt_tokens + request.output_tokens
        if first == 1 and begin < end:
            rest = draws.contexts(number, verified, begin + 1, end, self._each)
            return 1, np.concatenate((np.array([begin]), rest))
        return 0, draws.contexts(number, verified, begin, end, first or self._each)

    def _put(self, request: Request, course: Course, last: int) -> None:
        """Add the course of a request whose last token is generated in the iteration `last`."""
        request.course, request.last = course, last
        steps = len(course.sums)
        at = self._room(course.start, steps)
        sums = self._sums[at : at + steps]
        sums += course.sums
        if course.start > self.iteration:  # the request is not in the next iteration
            self._sums[at - 1, BLOCKS] += course.held
        self._held += course.held
        heappush(self._ends, (last, request.admission, request))
        self._offsets += course.offset
        self._squares += course.offset * course.offset
        self.count += 1
        self._look()

    def _leave(self, request: Request) -> tuple[Course, int]:
        """Take a request out of the sums. Returns its course, and how many of the course's iterations are over."""
        course = _course(request)
        over = self.iteration - course.start
        rest = course.sums[max(over, 0) :]
        at = max(course.start, self.iteration) - self._origin
        if len(rest):
            sums = self._sums[at : at + len(rest)]
            sums -= rest
        if over < 0:
            self._sums[at - 1, BLOCKS] -= course.held
        self._held -= held_by(course, over)
        if over > 0:
            request.verifications += over - course.undrawn
        self._offsets -= course.offset
        self._squares -= course.offset * course.offset
        self.count -= 1
        self._look()
        request.course = None
        return course, over

    def _look(self) -> None:
        self.context = self.context_after(0)

    def _room(self, start: int, steps: int) -> int:
        """Make room in the sums for `steps` iterations from `start` on. Returns the index of the line of `start`."""
        at = start - self._origin
        if at + steps >= len(self._sums):
            kept = self._sums[self.iteration - self._origin : max(self._end, self.iteration) - self._origin]
            at = start - self.iteration
            self._sums = np.zeros((max(4 * (at + steps), 2 * len(kept), _FEWEST), 3), np.int64)
            self._sums[: len(kept)] = kept
            self._origin = self.iteration
        self._end = max(self._end, start + steps)
        return at


def _course(request: Request) -> Course:
    course = request.course
    assert isinstance(course, Course)
    return course


def held_by(course: Course, over: int) -> int:
    """Blocks that a request holds after the first `over` iterations of its course."""
    return course.sums.item(over - 1, BLOCKS) if over > 0 else course.held


def _known(course: Course, over: int) -> int:
    """Tokens that other requests can find after the first `over` iterations of a course."""
    return course.tokens.item(over - 1) if over > 0 else course.known
