"""Drafts under asynchronous scheduling: an iteration is scheduled before the accepted drafts of the previous iteration
are known.

Invariant: a request is scheduled as if all its drafts in flight are accepted. For `max_model_len` and for blocks, all
these drafts count as part of its context. The request also keeps the blocks of drafts that are then rejected. Only
accepted drafts count as computed, and become tokens. Drafts in flight are vLLM's `num_output_placeholders`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappush

import numpy as np

from libra.sim.engine.drawn import ATTENDED, BLOCKS, ROWS, Course, Drawn, held_by
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import Ints


class CourseAhead(Course):
    """The iterations from `start` on that include one request. They end with the request's last iteration, or with a
    useless one after it. They end earlier at an iteration whose tokens `max_model_len` may limit, since its tokens
    depend on the drafts accepted before."""

    __slots__ = ("before", "overruns", "positions", "since", "whole")

    before: int  # tokens generated before the iteration that was under way when the course was made
    since: int  # the next iteration to be decided when the course was made: `start`, or `start` - 1
    positions: Ints  # tokens of the context before each iteration if all drafts under way are accepted
    whole: bool  # the course reaches the request's last iteration
    overruns: bool  # the course also includes the useless iteration after the last one

    @property
    def end(self) -> int:
        """The request's last iteration; if the course ends before it, the first iteration that is not known."""
        return self.start + len(self.tokens) - 1 - self.whole


class DrawnAhead(Drawn):
    """`Drawn` under the rules of vLLM's `AsyncScheduler`."""

    __slots__ = ()

    def add(self, request: Request, slots: int) -> None:
        generated, held = request.generated, -(-slots // self._size)
        self._follow(request, self.iteration, generated, generated - 1, held, request.target + request.padding)
        if request.ask_at == generated < request.output_tokens:  # the token to ask at is under way
            heappush(self.asks, (self.iteration - 1, request.admission, request))

    def remove(self, request: Request, row: int = 0) -> tuple[int, int]:
        known = max(request.prompt_tokens + self.generated(request) - (not row), request.target)
        course, at = self._leave(request)
        slots = held_by(course, at) * self._size
        return max(slots, self._slots(course, at, row)) if row else slots, known

    def computed(self, request: Request, more: int = 0) -> int:
        return max(request.prompt_tokens + self.generated(request, more) - 1, request.target)

    def generated(self, request: Request, more: int = 0) -> int:
        course = _course(request)
        if self.iteration + more < course.since:
            return course.before
        at = max(self.iteration + more - course.start, 0)
        return course.tokens.item(min(at, len(course.tokens) - 1)) - request.prompt_tokens

    def needs(self, request: Request, row: int) -> int:
        course = _course(request)
        at = self.iteration - course.start
        return max(-(-self._slots(course, at, row) // self._size) - held_by(course, at), 0)

    def stall(self, skipped: set[Request], cut: Mapping[Request, int]) -> int:
        for request in skipped:
            self._again(request, self.iteration + 1, None)
        for request, row in cut.items():
            self._again(request, self.iteration, row)
        self.stalled = skipped
        return self.context

    def rest(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._again(request, self.iteration, None)

    def overruns(self, request: Request, longest: int) -> bool:
        return _course(request).overruns

    def reaches(self, request: Request, tokens: int) -> int:
        course, context = _course(request), request.prompt_tokens + tokens
        if context <= course.tokens[0]:
            return course.since - 1
        return course.start + int(course.tokens.searchsorted(context)) - 1

    def ask(self, request: Request) -> None:
        assert request.ask_at is not None
        if request.ask_at < request.output_tokens:
            iteration = self.reaches(request, request.ask_at)
            if self.iteration <= iteration < _course(request).end:
                heappush(self.asks, (iteration, request.admission, request))

    def advance(self, steps: int) -> list[Request]:
        self.stalled = set()
        done = super().advance(steps)
        self.at_limit.update(request for request in done if not _course(request).whole)
        return [request for request in done if _course(request).whole]

    def _again(self, request: Request, start: int, first: int | None) -> None:
        """Let a request continue from the iteration `start` on. `start` is the next iteration only if the request has
        `first` tokens in it, or if no iteration is in flight."""
        generated, before = self.generated(request), self.generated(request, -1)
        course, at = self._leave(request)
        position = request.prompt_tokens + generated - 1 if first is None else course.positions.item(at)
        self._follow(request, start, generated, before, held_by(course, at), position, first)

    def _follow(
        self,
        request: Request,
        start: int,
        generated: int,
        before: int,
        held: int,
        position: int,
        first: int | None = None,
    ) -> None:
        """Let a request generate from the iteration `start` on, scheduled as if its context had `position` tokens. It
        gets `first` tokens in iteration `start`; None: all that it wants. It holds `held` blocks."""
        each, longest = self._each, self._length
        undrawn, tokens = self._tokens(request, generated, first)
        context, steps = tokens.item(0), len(tokens) - 1
        rows = np.full(steps + 1, each, np.int64)
        if first is not None:
            rows[0] = first
        positions = np.empty(steps + 1, np.int64)
        positions[0] = position
        np.add(tokens[:-1], rows[:-1], out=positions[1:])
        positions[1:] -= 1
        given = int(first is not None)
        limited = given + int(positions[given:].searchsorted(longest - 1 - each, side="right"))
        whole = limited >= steps
        if not whole:
            steps = limited
            tokens, rows, positions = tokens[: steps + 1], rows[: steps + 1], positions[: steps + 1]
        rows[steps] = min(rows.item(steps), longest - 1 - positions.item(steps))
        surely = request.stop == "length" and steps and tokens[steps - 1] + 1 == tokens[steps]
        overruns = whole and rows.item(steps) > 0 and not surely
        columns = steps + (overruns or not whole)
        slots = np.minimum(positions[:columns] + rows[:columns] + self._lookahead, longest)
        sums = np.empty((columns, 3), np.int64)
        sums[:, ROWS] = rows[:columns]
        sums[:, ATTENDED] = tokens[:columns] + rows[:columns] - 1
        sums[:, BLOCKS] = np.maximum(-(-slots // self._size), held)  # an earlier iteration may have taken more
        offset = context - round(self._mean * start)
        course = CourseAhead(start, context - 1, generated, held, tokens, sums, undrawn, offset)
        course.before, course.since, course.positions = before, self.iteration, positions
        course.whole, course.overruns = whole, overruns
        self._put(request, course, start + steps - 1)
        if not steps and not whole and start == self.iteration:
            self.at_limit.add(request)
        if request.ask_at is not None:
            self.ask(request)

    def _leave(self, request: Request) -> tuple[CourseAhead, int]:
        course = _course(request)
        self.at_limit.discard(request)
        _, over = super()._leave(request)
        return course, over

    def _slots(self, course: CourseAhead, at: int, row: int) -> int:
        """Tokens for which a request holds blocks in the iteration `at` of its course, if it has `row` tokens in it."""
        return min(course.positions.item(at) + row + self._lookahead, self._length)


def _course(request: Request) -> CourseAhead:
    course = request.course
    assert isinstance(course, CourseAhead)
    return course
