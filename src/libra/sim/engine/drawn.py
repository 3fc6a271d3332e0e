"""Requests that generate with drafts: as many tokens in an iteration as are accepted of those drafted, and one.

Invariant: what a request computes, holds and generates in each of its iterations is known when it comes, as if it were
alone; of the batch there are sums over its requests for each iteration to come. Who has fewer tokens in an iteration
than it wants, or none, comes anew with the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappush
from math import isqrt

import numpy as np

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.generation import Generation
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import Draws, Ints, Speculative

ATTENDED, BLOCKS, ROWS = range(3)
_FEWEST = 1024  # iterations for which there is room


class Course:
    """One request's iterations from `start` on."""

    __slots__ = ("blocks", "generated", "held", "known", "offset", "start", "sums", "tokens", "undrawn")

    def __init__(
        self,
        start: int,
        known: int,
        generated: int,
        held: int,
        tokens: Ints,
        blocks: Ints,
        sums: Ints,
        undrawn: int,
        offset: int,
    ) -> None:
        self.start = start
        self.known = known  # tokens that others may know of before it
        self.generated = generated  # before it
        self.held = held  # blocks, before it
        self.tokens = tokens  # of the context before each iteration, the one to compute next too
        self.blocks = blocks  # that it holds from each iteration on
        self.sums = sums  # what it adds to those of the batch
        self.undrawn = undrawn  # iterations that verify nothing: 1 if its first one does not
        self.offset = offset


class Drawn(Generation):
    """As vLLM schedules: a running request gets its next token and `num_speculative_tokens` drafts, or as many as
    `max_model_len` allows; the blocks for them, and for what the drafter looks ahead, stay when drafts are rejected."""

    __slots__ = ("_draws", "_end", "_length", "_offsets", "_origin", "_size", "_speculative", "_squares", "_sums")

    def __init__(self, config: EngineConfig, speculative: Speculative) -> None:
        super().__init__()
        self._speculative, self._draws = speculative, Draws(speculative)
        self._size, self._length = config.block_size, config.max_model_len
        self._sums = np.zeros((3, _FEWEST), np.int64)
        self._origin = self._end = 0  # iteration of the first column, and of the first that has nothing
        self._offsets = self._squares = 0

    @property
    def rows(self) -> int:
        return self._sums.item(ROWS, self.iteration - self._origin) if self.count else 0

    def spread(self, absent: Collection[Request] = ()) -> int:
        """Of contexts that all grow by the mean."""
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
            slots = min(tokens - 1 + row + self._speculative.lookahead, self._length)
            return max(slots, held_by(course, at) * size), tokens
        return held_by(course, at) * size, _known(course, at)

    def computed(self, request: Request, more: int = 0) -> int:
        course = _course(request)
        return _known(course, min(self.iteration + more - course.start, len(course.tokens)))

    def generated(self, request: Request, more: int = 0) -> int:
        course = _course(request)
        at = self.iteration + more - course.start
        if at <= 0:
            return course.generated
        return int(course.tokens[at]) - request.prompt_tokens if at < len(course.tokens) else request.output_tokens

    def row(self, request: Request, after: int = 0) -> int:
        course = _course(request)
        return int(course.sums[ROWS, self.iteration + after - course.start])

    def needs(self, request: Request, row: int) -> int:
        course = _course(request)
        at = self.iteration - course.start
        slots = min(int(course.tokens[at]) - 1 + row + self._speculative.lookahead, self._length)
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
        others = self._sums[ROWS, at : at + steps] != self._sums[ROWS, at]
        return int(others.argmax()) or steps

    def contexts(self, steps: int) -> Ints:
        at = self.iteration - self._origin
        return self._sums[ATTENDED, at : at + steps]

    def context_after(self, steps: int) -> int:
        return self._sums.item(ATTENDED, self.iteration - self._origin + steps) if self.count else 0

    def demand(self, steps: int = 1) -> int:
        at = self.iteration - self._origin
        if not self.count:
            return 0
        return self._sums.item(BLOCKS, at) if steps == 1 else int(self._sums[BLOCKS, at : at + steps].sum())

    def affordable(self, steps: int, blocks: int) -> int:
        at = self.iteration - self._origin
        needed = self._sums[BLOCKS, at : at + steps].cumsum()
        return steps if needed[-1] <= blocks else int(needed.searchsorted(blocks, side="right"))

    def advance(self, steps: int) -> list[Request]:
        self.iteration += steps
        self._look()
        return self._done()

    def _enter(self, request: Request, start: int, known: int, generated: int, held: int, first: int | None) -> None:
        """A request generates from the iteration `start` on. It holds `held` blocks, and others may know of its first
        `known` tokens; `first` tokens of it are in the first iteration, if not as many as it wants."""
        speculative, before = self._speculative, request.prompt_tokens + generated
        left = request.output_tokens - generated
        undrawn, gains = self._gains(request, left, first)
        total = gains.cumsum()
        steps = int(total.searchsorted(left)) + 1
        tokens = np.empty(steps, np.int64)
        tokens[0] = before
        np.add(total[: steps - 1], before, out=tokens[1:])
        sums = np.empty((3, steps), np.int64)
        rows = np.minimum(self._length - tokens, speculative.tokens_each, out=sums[ROWS])
        if first is not None:
            rows[0] = first
        attended = np.add(tokens, rows, out=sums[ATTENDED])
        attended -= 1
        blocks = np.minimum(attended + speculative.lookahead, self._length)
        blocks += self._size - 1
        blocks //= self._size
        if blocks[0] < held:  # a longer row before it had them
            np.maximum(blocks, held, out=blocks)
        sums[BLOCKS, 0] = blocks[0] - held
        np.subtract(blocks[1:], blocks[:-1], out=sums[BLOCKS, 1:])
        offset = before - round(speculative.mean_tokens * start)
        course = Course(start, known, generated, held, tokens, blocks, sums, undrawn, offset)
        self._put(request, course, start + steps - 1)
        if request.ask_at is not None:
            self.ask(request)

    def _gains(self, request: Request, left: int, first: int | None) -> tuple[int, Ints]:
        """Tokens that a request generates in each iteration, the `left` last ones at least, if the next one has `first`
        tokens of it, or as many as it wants. And in how many of them, 0 or 1, nothing is verified."""
        gains = self._draws.gains(request.number, request.verifications, left)
        if first == 1:
            return 1, np.concatenate((np.ones(1, np.int64), gains))
        if first is not None and left:
            gains[0] = min(int(gains[0]), first)
        return 0, gains

    def _put(self, request: Request, course: Course, last: int) -> None:
        """A request follows its course, and generates its last token with the iteration `last`."""
        request.course, request.last = course, last
        steps = course.sums.shape[1]
        at = self._room(course.start, steps)
        self._sums[:, at : at + steps] += course.sums
        heappush(self._ends, (last, request.admission, request))
        self._offsets += course.offset
        self._squares += course.offset * course.offset
        self.count += 1
        self._look()

    def _leave(self, request: Request) -> tuple[Course, int]:
        """Take a request out of the sums. Returns its course, and how many of its iterations are over."""
        course = _course(request)
        over = self.iteration - course.start
        rest = course.sums[:, max(over, 0) :]
        if rest.shape[1]:
            at = course.start + max(over, 0) - self._origin
            self._sums[:, at : at + rest.shape[1]] -= rest
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
        """The column of an iteration; from it on there is room for so many."""
        at = start - self._origin
        if at + steps >= self._sums.shape[1]:
            kept = self._sums[:, self.iteration - self._origin : max(self._end, self.iteration) - self._origin]
            at = start - self.iteration
            self._sums = np.zeros((3, max(4 * (at + steps), 2 * kept.shape[1], _FEWEST)), np.int64)
            self._sums[:, : kept.shape[1]] = kept
            self._origin = self.iteration
        self._end = max(self._end, start + steps)
        return at


def _course(request: Request) -> Course:
    course = request.course
    assert isinstance(course, Course)
    return course


def held_by(course: Course, over: int) -> int:
    """Blocks held when so many of the iterations are over."""
    return course.blocks.item(over - 1) if over > 0 else course.held


def _known(course: Course, over: int) -> int:
    """Tokens that others may know of when so many of the iterations are over."""
    return course.tokens.item(over - 1) if over > 0 else course.known
