"""The generating requests of a batch: how many tokens each has and still generates, and the blocks that it needs.

Invariant: iterations advanced together give the same counts as iterations advanced one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import isqrt

from libra.sim.engine.request import Request


class Generation(ABC):
    """The requests of a batch that generate. When a request joins, its tokens in each iteration are known, so advancing
    many iterations takes no more work than one.

    `asks` includes every request with an `ask_at`. It may keep entries that no longer hold, but is empty if no request
    has an `ask_at`.
    """

    __slots__ = ("_ends", "asks", "at_limit", "context", "count", "iteration", "stalled")

    def __init__(self) -> None:
        self.iteration = 0  # number of the next iteration
        self.count = 0  # number of requests
        self.context = 0  # tokens that all requests attend to in the next iteration, new ones included
        self._ends: list[tuple[int, int, Request]] = []  # (last iteration, admission, request), some of them outdated
        self.asks: list[tuple[int, int, Request]] = []  # (iteration that reaches `ask_at`, admission, request)
        self.stalled: set[Request] = set()  # requests that generate nothing in the next iteration
        self.at_limit: set[Request] = set()  # requests with fewer tokens in the next iteration, due to `max_model_len`

    # Requests

    @abstractmethod
    def add(self, request: Request, slots: int) -> None:
        """Let a request generate from the next iteration on. Its whole context is computed except the last token, which
        is known. The request holds blocks for `slots` tokens."""

    @abstractmethod
    def remove(self, request: Request, row: int = 0) -> tuple[int, int]:
        """Take out a request that has `row` tokens in the next iteration. Returns (tokens for which it holds blocks,
        tokens whose KV other requests can find)."""

    @abstractmethod
    def computed(self, request: Request, more: int = 0) -> int:
        """Tokens of a request whose KV other requests can find after `more` iterations."""

    @abstractmethod
    def generated(self, request: Request, more: int = 0) -> int:
        """Tokens that a request has generated after `more` iterations."""

    @abstractmethod
    def row(self, request: Request, after: int = 0) -> int:
        """Tokens of a request in the iteration `after` iterations after the next one."""

    @abstractmethod
    def needs(self, request: Request, row: int) -> int:
        """Blocks that a request needs for `row` tokens in the next iteration."""

    @abstractmethod
    def stall(self, skipped: set[Request], cut: Mapping[Request, int]) -> int:
        """Leave the `skipped` requests out of the next iteration, and give each request in `cut` only that many tokens.
        Returns the tokens that all requests attend to."""

    @abstractmethod
    def reaches(self, request: Request, tokens: int) -> int:
        """The iteration with which a request has generated `tokens` tokens, if it is not stalled before."""

    def steps_to(self, request: Request, tokens: int) -> int:
        """Iterations until a request has generated `tokens` tokens; 0 or less if it already has."""
        return self.reaches(request, tokens) + 1 - self.iteration

    def ask(self, request: Request) -> None:
        """Add a request to `asks`, because its `ask_at` is new or will be reached in another iteration than before. A
        request that ends with that token is not added."""
        assert request.ask_at is not None
        if request.ask_at < request.output_tokens:
            iteration = self.reaches(request, request.ask_at)
            if iteration < request.last:
                heappush(self.asks, (iteration, request.admission, request))

    def overruns(self, request: Request, longest: int) -> bool:
        """Whether a request is also in the iteration after its last one. This happens with asynchronous scheduling, if
        the request's end is unknown when that iteration is scheduled. Contexts have at most `longest` tokens."""
        return request.stop == "eos" and request.prompt_tokens + request.output_tokens < longest

    def rest(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Record that no iteration is in flight, so that all tokens are known when the next one is scheduled.
        `requests` are all generating requests."""

    # Iterations

    @abstractmethod
    def spread(self, absent: Collection[Request] = ()) -> int:
        """The number of requests times the standard deviation of their contexts, in whole tokens. It changes only when
        a request joins or leaves. `absent` requests do not count."""

    @property
    def rows(self) -> int:
        """Tokens of the next iteration."""
        return self.count

    def alike(self, steps: int) -> int:
        """Number of consecutive iterations, at most `steps`, that have as many tokens as the next iteration."""
        return steps

    @abstractmethod
    def contexts(self, steps: int) -> list[int] | None:
        """`context` in each of the next `steps` iterations; None: it grows by `count` with each iteration."""

    @abstractmethod
    def context_after(self, steps: int) -> int:
        """`context` after the next `steps` iterations, if no request ends before."""

    @abstractmethod
    def demand(self, steps: int = 1) -> int:
        """New blocks that the next `steps` iterations need."""

    @abstractmethod
    def affordable(self, steps: int, blocks: int) -> int:
        """Number of the next `steps` iterations for which `blocks` blocks suffice."""

    @abstractmethod
    def advance(self, steps: int) -> list[Request]:
        """Count the next `steps` iterations as done. Returns the requests whose last token they generated, in the order
        of admission; they are not taken out."""

    def steps_to_end(self) -> int:
        """Iterations until the first request has generated its last token. At least one request must generate."""
        ends = self._ends
        while True:
            last, admission, request = ends[0]
            if request.admission == admission and request.last == last:
                return last + 1 - self.iteration
            heappop(ends)

    def steps_to_ask(self, most: int) -> int:
        """Iterations until the first request has generated its `ask_at` tokens, but at most `most`."""
        asks = self.asks
        while asks:
            if self._holds(asks[0]):
                return min(most, asks[0][0] + 1 - self.iteration)
            heappop(asks)
        return most

    def reached(self) -> list[Request]:
        """The requests that have generated their `ask_at` tokens since the last call, in the order of admission."""
        asks = self.asks
        asked: list[Request] = []
        while asks and asks[0][0] < self.iteration:
            entry = heappop(asks)
            if self._holds(entry) and (not asked or asked[-1] is not entry[2]):  # `asks` may list a request twice
                asked.append(entry[2])
        return asked

    def _done(self) -> list[Request]:
        """The requests whose last iteration is over, in the order of admission."""
        ends, iteration = self._ends, self.iteration
        done: list[Request] = []
        while ends and ends[0][0] < iteration:
            last, admission, request = heappop(ends)
            if request.admission == admission and request.last == last and (not done or done[-1] is not request):
                done.append(request)  # `_ends` may list a request twice
        return done

    def _holds(self, entry: tuple[int, int, Request]) -> bool:
        """Whether the request of an entry of `asks` still reaches its `ask_at` in the entry's iteration."""
        iteration, admission, request = entry
        ask_at = request.ask_at
        return request.admission == admission and ask_at is not None and self.reaches(request, ask_at) == iteration


class Even(Generation):
    """Requests that generate one token each in every iteration.

    Values that change with each iteration are kept as sums over all requests. A request itself keeps only a constant:
    its computed tokens minus the number of iterations.
    """

    __slots__ = ("_needs", "_offsets", "_phases", "_size", "_squares", "_starts")

    def __init__(self, block_size: int, starts: Sequence[int] = (0,)) -> None:
        """A request needs one block for each entry of `starts` that equals its number of tokens modulo `block_size`."""
        super().__init__()
        self._size = block_size
        self._starts = tuple(starts)
        self._needs = [0] * block_size
        for start in starts:
            self._needs[start] += 1
        self._phases = [0] * block_size  # blocks that all requests need, by the iteration modulo `block_size`
        self._offsets = self._squares = 0  # sums of the requests' offsets, which differ as their contexts do

    def spread(self, absent: Collection[Request] = ()) -> int:
        count, offsets, squares = self.count, self._offsets, self._squares
        for request in absent:
            count, offsets, squares = count - 1, offsets - request.offset, squares - request.offset * request.offset
        return isqrt(count * squares - offsets * offsets)

    def add(self, request: Request, slots: int) -> None:
        iteration, tokens = self.iteration, request.target
        request.offset = offset = tokens - iteration
        request.last = last = iteration + request.output_tokens - request.generated - 1
        heappush(self._ends, (last, request.admission, request))
        for start in self._starts:
            self._phases[(start - offset) % self._size] += 1
        self._offsets += offset
        self._squares += offset * offset
        self.count += 1
        self.context += tokens + 1
        if request.ask_at is not None:
            self.ask(request)

    def remove(self, request: Request, row: int = 0) -> tuple[int, int]:
        offset = request.offset
        tokens = offset + self.iteration
        self.context -= tokens + 1
        self.count -= 1
        for start in self._starts:
            self._phases[(start - offset) % self._size] -= 1
        self._offsets -= offset
        self._squares -= offset * offset
        if request in self.stalled:
            self.stalled.remove(request)
            self.context -= 1  # `stall` has moved its offset by one already
        return tokens + row, tokens + row

    def computed(self, request: Request, more: int = 0) -> int:
        return request.offset + self.iteration + more

    def generated(self, request: Request, more: int = 0) -> int:
        return request.output_tokens - (request.last + 1 - self.iteration) + (request in self.stalled) + more

    def row(self, request: Request, after: int = 0) -> int:
        return 1

    def needs(self, request: Request, row: int) -> int:
        return self._needs[(request.offset + self.iteration) % self._size]

    def stall(self, skipped: set[Request], cut: Mapping[Request, int]) -> int:
        context = self.context - sum(request.offset + self.iteration + 1 for request in skipped)
        self.stalled = skipped
        for request in skipped:
            for start in self._starts:
                self._phases[(start - request.offset) % self._size] -= 1
                self._phases[(start - request.offset + 1) % self._size] += 1
            self._offsets -= 1
            self._squares -= 2 * request.offset - 1
            request.offset -= 1
            request.last += 1
            heappush(self._ends, (request.last, request.admission, request))
            if request.ask_at is not None:
                self.ask(request)
        return context

    def reaches(self, request: Request, tokens: int) -> int:
        return request.last - request.output_tokens + tokens

    def contexts(self, steps: int) -> None:
        return None

    def context_after(self, steps: int) -> int:
        return self.context + steps * self.count

    def demand(self, steps: int = 1) -> int:
        size, phases = self._size, self._phases
        phase = self.iteration % size
        if steps == 1:
            return phases[phase]
        cycles, rest = divmod(steps, size)
        demand = cycles * self.count * len(self._starts)
        if phase + rest <= size:
            return demand + sum(phases[phase : phase + rest])
        return demand + sum(phases[phase:]) + sum(phases[: phase + rest - size])

    def affordable(self, steps: int, blocks: int) -> int:
        size, count = self._size, self.count * len(self._starts)
        if (steps // size + 1) * count <= blocks:
            return steps
        cycles = blocks // count  # in each cycle every request needs a block for each start
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
        if self.stalled:
            self.context += self.count - len(self.stalled)
            self.stalled = set()
        else:
            self.context += steps * self.count
        self.iteration += steps
        return self._done()
