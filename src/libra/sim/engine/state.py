"""State that the phases of an iteration share: the queues, the blocks, and the batches of one engine.

Invariant: a request is either in `waiting`, or in `running` with the blocks of its computed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Literal, Protocol

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.drawn import Drawn
from libra.sim.engine.drawn_ahead import DrawnAhead
from libra.sim.engine.flight import Deferred, Flight, Flights, UnderWay
from libra.sim.engine.generation import Even, Generation
from libra.sim.engine.group_pool import GroupPool
from libra.sim.engine.iteration_cost import UNLIMITED, DecodeBatch, IterationCost
from libra.sim.engine.messages import Iteration, Notice
from libra.sim.engine.queues import FcfsQueue, PriorityQueue
from libra.sim.engine.request import Owner, Path, Request, Status
from libra.sim.engine.tiers import Tiers

_KEPT = 1024  # number of batches made in advance, since each event needs one
Arrival = Literal["under way", "come", "written", "failed", "to compute"]  # state of a prompt's KV
# Piece of a plan: (iterations before it, its start, ticks of its first iteration, growth of ticks per iteration)
Piece = tuple[int, int, int, int]


@cache
def _batches(tokens_each: int) -> list[DecodeBatch]:
    return [DecodeBatch(requests, tokens_each) for requests in range(_KEPT)]


class Clock(Protocol):
    """Clock of several engines, which determines the duration of their iterations. An engine's `pieces` are valid only
    after `bring`, and only for the clock's current iterations."""

    index: int  # orders the clock's events among events of the same tick
    busy: bool  # iterations are under way until `end`
    end: int

    def bring(self, state: EngineState) -> None:
        """Count the engine's iterations that had ended at the clock's latest boundary."""
        ...

    def forward(self, state: EngineState, steps: int) -> None:
        """Record that the engine has counted `steps` more ended iterations."""
        ...

    def cut(self, state: EngineState, now: int) -> bool:
        """Let the engine plan again at the first boundary at or after `now`. True: `end` is now earlier."""
        ...

    def limit(self, state: EngineState, steps: int) -> bool:
        """Let the engine plan again after `steps` of its planned iterations, fewer than all of them. True: `end` is now
        earlier."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class EngineState:
    """State of an engine and its elementary changes; the rules are in `running`, `admission`, `preemption` and `jump`.

    With `exact` every iteration is visited. Requests have the same outcomes; the run is slower, and `held_ticks` more
    precise.
    """

    config: EngineConfig
    cost: IterationCost
    index: int = 0
    _: KW_ONLY
    exact: bool = False
    trace: Callable[[Iteration], None] | None = None
    defers: bool = False  # blocks to which the current iteration may write are released only at its end
    clock: Clock | None = field(default=None, init=False)  # shared with other engines
    pool: BlockPool = field(init=False)
    tiers: Tiers | None = field(default=None, init=False)
    waiting: FcfsQueue | PriorityQueue = field(init=False)
    arriving: dict[Request, Arrival] = field(default_factory=dict, init=False)  # they hold blocks, and wait in order
    ready: int = field(default=0, init=False)  # arriving requests whose KV is not under way
    orphans: list[Request] = field(default_factory=list, init=False)  # requests given up while their KV is under way
    # Finished requests whose blocks stay: (tokens, number of known tokens)
    sending: dict[Request, tuple[int, int]] = field(default_factory=dict, init=False)
    notices: list[Notice] = field(default_factory=list, init=False)  # messages to handle at the next boundary
    running: dict[Request, None] = field(default_factory=dict, init=False)  # in the order of admission
    # Requests with partly computed prompts, in the order of admission. There is only one such request, unless others
    # were admitted while it got no blocks.
    partials: dict[Request, None] = field(default_factory=dict, init=False)
    blocked: bool = field(default=False, init=False)  # the head of the queue fits only once blocks are released
    # Least free blocks with which the blocked head may fit before then; 0: unknown
    wanted: int = field(default=0, init=False)
    admissions: int = field(default=0, init=False)
    flights: Flights = field(init=False)
    flight: Flight = field(init=False)  # the batch that is being scheduled, or has ended
    overlapping: bool = field(init=False)  # several batches are under way: every iteration is visited
    chunk: Request | None = field(default=None, init=False)  # the last decided iteration has a chunk of its prompt
    under_way: UnderWay | None = field(default=None, init=False)  # only with asynchronous scheduling
    most_steps: int = field(init=False)  # iterations that may be planned at once
    uneven: bool = field(init=False)  # the cost needs the spread of contexts in batches
    restless: bool = field(init=False)  # the head of the queue may fit later although no request releases its blocks
    batches: list[DecodeBatch] = field(init=False)  # batches without a spread, by the number of requests
    writers: dict[Owner, Request] = field(default_factory=dict, init=False)  # the request that generates on a chain
    leaving: dict[Request, Status] = field(default_factory=dict, init=False)  # they leave at the next boundary
    asked: list[Request] = field(default_factory=list, init=False)
    interrupted: list[Request] = field(default_factory=list, init=False)
    pulls: list[tuple[Request, int]] = field(default_factory=list, init=False)  # pulls that begin: (request, blocks)
    # Requests that ended without running: their KV did not arrive, or they needed only the first token, sent with it
    ended: list[Request] = field(default_factory=list, init=False)
    # The plan
    busy: bool = field(default=False, init=False)  # a plan is under way until `end`
    start: int = field(default=0, init=False)  # tick
    end: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)  # nothing is computed until `end`
    wait: int = field(default=0, init=False)  # ticks that the iteration waits for stores that read its blocks
    steps: int = field(default=0, init=False)  # iterations that only generate; 0: another iteration, or a pause
    ticks: int = field(default=0, init=False)  # ticks of an iteration decided while another is under way; 0: none
    pieces: list[Piece] = field(default_factory=list, init=False)  # ticks of the `steps` iterations
    taken: int = field(default=0, init=False)  # number of the first of these iterations, 0 or 1, that have their blocks
    # Counts
    load_tokens: int = field(default=0, init=False)  # prompt tokens of the requests accepted and not finished
    load_changed: Callable[[], object] | None = field(default=None, init=False)  # called when `load_tokens` changes
    events: int = field(default=0, init=False)
    iterations: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    busy_ticks: int = field(default=0, init=False)
    held_ticks: int = field(default=0, init=False)  # 2 x blocks held x ticks, as if they grew evenly between events
    seen: int = field(default=0, init=False)  # tick up to which `held_ticks` is counted

    def __post_init__(self) -> None:
        config, stages = self.config, self.config.pipeline_parallel_size
        self.pool = self._pool()
        if config.kv_tiers:
            drafts = config.speculative
            self.tiers = Tiers(config.kv_tiers, self.pool, volatile=drafts is not None and drafts.volatile_chunk)
        self.waiting = FcfsQueue() if config.policy == "fcfs" else PriorityQueue()
        self.flights = Flights([self._generation() for _ in range(stages)])
        self.flight = self.flights.all[0]
        self.overlapping = stages > 1
        self.uneven = self.cost.uneven
        self.restless = config.speculative is not None or config.slides
        self.batches = _batches(config.tokens_each)
        self.most_steps = 0 if self.overlapping else 1 if self.exact else UNLIMITED

    def carry(self, tokens: int) -> None:
        """Add `tokens`, which may be negative, to the prompt tokens of accepted, unfinished requests."""
        self.load_tokens += tokens
        if self.load_changed is not None:
            self.load_changed()

    def count_held(self, now: int) -> None:
        """Add the blocks held since the last call to `held_ticks`, up to `now`."""
        self.held_ticks += 2 * self.pool.held * (now - self.seen)
        self.seen = now

    def _pool(self) -> BlockPool:
        config = self.config
        blocks, size, caching = config.kv_blocks, config.block_size, config.enable_prefix_caching
        if not config.kv_groups:
            return BlockPool(blocks, size, caching)
        most, ahead = config.max_num_batched_tokens, config.async_scheduling
        return GroupPool(blocks, size, caching, config.layouts, most_tokens=most, ahead=ahead)

    def _generation(self) -> Generation:
        speculative = self.config.speculative
        if speculative is None:
            return Even(self.config.block_size, self.config.block_starts)
        return (DrawnAhead if self.config.async_scheduling else Drawn)(self.config, speculative)

    def batch(self, requests: int, absent: Collection[Request] = (), context: int | None = None) -> DecodeBatch:
        """The decoding batch of the next iteration, with the `requests` requests of `flight` that are not `absent`. If
        some are absent, `context` is the sum of the contexts in the batch."""
        if not self.uneven:
            return self.batches[requests] if requests < _KEPT else DecodeBatch(requests, self.config.tokens_each)
        generation = self.flight.generation
        shared = self.pool.shared * self.config.block_size
        holders = len(self.running) if self.overlapping else generation.count
        if requests < holders:  # blocks do not list their holders: assume one common prefix
            shared = shared * max(0, requests - 1) // max(1, holders - 1)
        if context is None:
            context = generation.context
        return DecodeBatch(requests, self.config.tokens_each, generation.spread(absent), min(shared, context))

    def members(self) -> list[Request]:
        """The running requests that the batch may schedule, in the order of their admission."""
        if not self.overlapping:
            return list(self.running)
        index = self.flight.index
        return [request for request in self.running if request in self.partials or request.flight == index]

    @property
    def ending(self) -> Collection[Request]:
        """Running requests whose last token is in flight."""
        return self.under_way.ending if self.under_way is not None else ()

    def lag(self, request: Request) -> int:
        """Iterations in flight, 0 or 1, that include a request; it generates, or its last token is in flight."""
        under_way = self.under_way
        return int(under_way is not None and request not in under_way.absent)

    def known(self, request: Request, step: int = 1) -> int:
        """Tokens of a generating request that are known when the `step`-th of the next iterations is scheduled."""
        generation = self.flights.all[request.flight].generation
        before = self.lag(request) if step == 1 else int(self.under_way is not None)
        return request.prompt_tokens + generation.generated(request, step - 1 - before)

    def is_under_way(self, request: Request) -> bool:
        """Whether a running request is in the iteration in flight."""
        under_way = self.under_way
        if self.overlapping:
            return any(it.chunk is request or it.index == request.flight for it in self.flights.under_way)
        if under_way is None:
            return False
        return under_way.chunk is request if request in self.partials else request not in under_way.absent

    def generation_of(self, request: Request) -> Generation | None:
        """The `Generation` that a request is in; None if it does not generate."""
        if request.flight < 0:
            return None
        flight = self.flights.all[request.flight]
        return None if request in flight.finishing else flight.generation

    # Contexts of running requests

    def start_running(self, request: Request, tokens: int) -> None:
        """Admit a request. The KV of the first `tokens` tokens of its context is present."""
        self.admissions += 1
        request.admission = self.admissions
        request.status = "running"
        request.computed = tokens
        request.target = request.prompt_tokens + request.generated
        request.padding = 0
        self.running[request] = None

    def slots(self, request: Request, chunk: int = 0) -> int:
        """Least tokens for which a running request that does not generate yet holds blocks, including those for the
        next `chunk` tokens."""
        config, computed = self.config, request.computed + chunk
        if config.speculative is None:
            return computed
        return min(computed + request.padding + config.lookahead, config.max_model_len)

    def compute(self, request: Request, chunk: int) -> None:
        """Compute a chunk of a prompt in this iteration; the blocks for it are taken."""
        request.computed += chunk
        if self.pool.caching and (request.chain is not None or self.tiers is not None or self.pool.knows(request)):
            self.write(request, request.computed)
        if request.computed == request.target:
            request.flight = self.flight.index
            self.flight.finishing.append(request)
            self.partials.pop(request, None)
        else:
            self.partials[request] = None
            self.chunk = request
            request.reserves = True

    def write(self, request: Request, tokens: int) -> None:
        """Let other requests find the full blocks of a request's computed tokens."""
        full = tokens // self.config.block_size
        if full > request.written:
            drafts = self.config.speculative
            self.pool.write(request, full, again=drafts is not None and drafts.recomputes_block)

    def write_all(self, path: Path, more: int = 0) -> None:
        """Let other requests find the tokens that were generated on a context's chains, including `more` iterations
        that are not counted yet."""
        for owner, _, _ in path:
            writer = self.writers.get(owner)
            if writer is not None:
                late = more if self.under_way is None else (more - 1) * self.lag(writer)
                self.write(writer, self.flights.all[writer.flight].generation.computed(writer, late))

    def is_written(self, request: Request) -> bool:
        """Whether another request generates on a chain of this request's context."""
        return any(owner in self.writers for owner, _, _ in request.path)

    def release(self, request: Request, tokens: int, known: int, row: bool = False) -> None:
        """Stop running a request, and release the blocks of `tokens` tokens, of which `known` are final. `row`: the
        request is in the iteration in flight."""
        del self.running[request]
        request.admission = request.flight = -1
        if self.config.num_reserved_decode_tokens:  # fewer blocks are reserved
            self.blocked = False
        if row and self.defers:
            last = self.flights.under_way[-1] if self.overlapping and self.flights.under_way else self.under_way
            if last is not None:
                last.deferred.append((request, request.path, tokens, known))
                return
        self.let_go_blocks(request, tokens, known)

    def let_go_deferred(self, deferred: Iterable[Deferred]) -> None:
        """Release the blocks of requests that left during an iteration that could still write to them."""
        for request, path, tokens, known in deferred:
            request.path = path
            self.let_go_blocks(request, tokens, known)
            request.path = ()

    def keep(self, request: Request, tokens: int, known: int) -> None:
        """Stop running a request, and keep its blocks."""
        del self.running[request]
        request.admission = request.flight = -1
        self.sending[request] = tokens, known
        self.blocked = False

    def let_go_blocks(self, request: Request, tokens: int, known: int) -> None:
        """Release the blocks of a request's `tokens` tokens, of which `known` are final."""
        if request in self.pool.reads.unwritten:
            self.pool.reads.fence(request, self.pool.blank)
        self.pool.let_go(request, tokens, known)
        self.blocked = False
