"""One engine: which requests are in its next iterations, and when those end.

Invariant: the rules are those of vLLM's V1 scheduler, iteration by iteration. Running requests come first, in the order
of their admission, a token each or the next chunk of a prompt; when blocks run out the last one (or the one of lowest
priority) is preempted, to compute its context again later. If none was preempted, waiting requests are admitted in
order while budget, seats and blocks last. As long as nothing can change but the number of tokens, iterations are not
visited but advanced together; whoever asks in between is told what had been seen in visiting each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from libra.sim.clock import TICKS
from libra.sim.engine.chain import Chain
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.generation import Generation
from libra.sim.engine.iteration_cost import UNLIMITED, Chunk, IterationCost
from libra.sim.engine.memory import BlockPool, Owner, Path, owner_of
from libra.sim.engine.queue import FcfsQueue, PriorityQueue
from libra.sim.engine.request import Request, Status
from libra.sim.engine.stretch import Piece, cut, end_of, stretch, ticks_of


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

    `submit`, `cancel`, `interrupt`, `pause`, `ask` and `close` may come at any tick in between, and return True when
    they moved the end forward. What ends at a tick is committed before they come, and they come before what is planned
    at that tick. After any of them but `ask` an engine that is not busy, or is open, is to be planned; after `adopt`
    too.

    `asked` are the running requests that reached their `ask_at` with the last commit; `interrupted` those that left,
    unfinished, with the last plan. Both are cleared by the next commit or plan, whichever comes first.
    """

    __slots__ = (
        "_blocked",
        "_cost",
        "_due",
        "_finishing",
        "_generation",
        "_leaving",
        "_most_steps",
        "_partial",
        "_pause",
        "_pieces",
        "_running",
        "_seats",
        "_taken",
        "_waiting",
        "_writers",
        "asked",
        "busy",
        "busy_ticks",
        "closed",
        "closing",
        "config",
        "end",
        "events",
        "held_ticks",
        "index",
        "interrupted",
        "iterations",
        "load_tokens",
        "open",
        "paused_ticks",
        "pool",
        "preemptions",
        "start",
        "steps",
        "trace",
    )

    def __init__(self, config: EngineConfig, cost: IterationCost, index: int = 0, *, exact: bool = False) -> None:
        """`exact` visits every iteration: the same outcome of every request, slower; `held_ticks` is finer then."""
        self.config = config
        self.index = index
        self.pool = BlockPool(config.kv_blocks, config.block_size, config.enable_prefix_caching)
        self.trace: Callable[[Iteration], None] | None = None
        self.busy = False  # until `end`
        self.open = False  # may decide on more before that
        self.closing = False  # takes no more work
        self.closed = False  # and has none
        self.asked: list[Request] = []
        self.interrupted: list[Request] = []
        self.start = self.end = 0  # of what is planned, ticks
        self.steps = 0  # iterations planned that only generate; 0: one of another kind, or a pause
        self.load_tokens = 0  # prompts of the requests accepted and not finished
        self.events = self.iterations = self.preemptions = self.busy_ticks = self.paused_ticks = 0
        self.held_ticks = 0  # blocks held, times ticks, times 2; between two events they are taken to grow evenly
        self._cost = cost
        self._most_steps = 1 if exact else UNLIMITED
        self._waiting = FcfsQueue() if config.policy == "fcfs" else PriorityQueue()
        self._blocked = False  # the head of the queue does not fit, nor will it before something is let go
        self._running: dict[Request, None] = {}  # in the order of admission
        self._seats = 0  # admissions so far
        self._partial: Request | None = None  # the one whose prompt is not computed yet: always the last admitted
        self._finishing: list[Request] = []  # their prompts are computed with the iteration that is planned
        self._generation = Generation(config.block_size)  # the other running ones
        self._writers: dict[Owner, Request] = {}  # who generates on a chain
        self._pieces: list[Piece] = []  # of the planned iterations
        self._taken = 0  # blocks of their demand that have been taken already
        self._leaving: dict[Request, Status] = {}  # cancelled or interrupted, until the next boundary
        self._due: list[Pause] = []
        self._pause: Pause | None = None

    # What comes from outside

    def submit(self, request: Request, now: int) -> bool:
        """Queue a request, or refuse it (its status says so).

        Raises ValueError if the engine closes, or if the request has generated its `ask_at` tokens already.
        """
        config = self.config
        if self.closing:
            raise ValueError(f"engine {self.index} is closing: submit request {request.number} to another one")
        if request.ask_at is not None and request.ask_at <= request.generated:
            raise ValueError(_too_late(request, request.ask_at, request.generated))
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
        if not self._waiting.push(request) and self._blocked:
            return False  # it waits behind one that does not fit
        self._blocked = False
        if len(self._running) >= config.max_num_seqs:
            return False
        return self._cut(now)

    def cancel(self, request: Request, now: int) -> bool:
        """Stop a request at the end of the iteration that is under way, unless it finishes with that one; `generated`
        is right then."""
        if not self._has(request):
            return False
        self._leave(request, "cancelled")
        return self._cut(now)

    def interrupt(self, request: Request, now: int) -> bool:
        """Stop a request at the end of the iteration that is under way, to go on elsewhere.

        Unless it finishes with that one, it is in `interrupted` of the plan that follows, and `generated` says how many
        tokens its owner keeps: a new request has them in its prompt. Nothing happens to one that is cancelled already.
        """
        if not self._has(request) or request in self._leaving:
            return False
        self._leave(request, "interrupted")
        return self._cut(now)

    def release(self, now: int) -> None:
        """Let go of those who leave, at a boundary, before the plan that would do so: others at that instant may need
        to know."""
        if not self.busy and self._leaving:
            self._let_leave(sorted(self._leaving, key=lambda it: it.number), now)

    def pause(self, pause: Pause, now: int) -> bool:
        """Stop at the end of the iteration that is under way, until the pause is over. One that closes does not come
        to it."""
        if self.closing:
            return False
        self._due.append(pause)
        return self._cut(now)

    def close(self, now: int) -> bool:
        """Take no more work, and stop for good at the end of the iteration (or the pause) that is under way.

        The plan that follows is None, and lets go of all requests that have not finished: they are in `interrupted`,
        those that ran first. Nobody is asked about any more. What the cache holds can still be looked up.
        """
        if self.closing:
            return False
        self.closing = True
        for request in self.unfinished:
            request.ask_at = None
        return self._cut(now)

    def ask(self, request: Request, tokens: int, now: int) -> bool:
        """Stop at the end of the iteration with which a request has generated `tokens` tokens: it is in `asked` then.

        This replaces what its `ask_at` was. Who finishes with that token or before it is not asked about. Raises
        ValueError for a request that neither runs nor waits here, or leaves, or has generated as many already.
        """
        if not self._has(request):
            raise ValueError(f"request {request.number} neither runs nor waits on engine {self.index}: ask its own")
        if self.closing or request in self._leaving:
            raise ValueError(f"request {request.number} leaves engine {self.index} with this iteration: do not ask")
        generated = self.generated_by(request, now)
        if tokens <= generated:
            raise ValueError(_too_late(request, tokens, generated))
        request.ask_at = tokens
        generation = self._generating(request)
        if generation is None:
            return False
        generation.ask(request)
        steps = tokens - generation.generated(request)
        return self.busy and steps < self.steps and self._cut(end_of(self._pieces, steps))

    def generated_by(self, request: Request, now: int) -> int:
        """Tokens that a request which runs or waits here has generated at tick `now`."""
        ended = self._settle(now)
        generation = self._generating(request)
        return request.generated if generation is None else generation.generated(request) + ended

    def _has(self, request: Request) -> bool:
        return request.engine == self.index and request.status in ("waiting", "running")

    # Memory that others share

    def adopt(self, context: Chain | Request, tokens: int, now: int) -> int:
        """The KV of a context's first `tokens` tokens has come from another engine. Returns how many of them are here
        now and were not before.

        Full blocks that are missing become findable; nobody holds them. The least recently let go give way to them, but
        nothing that is held: where too little is free, as many as fit are taken from the beginning. What a running
        request is about to compute itself counts as being here, and nothing is taken that follows it; so does
        everything without prefix caching. All that is here of these tokens counts as let go last. The end may move
        forward, as with `submit`, for a request that waits may fit now: compare `end`.

        Raises ValueError if the engine closes, and for a request that has ended or has less than so many tokens.
        """
        if self.closing:
            raise ValueError(f"engine {self.index} is closing: send KV to another one")
        if tokens < 0:
            raise ValueError(f"tokens is {tokens}; give 0 or more")
        if isinstance(context, Request) and context.seat < 0:
            known = context.prompt_tokens + context.generated
            if tokens > known:
                raise ValueError(f"request {context.number} has {known} tokens; adopt so many at most, not {tokens}")
            if context.status != "waiting":
                raise ValueError(f"request {context.number} is {context.status}: adopt what its chain's next one needs")
        pool = self.pool
        if not pool.caching:
            return 0
        ended = self._settle(now)
        path = pool.path(context)
        self._write_all(path, ended)
        blocks = tokens // self.config.block_size
        found, _ = pool.find(path, blocks)
        if found < blocks:
            missing = owner_of(path, found)
            if any(owner_of(request.path, found) is missing for request in self._running):
                blocks = found
        new = pool.adopt(path, blocks) - found
        if new:
            self._blocked = False
            if self._waiting and len(self._running) < self.config.max_num_seqs:
                self._cut(now)
        return new * self.config.block_size

    def cached_tokens(self, context: Chain | Request, now: int) -> int:
        """How many tokens of a context's beginning have KV that could be found: of a chain all that there are, of a
        request those that it would not compute if it were admitted."""
        pool, size = self.pool, self.config.block_size
        if not pool.caching:
            return 0
        path = pool.path(context)
        self._write_all(path, self._settle(now))
        most = pool.blocks
        if isinstance(context, Request):
            most = (context.prompt_tokens + context.generated - 1) // size
        return pool.find(path, most)[0] * size

    # What can be seen from outside

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def token_seconds(self, now: int) -> float:
        """Of an iteration that one more sequence, as long as the others are on average, takes part in."""
        generation = self._generation
        count = generation.count
        context = generation.context + count * self._ended(now)
        more = context + context // count if count else 1
        base, slope, _ = self._cost.line(min(count + 1, self.config.max_num_seqs), more)
        return (base + slope * more) / TICKS

    @property
    def unfinished(self) -> list[Request]:
        """Requests accepted and not finished: running ones first."""
        return [*self._running, *self._waiting]

    # What happens next

    def plan(self, now: int) -> int | None:
        """Decide at an iteration's boundary what to do until when. None: there is nothing to do, and if the engine
        closes, it is closed now."""
        if self.asked or self.interrupted:
            self._forget_told()
        if self.closing:
            self._close(now)
            return None
        if self._leaving:
            self._let_leave(sorted(self._leaving, key=lambda it: it.number), now)
        self.steps = 0
        self.start = now
        if self._due:
            self._pause = self._due.pop(0)
            self.busy = True
            self.end = self._pause.until(now)
            return self.end
        waiting, running = self._waiting, self._running
        if not running and not waiting:
            self.busy = False
            return None
        self.busy = True
        self.events += 1
        if (
            self._partial is None
            and (not waiting or self._blocked or len(running) >= self.config.max_num_seqs)
            and self._generation.demand() <= self.pool.free
        ):
            self._generate(now, 0)
        else:
            self._iterate(now)
        return self.end

    def commit(self) -> list[Request]:
        """Make happen what was planned; returns the requests that finished with it, in order."""
        if self.asked or self.interrupted:
            self._forget_told()
        self.busy = False
        now, pool, generation = self.end, self.pool, self._generation
        ticks = now - self.start
        held = 2 * (pool.blocks - pool.blank - pool.findable)
        if self._pause is not None:
            self.held_ticks += held * ticks
            self.paused_ticks += ticks
            if self._pause.refresh:
                self._refresh()
            self._pause = None
            return []
        self.busy_ticks += ticks
        steps = self.steps
        if steps:
            if self.trace is not None:
                self._trace_steps()
            demand = generation.demand(steps) - self._taken
            held += demand
            if demand:
                pool.take(demand)
        else:
            steps = 1
        self.held_ticks += held * ticks
        self.iterations += steps
        done = generation.advance(steps)
        if generation.asks:
            self.asked = generation.reached()
        for request in done:
            self._finish(request, self._stop_generating(request), now)
        if self._finishing:
            finishing, self._finishing = self._finishing, []
            for request in finishing:
                if request.first_token is None:
                    request.prefill_end = request.first_token = now
                request.generated += 1
                if request.generated < request.output_tokens:
                    if request.generated == request.ask_at:
                        request.ask_at = None
                        self.asked.append(request)
                    self._start_generating(request)
                else:
                    self._finish(request, request.target, now)
                    done.append(request)
        return done

    def stop(self, now: int) -> None:
        """Time is up: iterations that have ended by `now` count, and of the one under way its time until now."""
        if self.busy and self._pause is None:
            if self.steps > 1:
                self._catch_up(now + 1)
            self.busy_ticks += now - self.start
            self.held_ticks += 2 * self.pool.held * (now - self.start)
        elif self._pause is not None:
            self.held_ticks += 2 * self.pool.held * (now - self.start)
            self.paused_ticks += now - self.start
        for request in self._running:
            self._count_generated(request)
        for request, status in self._leaving.items():
            if status == "cancelled":
                request.status, request.finish = status, now

    def _count_generated(self, request: Request) -> None:
        generation = self._generating(request)
        if generation is not None:
            request.generated = generation.generated(request)

    def _generating(self, request: Request) -> Generation | None:
        """Where it generates; None if it does not."""
        if request.seat < 0 or request is self._partial or request in self._finishing:
            return None
        return self._generation

    def _forget_told(self) -> None:
        """New lists: whoever has the old ones keeps them."""
        self.asked, self.interrupted = [], []

    def _generate(self, now: int, taken: int) -> None:
        """Iterations that do nothing but generate, until one of the requests is done or blocks run out."""
        generation = self._generation
        steps = min(generation.steps_to_end(), self._most_steps)
        if steps > 1:
            steps = generation.affordable(steps, self.pool.free + taken)
            if generation.asks:
                steps = generation.steps_to_ask(steps)
        self._taken = taken
        self._pieces, self.end = stretch(self._cost, now, generation.count, generation.context, steps)
        self.steps = steps

    def _cut(self, now: int) -> bool:
        """End the planned iterations at the first boundary at or after `now`. True: that is sooner."""
        before = self.steps
        if before <= 1 or not self.busy:
            return False
        self.steps, self.end = cut(self._pieces, before, now)
        return self.steps < before

    def _catch_up(self, now: int) -> None:
        """Commit those of the planned iterations that ended before now, but not the last one: the rest stays planned
        as it is."""
        steps, pieces, generation = self.steps, self._pieces, self._generation
        ended = cut([*pieces], steps, now)[0] - 1
        if not ended:
            return
        self.steps, self.end = cut(pieces, steps, end_of(pieces, ended))
        self.commit()
        self.busy = True
        self.start, self.steps, self._taken = self.end, steps - ended, 0
        self._pieces, self.end = stretch(self._cost, self.start, generation.count, generation.context, self.steps)

    def _ended(self, now: int) -> int:
        """Planned iterations that have ended by now, and are not counted yet."""
        if not self.busy or not self.steps:
            return 0
        steps, end = cut([*self._pieces], self.steps, now)
        return steps if end <= now else steps - 1

    def _settle(self, now: int) -> int:
        """Bring counts and blocks to where they are if every iteration is visited; the plan stays as it is.

        Returns 1 if one has ended that is not counted yet, for it ends now, and the plan may still be cut there.
        """
        if not self.busy or not self.steps:
            return 0
        if self.steps > 1:
            self._catch_up(now)
        if now > self.start:  # the one that is under way has its blocks
            demand = self._generation.demand() - self._taken
            self.pool.take(demand)
            self._taken += demand
        return int(end_of(self._pieces, 1) <= now)

    # One iteration of any kind

    def _iterate(self, now: int) -> None:
        config, pool, generation = self.config, self.pool, self._generation
        order = self._members() if self.trace is not None else ()
        demand, generating, context = generation.demand(), generation.count, generation.context
        partial = self._partial
        chunk = blocks = 0
        if partial is not None:
            chunk = min(partial.target - partial.computed, config.max_num_batched_tokens - generating)
            blocks = config.blocks(partial.computed + chunk) - config.blocks(partial.computed)
        preempted: Sequence[Request] = ()
        skipped: set[Request] = set()
        if demand + blocks <= pool.free:
            pool.take(demand + blocks)
        else:
            preempted, skipped, chunk = self._make_room()
            partial = self._partial
            generating = generation.count - len(skipped)
            context = generation.context - generation.attended(skipped)
            if generating or chunk:
                generation.stall(skipped)
        chunks: list[Chunk] = []
        if partial is not None and chunk:
            chunks.append((chunk, partial.computed))
            self._advance(partial, chunk)
        cached: list[tuple[int, int]] = []
        if not preempted:
            self._admit(config.max_num_batched_tokens - generating - chunk, now, chunks, cached)
        if chunks:
            self.end = self._through(now, self._cost.mixed(generating, context, chunks))
        elif not generating:
            self.end = now  # the only one that was looked at was preempted
        elif not preempted and self._most_steps:
            self._generate(now, demand)
            return
        else:
            base, slope, _ = self._cost.line(generating, context)
            self.end = self._through(now, base + slope * context)
        if self.trace is not None:
            gone = {*preempted, *skipped, partial}
            scheduled = [(request.number, 1) for request in order if request not in gone]
            new = [tokens for tokens, _ in chunks]
            if partial is not None and chunk:
                scheduled.append((partial.number, new.pop(0)))
            scheduled += zip((number for number, _ in cached), new, strict=True)
            self.trace(
                Iteration(
                    self.index,
                    now,
                    self.end,
                    tuple(scheduled),
                    tuple(request.number for request in preempted),
                    tuple(cached),
                    pool.free,
                )
            )
        if not generating and not chunks:
            if preempted:
                self._iterate(now)
            else:
                self._nothing_fits()

    def _through(self, now: int, ticks: int) -> int:
        """When an iteration that takes so long ends."""
        return now + ticks

    def _nothing_fits(self) -> None:
        raise AssertionError(f"engine {self.index}: nothing fits, and nothing will be let go")

    def _advance(self, request: Request, chunk: int) -> None:
        """A chunk of the prompt is in this iteration, with blocks for it taken."""
        request.computed += chunk
        if self.pool.caching and (request.chain is not None or self.pool.knows(request)):
            self._write(request, request.computed)
        if request.computed == request.target:
            self._finishing.append(request)
            self._partial = None
        else:
            self._partial = request

    # Admission

    def _admit(self, budget: int, now: int, chunks: list[Chunk], cached: list[tuple[int, int]]) -> None:
        config, pool, waiting, running = self.config, self.pool, self._waiting, self._running
        size = config.block_size
        self._blocked = False
        while waiting and budget > 0 and len(running) < config.max_num_seqs:
            request = waiting.head
            room = self._room(request, budget)
            if room is None:
                # It stays so while free blocks only become fewer: unless other prompts took from the budget, another
                # request writes its context, or its first chunk alone counts, which needs the more the more is found.
                self._blocked = not chunks and config.reserve_full_prompt and not self._is_written(request)
                break
            waiting.pop()
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

    def _room(self, request: Request, budget: int) -> tuple[int, int] | None:
        """(blocks found, tokens to compute now) of a request that can be admitted."""
        config, pool = self.config, self.pool
        size = config.block_size
        tokens = request.prompt_tokens + request.generated
        found = unheld = 0
        # A request without a chain finds only what it computed itself, before it was preempted, or what it brought.
        if pool.caching and (request.chain is not None or pool.knows(request)):
            if self._writers:
                self._write_all(request.path)
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

    def _is_written(self, request: Request) -> bool:
        """Whether another request generates on a chain that this one's context follows."""
        return any(owner in self._writers for owner, _ in request.path)

    # Preemption

    def _make_room(self) -> tuple[list[Request], set[Request], int]:
        """Give blocks to the running requests in order. Returns who was preempted, who runs but is not in this
        iteration, and the chunk of the partial prompt."""
        config, pool, generation = self.config, self.pool, self._generation
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
                new, needed = 1, int(generation.needs_block(request))
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
        self._waiting.push_back(request)

    def _let_go(self, request: Request, scheduled: int = 0) -> None:
        """Stop running a request that is not finished: it keeps what it generated, and loses its blocks."""
        if request is self._partial:
            self._partial = None
            tokens = request.computed
        else:
            request.generated = self._generation.generated(request)
            tokens = self._stop_generating(request) + scheduled
        if self.pool.caching:
            self._write(request, tokens)
        self._release(request, tokens)

    def _refresh(self) -> None:
        """All running requests go back to the queue, in their order, and every computed token is forgotten."""
        for request in reversed(list(self._running)):
            self._let_go(request)
            request.status = "waiting"
            self._waiting.push_back(request)
        self.pool.clear()

    # Beginning and end of a request's generation, and its blocks

    def _start_generating(self, request: Request) -> None:
        self._generation.add(request)
        chain = request.chain
        if chain is not None and self.pool.caching:
            other = self._writers.setdefault(chain, request)
            if other is not request:
                raise ValueError(
                    f"requests {other.number} and {request.number} generate on {chain} at the same time: give each a"
                    " fork"
                )

    def _stop_generating(self, request: Request) -> int:
        """Returns its computed tokens."""
        if request.chain is not None and self.pool.caching:
            del self._writers[request.chain]
        return self._generation.remove(request)

    def _computed(self, request: Request) -> int:
        """Computed tokens of one that generates."""
        return self._generation.computed(request)

    def _write(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of its computed tokens."""
        full = tokens // self.config.block_size
        if full > request.written:
            self.pool.write(request, request.path, request.written, full)
            request.written = full

    def _write_all(self, path: Path, more: int = 0) -> None:
        """Let others find what is generated on the chains of a context, `more` tokens of each after those counted."""
        for owner, _ in path:
            writer = self._writers.get(owner)
            if writer is not None:
                self._write(writer, self._computed(writer) + more)

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
        if request not in self._leaving:
            self.load_tokens -= request.prompt_tokens
        if self.pool.caching and (request.chain is not None or request.written):
            self._write(request, tokens)
        self._release(request, tokens)
        request.path = ()

    # Who leaves unfinished

    def _leave(self, request: Request, status: Status) -> None:
        """At the next boundary."""
        if request not in self._leaving:
            self.load_tokens -= request.prompt_tokens
        self._leaving[request] = status
        request.ask_at = None

    def _let_leave(self, requests: Iterable[Request], now: int) -> None:
        """It is the boundary. Some may have finished with the iteration that was under way."""
        for request in requests:
            status = self._leaving.pop(request)
            if request.status == "running":
                self._let_go(request)
            elif request.status == "waiting":
                self._waiting.remove(request)
                self._blocked = False
            else:
                continue
            request.status, request.finish, request.path = status, now, ()
            if status == "interrupted":
                self.interrupted.append(request)

    def _close(self, now: int) -> None:
        """It is the boundary, and the last one."""
        for request in self.unfinished:
            if request not in self._leaving:
                self._leave(request, "interrupted")
        self._let_leave(self.unfinished, now)
        self._leaving.clear()  # of those that finished
        self.closed, self.busy, self.open = True, False, False
        self.steps, self.start = 0, now

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
        following = [piece[0] for piece in self._pieces[1:]] + [self.steps]
        for (before, at, first, growth), after in zip(self._pieces, following, strict=True):
            for step in range(after - before):
                start = at + ticks_of(step, first, growth)
                left = free - self._generation.demand(before + step + 1)
                self.trace(Iteration(self.index, start, start + first + step * growth, scheduled, (), (), left))


def _too_late(request: Request, tokens: int, generated: int) -> str:
    return (
        f"request {request.number} has generated {generated} tokens; ask for {generated + 1} or more of them, not"
        f" {tokens}"
    )
