"""One engine: which requests are in its next iterations, and when those end.

Invariant: the rules are those of vLLM's V1 scheduler, iteration by iteration. Running requests come first, in the order
of their admission, a token each or the next chunk of a prompt; when blocks run out the last one (or the one of lowest
priority) is preempted, to compute its context again later. If none was preempted, waiting requests are admitted in
order while budget, seats and blocks last. As long as nothing can change but the number of tokens, iterations are not
visited: requests that generate are known by what stays the same, and their sums are advanced together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import sqrt

from libra.sim.engine_config import EngineConfig
from libra.sim.iteration_cost import UNLIMITED, Chunk, IterationCost
from libra.sim.memory import BlockPool, Owner
from libra.sim.request import Request


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration did, for those who want to look. Requests are told by their numbers."""

    engine: int
    start: int  # ticks
    end: int
    scheduled: tuple[tuple[int, int], ...]  # (request, tokens), in the scheduler's order
    preempted: tuple[int, ...]
    cached: tuple[tuple[int, int], ...]  # (request, tokens found), of those admitted
    free_blocks: int  # after scheduling


@dataclass(frozen=True, slots=True)
class Pause:
    """An engine stops between two iterations, for new weights."""

    until: Callable[[int], int]  # tick at which it goes on, told the tick at which it stopped
    refresh: bool  # contexts are computed again, with the new weights


class Engine:
    """Driven from outside: `plan` says when the next thing ends, `commit` makes it so at that tick.

    `submit`, `cancel` and `pause` may come at any tick in between, and return True when they moved the end forward.
    """

    __slots__ = (
        "_blocked",
        "_cancelled",
        "_context",
        "_cost",
        "_decoding",
        "_due",
        "_finishing",
        "_heap",
        "_iteration",
        "_most_steps",
        "_partial",
        "_pauses",
        "_phases",
        "_pieces",
        "_running",
        "_seats",
        "_single_steps",
        "_stalled",
        "_taken",
        "_waiting",
        "_writers",
        "busy",
        "busy_ticks",
        "config",
        "end",
        "events",
        "held_ticks",
        "index",
        "iterations",
        "load_tokens",
        "pool",
        "preemptions",
        "start",
        "steps",
        "trace",
        "version",
    )

    def __init__(self, config: EngineConfig, cost: IterationCost, index: int = 0, *, exact: bool = False) -> None:
        self.config = config
        self.index = index
        self.pool = BlockPool(config.kv_blocks, config.block_size, config.enable_prefix_caching)
        self.trace: Callable[[Iteration], None] | None = None
        self.busy = False
        self.start = self.end = 0  # of what is planned, ticks
        self.steps = 0  # iterations planned that only decode; 0: one of another kind, or a pause
        self.version = 0  # of the plan
        self.load_tokens = 0  # prompts of the requests accepted and not finished
        self.events = self.iterations = self.preemptions = self.busy_ticks = 0
        self.held_ticks = 0  # blocks held, times ticks, times 2; between two events they are taken to grow evenly
        self._cost = cost
        self._most_steps = 1 if exact else UNLIMITED
        self._single_steps = False  # never more than one iteration is decided at a time
        self._waiting: deque[Request] | list[tuple[int, int, int, Request]] = deque() if config.policy == "fcfs" else []
        self._running: dict[Request, None] = {}  # in the order of admission
        self._partial: Request | None = None  # the one whose prompt is not computed yet: always the last admitted
        self._seats = 0  # admissions so far
        self._blocked = False  # the head of the queue does not fit, nor will it before something is let go
        self._cancelled: list[Request] = []
        self._due: list[Pause] = []
        self._pauses: Pause | None = None
        self._writers: dict[Owner, Request] = {}  # who generates on a chain
        # Requests that generate: how many, the sum of the tokens they attend to in the next iteration, and the
        # iterations (modulo the block size) in which each needs a block.
        self._iteration = 0
        self._decoding = 0
        self._context = 0
        self._phases = [0] * config.block_size
        self._heap: list[tuple[int, int, Request]] = []  # (last iteration, seat, request)
        # What is planned.
        self._pieces: list[tuple[int, int, int, int]] = []  # (first step, its start, its ticks, growth a step)
        self._taken = 0  # blocks
        self._stalled: set[Request] = set()  # they generate, but not in this iteration
        self._finishing: list[Request] = []

    # What comes from outside

    def submit(self, request: Request, now: int) -> bool:
        """Queue a request, or refuse it (its status says so)."""
        config = self.config
        request.engine = self.index
        room = config.max_model_len - request.prompt_tokens
        if room < 1 or request.prompt_tokens < 1 or request.output_tokens < 1:
            request.status, request.reason, request.finish = "refused", self._refusal(request), now
            return False
        if request.output_tokens > room:
            request.output_tokens = room
        if self.pool.caching:
            request.path = self.pool.path(request)
        self.load_tokens += request.prompt_tokens
        waiting = self._waiting
        if isinstance(waiting, deque):
            unchanged = self._blocked and len(waiting) > 0
            waiting.append(request)
        else:
            heappush(waiting, (request.priority, request.arrival, request.number, request))
            unchanged = self._blocked and waiting[0][3] is not request
        if unchanged:
            return False
        self._blocked = False
        if self.steps <= 1 or not self.busy or len(self._running) >= config.max_num_seqs:
            return False
        return self._cut(now)

    def cancel(self, request: Request, now: int) -> bool:
        """Stop a request at the end of the iteration that is under way."""
        if request.status not in ("waiting", "running"):
            return False
        if not self.busy:
            self._cancel(request, now)
            return False
        self._cancelled.append(request)
        return self._cut(now)

    def pause(self, pause: Pause, now: int) -> bool:
        """Stop at the end of the iteration that is under way, until the pause is over."""
        self._due.append(pause)
        return self._cut(now)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def unfinished(self) -> list[Request]:
        """Requests accepted and not finished: running ones first."""
        waiting = self._waiting
        queued = list(waiting) if isinstance(waiting, deque) else [entry[3] for entry in sorted(waiting)]
        return [*self._running, *queued]

    # What happens next

    def plan(self, now: int) -> int | None:
        """Decide at an iteration's boundary what to do until when. None: there is nothing to do."""
        self.version += 1
        if self._cancelled:
            self._cancel_all(now)
        self.steps = 0
        self.start = now
        if self._due:
            self._pauses = self._due.pop(0)
            self.busy = True
            self.end = self._pauses.until(now)
            return self.end
        running = self._running
        if not running and not self._waiting:
            self.busy = False
            return None
        self.busy = True
        self.events += 1
        demand = self._phases[self._iteration % self.config.block_size]
        if (
            self._partial is None
            and demand <= self.pool.free
            and (not self._waiting or self._blocked or len(running) >= self.config.max_num_seqs)
        ):
            self._plan_steps(now, 0)
        else:
            self._plan_iteration(now)
        return self.end

    def commit(self) -> list[Request]:
        """Make happen what was planned; returns the requests that finished with it, in order."""
        self.busy = False
        now = self.end
        if self._pauses is not None:
            if self._pauses.refresh:
                self._refresh()
            self._pauses = None
            return []
        self.busy_ticks += now - self.start
        steps = self.steps
        if steps:
            if self.trace is not None:
                self._trace_steps()
            demand = self._demand(steps) - self._taken
            pool = self.pool
            self.held_ticks += (2 * (pool.blocks - pool.blank - pool.findable) + demand) * (now - self.start)
            if demand:
                pool.take(demand)
            self._context += steps * self._decoding
        else:
            self.held_ticks += 2 * self.pool.held * (now - self.start)
            steps = 1
            self._context += self._decoding - len(self._stalled)
            if self._stalled:
                self._stalled = set()
        self._iteration += steps
        self.iterations += steps
        done: list[Request] = []
        iteration = self._iteration
        heap = self._heap
        while heap and heap[0][0] < iteration:
            last, seat, request = heappop(heap)
            if request.seat == seat and request.last == last:
                tokens = self._stop_decoding(request)
                self._finish(request, tokens, now)
                done.append(request)
        if self._finishing:
            for request in self._finishing:
                if request.first_token is None:
                    request.prefill_end = request.first_token = now
                request.generated += 1
                if request.generated < request.output_tokens:
                    self._start_decoding(request)
                else:
                    self._finish(request, request.target, now)
                    done.append(request)
            self._finishing = []
        return done

    # Iterations that only decode

    def _plan_steps(self, now: int, taken: int) -> None:
        """Iterations that do nothing but generate, until one of the requests is done or blocks run out.

        `taken` blocks of the first iteration's demand have been taken already.
        """
        self._taken = taken
        iteration, decoding = self._iteration, self._decoding
        heap = self._heap
        while True:
            last, seat, request = heap[0]
            if request.seat == seat and request.last == last:
                break
            heappop(heap)
        steps = last - iteration + 1
        if steps > self._most_steps:
            steps = self._most_steps
        if steps > 1:
            steps = self._affordable(steps)
        context = self._context
        planned, at = 0, now
        pieces: list[tuple[int, int, int, int]] = []
        self._pieces = pieces
        while True:
            base, slope, limit = self._cost.line(decoding, context)
            first = base + slope * context
            growth = slope * decoding
            count = steps - planned
            if context + count * decoding > limit:
                count = -(-(limit - context) // decoding)
            pieces.append((planned, at, first, growth))
            at += count * first + growth * (count * (count - 1) // 2)
            planned += count
            if planned == steps:
                break
            context += count * decoding
        self.steps = steps
        self.end = at

    def _affordable(self, steps: int) -> int:
        """How many of the next `steps` iterations there are free blocks for."""
        free, decoding, size = self.pool.free + self._taken, self._decoding, self.config.block_size
        if (steps // size + 1) * decoding <= free:
            return steps
        cycles = free // decoding  # in each every request needs one block
        affordable = cycles * size
        if affordable >= steps:
            return steps
        left = free - cycles * decoding
        phase = self._iteration % size
        while affordable < steps:
            left -= self._phases[phase]
            if left < 0:
                break
            affordable += 1
            phase = phase + 1 if phase + 1 < size else 0
        return affordable

    def _demand(self, steps: int) -> int:
        """Blocks that the next `steps` iterations need."""
        size = self.config.block_size
        phases = self._phases
        cycles, rest = divmod(steps, size)
        demand = cycles * self._decoding
        phase = self._iteration % size
        if phase + rest <= size:
            return demand + sum(phases[phase : phase + rest])
        return demand + sum(phases[phase:]) + sum(phases[: phase + rest - size])

    def _cut(self, now: int) -> bool:
        """End the planned iterations at the first boundary at or after `now`. True: that is sooner."""
        if not self.busy or self.steps <= 1:
            return False
        before = self.steps
        pieces = self._pieces
        while len(pieces) > 1 and pieces[-1][1] >= now:
            self.steps, self.end, _, _ = pieces.pop()
        planned, at, first, growth = pieces[-1]
        most = self.steps - planned
        if at + (most - 1) * first + growth * ((most - 1) * (most - 2) // 2) >= now:
            count = _invert(first, growth, now - at, most)
            self.steps = planned + count
            self.end = at + count * first + growth * (count * (count - 1) // 2)
        if self.steps == before:
            return False
        self.version += 1
        return True

    # One iteration of any kind

    def _plan_iteration(self, now: int) -> None:
        config, pool = self.config, self.pool
        running = self._running
        order = self._members() if self.trace is not None else ()
        iteration = self._iteration
        demand = self._phases[iteration % config.block_size]
        decoding, context = self._decoding, self._context
        chunks: list[Chunk] = []
        partial = self._partial
        chunk = blocks = 0
        if partial is not None:
            chunk = min(partial.target - partial.computed, config.max_num_batched_tokens - decoding)
            blocks = config.blocks(partial.computed + chunk) - config.blocks(partial.computed)
        preempted: Sequence[Request] = ()
        skipped: set[Request] = set()
        if demand + blocks <= pool.free:
            pool.take(demand + blocks)
        else:
            preempted, skipped, chunk = self._preempt_for_room()
            decoding = self._decoding - len(skipped)
            context = self._context - sum(request.offset + iteration + 1 for request in skipped)
            if decoding or chunk:
                self._stall(skipped)
        partial = self._partial
        if partial is not None and chunk:
            chunks.append((chunk, partial.computed))
            self._advance(partial, chunk)
        cached: list[tuple[int, int]] = []
        if not preempted:
            budget = config.max_num_batched_tokens - decoding - chunk
            self._admit(budget, now, chunks, cached)
        if chunks:
            self.end = self._through(now, self._cost.mixed(decoding, context, chunks))
        elif not decoding:
            self.end = now  # the only one that was looked at was preempted
        elif preempted or self._single_steps:
            base, slope, _ = self._cost.line(decoding, context)
            self.end = self._through(now, base + slope * context)
        else:
            self._plan_steps(now, demand)
            return
        if self.trace is not None:
            gone = {*preempted, *skipped}
            done = [(request, 1) for request in order if request not in gone and request is not partial]
            if partial is not None and chunk and partial in order:
                done.append((partial, chunk))
            admitted = list(running)[len(running) - len(cached) :] if cached else []
            done += zip(admitted, (new for new, _ in chunks[len(chunks) - len(cached) :]), strict=True)
            self.trace(
                Iteration(
                    self.index,
                    now,
                    self.end,
                    tuple((request.number, tokens) for request, tokens in done),
                    tuple(request.number for request in preempted),
                    tuple(cached),
                    pool.free,
                )
            )
        if not decoding and not chunks:
            if preempted:
                self._plan_iteration(now)
            else:
                self._nothing_fits()

    def _nothing_fits(self) -> None:
        raise AssertionError(f"engine {self.index}: nothing fits, and nothing will be let go")

    def _through(self, now: int, ticks: int) -> int:
        """When an iteration that takes so long ends."""
        return now + ticks

    def _advance(self, request: Request, chunk: int) -> None:
        """A chunk of the prompt is in this iteration, with blocks for it taken."""
        request.computed += chunk
        if request.chain is not None and self.pool.caching:
            self._write(request, request.computed)
        if request.computed == request.target:
            self._finishing.append(request)
            self._partial = None
        else:
            self._partial = request

    def _admit(self, budget: int, now: int, chunks: list[Chunk], cached: list[tuple[int, int]]) -> None:
        config, pool, waiting, running = self.config, self.pool, self._waiting, self._running
        size = config.block_size
        self._blocked = False
        while waiting and budget > 0 and len(running) < config.max_num_seqs:
            request = waiting[0] if isinstance(waiting, deque) else waiting[0][3]
            room = self._room(request, budget)
            if room is None:
                # It stays so while free blocks only become fewer: unless other prompts took from the budget, another
                # request writes its context, or its first chunk alone counts, which needs the more the more is found.
                self._blocked = not chunks and config.reserve_full_prompt and not self._is_written(request)
                break
            if isinstance(waiting, deque):
                waiting.popleft()
            else:
                heappop(waiting)
            found, new = room
            tokens = found * size
            if found:
                pool.hold(request.path, found)
            pool.take(-(-(tokens + new) // size) - found)
            if request.scheduled is None:
                request.scheduled = now
                request.cached_tokens = tokens
            self._seats += 1
            request.seat = self._seats
            request.status = "running"
            request.written = found
            request.computed = tokens
            request.target = request.prompt_tokens + request.generated
            running[request] = None
            chunks.append((new, tokens))
            cached.append((request.number, tokens))
            budget -= new
            self._advance(request, new)

    def _computed(self, request: Request) -> int:
        """Tokens of a request that generates."""
        return request.offset + self._iteration

    def _is_written(self, request: Request) -> bool:
        """Whether another request generates on a chain that this one's context follows."""
        writers = self._writers
        if writers:
            for owner, _ in request.path:
                if owner in writers:
                    return True
        return False

    def _room(self, request: Request, budget: int) -> tuple[int, int] | None:
        """(blocks found, tokens to compute now) of a request that can be admitted."""
        config, pool = self.config, self.pool
        size = config.block_size
        tokens = request.prompt_tokens + request.generated
        found = unheld = 0
        # A request without a chain finds only what it computed itself, before it was preempted.
        if pool.caching and (request.chain is not None or request.preemptions):
            if self._writers:
                for owner, _ in request.path:
                    writer = self._writers.get(owner)
                    if writer is not None:
                        self._write(writer, self._computed(writer))
            found, unheld = pool.find(request.path, (tokens - 1) // size)
        new = tokens - found * size
        needed = -(-tokens // size)
        if new > budget:
            if not config.enable_chunked_prefill:
                return None
            new = budget
            if not config.reserve_full_prompt:
                needed = -(-(found * size + new) // size)
        free = pool.free
        if config.watermark and self._running:
            free -= config.watermark_blocks
        return None if needed - found + unheld > free else (found, new)

    # Preemption

    def _preempt_for_room(self) -> tuple[list[Request], set[Request], int]:
        """Give blocks to the running requests in order. Returns who was preempted, who runs but is not in this
        iteration, and the chunk of the partial prompt."""
        config, pool = self.config, self.pool
        size, iteration = config.block_size, self._iteration
        budget = config.max_num_batched_tokens
        scheduled: set[Request] = set()
        preempted: list[Request] = []
        chunk = 0
        for request in self._members():
            if request.seat < 0:
                continue
            if budget <= 0:
                break
            if request is self._partial:
                new = min(request.target - request.computed, budget)
                needed = config.blocks(request.computed + new) - config.blocks(request.computed)
            else:
                new = 1
                needed = (request.offset + iteration) % size == 0
            while needed > pool.free:
                victim = self._victim()
                if victim in scheduled:
                    scheduled.remove(victim)
                    budget += 1
                    self._preempt(victim, 1)
                else:
                    self._preempt(victim, 0)
                preempted.append(victim)
                if victim is request:
                    break
            if request.seat < 0:
                break
            pool.take(needed)
            budget -= new
            if request is self._partial:
                chunk = new
            else:
                scheduled.add(request)
        skipped = {request for request in self._members() if request is not self._partial} - scheduled
        return preempted, skipped, chunk

    def _members(self) -> list[Request]:
        """The running requests that an iteration may schedule, in the order of their admission."""
        return list(self._running)

    def _victim(self) -> Request:
        members = self._members()
        if self.config.policy == "fcfs":
            return members[-1]
        return max(members, key=lambda it: (it.priority, it.arrival))

    def _preempt(self, request: Request, scheduled: int) -> None:
        """Back to the queue. `scheduled` tokens of it, 0 or 1, have their place in this iteration already."""
        self.preemptions += 1
        request.preemptions += 1
        self._let_go(request, scheduled)
        request.status = "waiting"
        waiting = self._waiting
        if isinstance(waiting, deque):
            waiting.appendleft(request)
        else:
            heappush(waiting, (request.priority, request.arrival, request.number, request))
        self._blocked = False

    def _let_go(self, request: Request, scheduled: int = 0) -> None:
        """Stop running a request that is not finished: it keeps what it generated, and loses its blocks."""
        if request is self._partial:
            self._partial = None
            tokens = request.computed
        else:
            request.generated = request.output_tokens - (request.last + 1 - self._iteration)
            tokens = self._stop_decoding(request) + scheduled
        if self.pool.caching:
            self._write(request, tokens)
        self._release(request, tokens)

    def _stall(self, skipped: set[Request]) -> None:
        """These generate nothing in this iteration: everything of theirs is one iteration later."""
        size = self.config.block_size
        self._stalled = skipped
        for request in skipped:
            self._phases[-request.offset % size] -= 1
            request.offset -= 1
            request.last += 1
            self._phases[-request.offset % size] += 1
            heappush(self._heap, (request.last, request.seat, request))

    # Generation: into the sums, and out of them

    def _start_decoding(self, request: Request) -> None:
        tokens, iteration = request.target, self._iteration
        request.offset = offset = tokens - iteration
        request.last = last = iteration + request.output_tokens - request.generated - 1
        heappush(self._heap, (last, request.seat, request))
        self._phases[-offset % self.config.block_size] += 1
        self._decoding += 1
        self._context += tokens + 1
        chain = request.chain
        if chain is not None and self.pool.caching:
            other = self._writers.setdefault(chain, request)
            if other is not request:
                raise ValueError(
                    f"requests {other.number} and {request.number} generate on {chain} at the same time: give each a"
                    " fork"
                )

    def _stop_decoding(self, request: Request) -> int:
        """Returns its computed tokens."""
        tokens = request.offset + self._iteration
        self._context -= tokens + 1
        self._decoding -= 1
        self._phases[-request.offset % self.config.block_size] -= 1
        if request.chain is not None and self.pool.caching:
            del self._writers[request.chain]
        return tokens

    def _write(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of its computed tokens."""
        full = tokens // self.config.block_size
        if full > request.written:
            self.pool.write(request, request.path, request.written, full)
            request.written = full

    def _release(self, request: Request, tokens: int) -> None:
        del self._running[request]
        request.seat = -1
        size = self.config.block_size
        held = -(-tokens // size)
        if not self.pool.caching:
            self.pool.blank += held
        elif request.written:
            self.pool.release(request, request.path, request.written, held)
        else:
            self.pool.discard(tokens // size, held)
        self._blocked = False

    def _finish(self, request: Request, tokens: int, now: int) -> None:
        request.generated = request.output_tokens
        request.status = "finished"
        request.finish = now
        self.load_tokens -= request.prompt_tokens
        if self.pool.caching and (request.chain is not None or request.written):
            self._write(request, tokens)
        self._release(request, tokens)
        request.path = ()

    def _cancel_all(self, now: int) -> None:
        for request in sorted(self._cancelled, key=lambda it: it.number):
            if request.status in ("waiting", "running"):
                self._cancel(request, now)
        self._cancelled.clear()

    def _cancel(self, request: Request, now: int) -> None:
        if request.status == "running":
            self._let_go(request)
        else:
            waiting = self._waiting
            if isinstance(waiting, deque):
                waiting.remove(request)
            else:
                waiting.remove(next(entry for entry in waiting if entry[3] is request))
                heapify(waiting)
            self._blocked = False
        self.load_tokens -= request.prompt_tokens
        request.status, request.finish, request.path = "cancelled", now, ()

    def _refresh(self) -> None:
        """All running requests go back to the queue, in their order, and every computed token is forgotten."""
        for request in reversed(list(self._running)):
            self._preempt(request, 0)
        self.pool.clear()

    def _refusal(self, request: Request) -> str:
        if request.prompt_tokens < 1:
            return f"prompt_tokens is {request.prompt_tokens}; a prompt has 1 token or more"
        if request.output_tokens < 1:
            return f"output_tokens is {request.output_tokens}; a request generates 1 token or more"
        return (
            f"a prompt of {request.prompt_tokens} tokens leaves no room to generate within max_model_len"
            f" {self.config.max_model_len}"
        )

    def _trace_steps(self) -> None:
        """One `Iteration` each, as if they had been visited."""
        assert self.trace is not None
        free = self.pool.free + self._taken
        scheduled = tuple((request.number, 1) for request in self._running)
        for planned, at, first, growth in self._pieces:
            following = next((piece[0] for piece in self._pieces if piece[0] > planned), self.steps)
            for step in range(following - planned):
                start = at + step * first + growth * (step * (step - 1) // 2)
                end = start + first + step * growth
                self.trace(
                    Iteration(self.index, start, end, scheduled, (), (), free - self._demand(planned + step + 1))
                )


def _invert(first: int, growth: int, ticks: int, most: int) -> int:
    """Least steps >= 1, known to be at most `most`, that take `ticks` or more: a guess, mended in whole numbers."""
    if growth:
        half = first - growth / 2
        steps = int(2.0 * ticks / (half + sqrt(max(0.0, half * half + 2.0 * growth * ticks))))
    else:
        steps = ticks // first
    steps = min(max(steps, 1), most)
    while steps > 1 and (steps - 1) * first + growth * ((steps - 1) * (steps - 2) // 2) >= ticks:
        steps -= 1
    while steps * first + growth * (steps * (steps - 1) // 2) < ticks:
        steps += 1
    return steps
