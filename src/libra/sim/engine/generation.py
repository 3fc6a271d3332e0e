"""Requests that generate a token in every iteration, known by what stays the same.

Invariant: what changes with each iteration is kept in sums for all of them, and of a request only differences to the
count of iterations; so any number of iterations costs as much as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from libra.sim.engine.request import Request


class Generation:
    """`context` is the sum of the tokens that they attend to in the next iteration, the new ones too."""

    __slots__ = ("_ends", "_phases", "_size", "_stalled", "asks", "context", "count", "iteration")

    def __init__(self, block_size: int) -> None:
        self.iteration = 0  # the next one
        self.count = 0
        self.context = 0
        self._size = block_size
        self._phases = [0] * block_size  # requests that need a block in iterations of this remainder
        self._ends: list[tuple[int, int, Request]] = []  # (last iteration, seat, request), also of some that left
        self._stalled: set[Request] = set()  # in the next iteration they generate nothing
        self.asks: list[tuple[int, int, Request]] = []  # (iteration that reaches `ask_at`, seat, request), old ones too

    def add(self, request: Request) -> None:
        """From the next iteration on: its prompt is computed, and its first token (or the next one) is known."""
        iteration, tokens = self.iteration, request.target
        request.offset = offset = tokens - iteration
        request.last = last = iteration + request.output_tokens - request.generated - 1
        heappush(self._ends, (last, request.seat, request))
        self._phases[-offset % self._size] += 1
        self.count += 1
        self.context += tokens + 1
        if request.ask_at is not None:
            self.ask(request)

    def remove(self, request: Request) -> int:
        """Returns its computed tokens."""
        offset = request.offset
        tokens = offset + self.iteration
        self.context -= tokens + 1
        self.count -= 1
        self._phases[-offset % self._size] -= 1
        if request in self._stalled:
            self._stalled.remove(request)
            self.context -= 1  # it was put off by one already
        return tokens

    def computed(self, request: Request) -> int:
        """Tokens whose KV there is before the next iteration."""
        return request.offset + self.iteration

    def generated(self, request: Request) -> int:
        """Tokens before the next iteration."""
        return request.output_tokens - (request.last + 1 - self.iteration) + (request in self._stalled)

    def needs_block(self, request: Request) -> bool:
        """In the next iteration."""
        return (request.offset + self.iteration) % self._size == 0

    def stall(self, requests: set[Request]) -> None:
        """They generate nothing in the next iteration: everything of theirs is one iteration later."""
        self._stalled = requests
        for request in requests:
            self._phases[-request.offset % self._size] -= 1
            request.offset -= 1
            request.last += 1
            self._phases[-request.offset % self._size] += 1
            heappush(self._ends, (request.last, request.seat, request))
            if request.ask_at is not None:
                self.ask(request)

    def ask(self, request: Request) -> None:
        """Its `ask_at` is new, or comes in another iteration than before. Who ends with that token is not asked."""
        assert request.ask_at is not None
        if request.ask_at < request.output_tokens:
            heappush(self.asks, (_iteration_of(request, request.ask_at), request.seat, request))

    def attended(self, requests: Iterable[Request]) -> int:
        """Sum of the tokens that these attend to in the next iteration."""
        return sum(request.offset + self.iteration + 1 for request in requests)

    def steps_to_end(self) -> int:
        """Iterations until the first one has generated its last token. There must be one."""
        ends = self._ends
        while True:
            last, seat, request = ends[0]
            if request.seat == seat and request.last == last:
                return last + 1 - self.iteration
            heappop(ends)

    def steps_to_ask(self, most: int) -> int:
        """Iterations until the first one has generated its `ask_at` tokens; `most` if that is later."""
        asks = self.asks
        while asks:
            if _holds(asks[0]):
                return min(most, asks[0][0] + 1 - self.iteration)
            heappop(asks)
        return most

    def demand(self, steps: int = 1) -> int:
        """Blocks that the next iterations need."""
        size, phases = self._size, self._phases
        phase = self.iteration % size
        if steps == 1:
            return phases[phase]
        cycles, rest = divmod(steps, size)
        demand = cycles * self.count
        if phase + rest <= size:
            return demand + sum(phases[phase : phase + rest])
        return demand + sum(phases[phase:]) + sum(phases[: phase + rest - size])

    def affordable(self, steps: int, blocks: int) -> int:
        """How many of the next `steps` iterations `blocks` blocks last for."""
        size, count = self._size, self.count
        if (steps // size + 1) * count <= blocks:
            return steps
        cycles = blocks // count  # in each every request needs one block
        affordable = cycles * size
        if affordable >= steps:
            return steps
        left = blocks - cycles * count
        phase = self.iteration % size
        while affordable < steps:
            left -= self._phases[phase]
            if left < 0:
                break
            affordable += 1
            phase = phase + 1 if phase + 1 < size else 0
        return affordable

    def advance(self, steps: int) -> list[Request]:
        """These iterations are done. Returns whose last one was among them, in the order of their seats: they are still
        here."""
        if self._stalled:
            self.context += self.count - len(self._stalled)
            self._stalled = set()
        else:
            self.context += steps * self.count
        self.iteration = iteration = self.iteration + steps
        ends = self._ends
        done = []
        while ends and ends[0][0] < iteration:
            last, seat, request = heappop(ends)
            if request.seat == seat and request.last == last:
                done.append(request)
        return done

    def reached(self) -> list[Request]:
        """Who has generated its `ask_at` tokens by now, in the order of their seats; each is told once."""
        asks = self.asks
        asked = []
        while asks and asks[0][0] < self.iteration:
            entry = heappop(asks)
            if _holds(entry):
                request = entry[2]
                request.generated, request.ask_at = self.generated(request), None
                asked.append(request)
        return asked


def _iteration_of(request: Request, tokens: int) -> int:
    """The iteration that generates its token of this number, unless the request is put off."""
    return request.last - request.output_tokens + tokens


def _holds(entry: tuple[int, int, Request]) -> bool:
    """Whether this is still when its request reaches its `ask_at`."""
    iteration, seat, request = entry
    ask_at = request.ask_at
    return request.seat == seat and ask_at is not None and _iteration_of(request, ask_at) == iteration
