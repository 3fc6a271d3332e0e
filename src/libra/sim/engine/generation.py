"""Requests that generate: how many tokens each of them has, needs blocks for, and still has to come.

Invariant: the same iterations give the same counts, whether they are advanced one by one or together.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import isqrt

from libra.sim.engine.request import Request


class Generation:
    """The requests of a batch that generate: a token each in every iteration, so that any number of iterations costs as
    much as one.

    What changes with each iteration is kept in sums for all requests, and of one request only differences to the count
    of iterations. `asks` has whoever is to be asked about, at least; it is empty where nobody is.
    """

    __slots__ = (
        *("_ends", "_offsets", "_phases", "_size", "_squares"),
        *("asks", "context", "count", "iteration", "stalled"),
    )

    def __init__(self, block_size: int) -> None:
        self.iteration = 0  # the next one
        self.count = 0  # requests
        self.context = 0  # sum of the tokens that they attend to in the next iteration, the new ones too
        self._size = block_size
        self._phases = [0] * block_size  # requests that need a block in iterations of this remainder
        self._ends: list[tuple[int, int, Request]] = []  # (last iteration, admission, request), also of some that left
        self._offsets = self._squares = 0  # sums over the requests: contexts differ as their offsets do
        self.stalled: set[Request] = set()  # in the next iteration they generate nothing
        self.asks: list[tuple[int, int, Request]] = []  # (iteration that reaches `ask_at`, admission, request)

    @property
    def spread(self) -> int:
        """Requests times the standard deviation of their contexts, in whole tokens: the same in every iteration until
        one comes or goes."""
        return isqrt(self.count * self._squares - self._offsets * self._offsets)

    def add(self, request: Request) -> None:
        """Let a request generate from the next iteration on: its prompt is computed, and its first token (or the next
        one) is known."""
        iteration, tokens = self.iteration, request.target
        request.offset = offset = tokens - iteration
        request.last = last = iteration + request.output_tokens - request.generated - 1
        heappush(self._ends, (last, request.admission, request))
        self._phases[-offset % self._size] += 1
        self._offsets += offset
        self._squares += offset * offset
        self.count += 1
        self.context += tokens + 1
        if request.ask_at is not None:
            self.ask(request)

    def remove(self, request: Request) -> int:
        """Take a request out; returns its computed tokens."""
        offset = request.offset
        tokens = offset + self.iteration
        self.context -= tokens + 1
        self.count -= 1
        self._phases[-offset % self._size] -= 1
        self._offsets -= offset
        self._squares -= offset * offset
        if request in self.stalled:
            self.stalled.remove(request)
            self.context -= 1  # it was put off by one already
        return tokens

    def computed(self, request: Request) -> int:
        """Tokens of a request that have KV before the next iteration."""
        return request.offset + self.iteration

    def generated(self, request: Request) -> int:
        """Tokens that a request has generated before the next iteration."""
        return request.output_tokens - (request.last + 1 - self.iteration) + (request in self.stalled)

    def needs(self, request: Request) -> int:
        """Blocks that a request needs for the next iteration."""
        return int((request.offset + self.iteration) % self._size == 0)

    def stall(self, requests: set[Request]) -> None:
        """Let these requests generate nothing in the next iteration: each of their tokens is one iteration later."""
        self.stalled = requests
        for request in requests:
            self._phases[-request.offset % self._size] -= 1
            self._offsets -= 1
            self._squares -= 2 * request.offset - 1
            request.offset -= 1
            request.last += 1
            self._phases[-request.offset % self._size] += 1
            heappush(self._ends, (request.last, request.admission, request))
            if request.ask_at is not None:
                self.ask(request)

    def ask(self, request: Request) -> None:
        """Note that the `ask_at` of a request is new, or comes in another iteration than before. A request that ends
        with that token is not asked."""
        assert request.ask_at is not None
        if request.ask_at < request.output_tokens:
            heappush(self.asks, (_iteration_of(request, request.ask_at), request.admission, request))

    def attended(self, requests: Iterable[Request]) -> int:
        """Sum of the tokens that these attend to in the next iteration."""
        return sum(request.offset + self.iteration + 1 for request in requests)

    def steps_to_end(self) -> int:
        """Iterations until the first request has generated its last token. There must be one that generates."""
        ends = self._ends
        while True:
            last, admission, request = ends[0]
            if request.admission == admission and request.last == last:
                return last + 1 - self.iteration
            heappop(ends)

    def steps_to(self, request: Request, tokens: int) -> int:
        """Iterations until a request has generated so many tokens."""
        return tokens - self.generated(request)

    def steps_to_ask(self, most: int) -> int:
        """Iterations until the first request has generated its `ask_at` tokens; `most` if that is later."""
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
        """Count these iterations as done. Returns the requests that generated their last token in them, in the order of
        admission; they are still here."""
        if self.stalled:
            self.context += self.count - len(self.stalled)
            self.stalled = set()
        else:
            self.context += steps * self.count
        self.iteration = iteration = self.iteration + steps
        ends = self._ends
        done = []
        while ends and ends[0][0] < iteration:
            last, admission, request = heappop(ends)
            if request.admission == admission and request.last == last:
                done.append(request)
        return done

    def reached(self) -> list[Request]:
        """The requests that have generated their `ask_at` tokens by now, in the order of admission; each is returned
        once."""
        asks = self.asks
        asked: list[Request] = []
        while asks and asks[0][0] < self.iteration:
            entry = heappop(asks)
            if _holds(entry) and (not asked or asked[-1] is not entry[2]):  # it may be noted twice
                asked.append(entry[2])
        return asked


def _iteration_of(request: Request, tokens: int) -> int:
    """The iteration that generates the token of this number, unless the request is put off."""
    return request.last - request.output_tokens + tokens


def _holds(entry: tuple[int, int, Request]) -> bool:
    """Whether the request of an entry still reaches its `ask_at` in that iteration."""
    iteration, admission, request = entry
    ask_at = request.ask_at
    return request.admission == admission and ask_at is not None and _iteration_of(request, ask_at) == iteration
