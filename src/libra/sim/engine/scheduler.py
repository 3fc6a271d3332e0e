"""What the phases of an iteration share: the queues, the blocks, and the batches of one engine.

Invariant: a request is either in `waiting`, or in `running` with the blocks of its computed tokens held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.blocks import Owner, Path
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.flight import Flights
from libra.sim.engine.generation import Even, Generation
from libra.sim.engine.iteration_cost import UNLIMITED, IterationCost
from libra.sim.engine.queue import FcfsQueue, PriorityQueue
from libra.sim.engine.request import Request, Status

Piece = tuple[int, int, int, int]  # iterations before it; its start, the ticks of its first one, and their growth


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


class Scheduler:
    """State and its smallest changes; the rules are in `running`, `admission`, `preemption`, `arriving` and `jump`."""

    __slots__ = (
        "admissions",
        "asked",
        "blocked",
        "busy",
        "busy_ticks",
        "config",
        "cost",
        "end",
        "events",
        "flight",
        "flights",
        "held_ticks",
        "index",
        "interrupted",
        "iterations",
        "leaving",
        "load_tokens",
        "most_steps",
        "overlapping",
        "partial",
        "pieces",
        "pool",
        "preemptions",
        "running",
        "seen",
        "start",
        "steps",
        "taken",
        "trace",
        "waiting",
        "writers",
    )

    def __init__(self, config: EngineConfig, cost: IterationCost, index: int = 0, *, exact: bool = False) -> None:
        """`exact` visits every iteration: the same outcome of every request, slower; `held_ticks` is finer then."""
        self.config = config
        self.cost = cost
        self.index = index
        self.pool = BlockPool(config.kv_blocks, config.block_size, config.enable_prefix_caching)
        self.trace: Callable[[Iteration], None] | None = None
        self.waiting = FcfsQueue() if config.policy == "fcfs" else PriorityQueue()
        self.running: dict[Request, None] = {}  # in the order of admission
        self.partial: Request | None = None  # the one whose prompt is not computed yet: always the last admitted
        self.blocked = False  # the head of the queue does not fit, nor will it before something is let go
        self.admissions = 0
        stages = config.pipeline_parallel_size
        self.flights = Flights([Even(config.block_size) for _ in range(stages)])
        self.flight = self.flights.all[0]  # the batch that is looked at
        self.writers: dict[Owner, Request] = {}  # who generates on a chain
        self.leaving: dict[Request, Status] = {}  # cancelled or interrupted, until the next boundary
        self.asked: list[Request] = []
        self.interrupted: list[Request] = []
        self.overlapping = stages > 1  # batches: every iteration of theirs is visited
        self.most_steps = 0 if self.overlapping else 1 if exact else UNLIMITED
        # Of what is planned
        self.busy = False  # until `end`
        self.start = self.end = 0  # ticks
        self.steps = 0  # iterations planned that only generate; 0: one of another kind, or a pause
        self.pieces: list[Piece] = []  # of these iterations
        self.taken = 0  # blocks of their demand that have been taken already
        self.load_tokens = 0  # prompts of the requests accepted and not finished
        self.events = self.iterations = self.preemptions = self.busy_ticks = 0
        self.held_ticks = 0  # blocks held, times ticks, times 2; between two events they are taken to grow evenly
        self.seen = 0  # tick up to which they are counted

    def count_held(self, now: int) -> None:
        """What is held has been held since it was last counted."""
        self.held_ticks += 2 * self.pool.held * (now - self.seen)
        self.seen = now

    def members(self) -> list[Request]:
        """The running requests that the batch may schedule, in the order of their admission."""
        if not self.overlapping:
            return list(self.running)
        index = self.flight.index
        return [request for request in self.running if request is self.partial or request.flight == index]

    def generation_of(self, request: Request) -> Generation | None:
        """Where it generates; None if it does not."""
        if request.flight < 0:
            return None
        flight = self.flights.all[request.flight]
        return None if request in flight.finishing else flight.generation

    # Contexts of running requests

    def compute(self, request: Request, chunk: int) -> None:
        """A chunk of its prompt is in this iteration, with blocks for it taken."""
        request.computed += chunk
        if self.pool.caching and (request.chain is not None or self.pool.knows(request)):
            self.write(request, request.computed)
        if request.computed == request.target:
            request.flight = self.flight.index
            self.flight.finishing.append(request)
            self.partial = None
        else:
            self.partial = request

    def write(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of its computed tokens."""
        full = tokens // self.config.block_size
        if full > request.written:
            self.pool.write(request, request.path, request.written, full)
            request.written = full

    def write_all(self, path: Path, more: int = 0) -> None:
        """Let others find what is generated on the chains of a context, `more` tokens of each after those counted."""
        for owner, _ in path:
            writer = self.writers.get(owner)
            if writer is not None:
                self.write(writer, self.flights.all[writer.flight].generation.computed(writer) + more)

    def is_written(self, request: Request) -> bool:
        """Whether another request generates on a chain that this one's context follows."""
        return any(owner in self.writers for owner, _ in request.path)

    def release(self, request: Request, tokens: int) -> None:
        """It runs no longer: let go of the blocks of its computed tokens."""
        del self.running[request]
        request.admission = request.flight = -1
        size = self.config.block_size
        held = -(-tokens // size)
        if not self.pool.caching:
            self.pool.blank += held
        elif request.written:
            self.pool.release(request, request.path, request.written, held)
        else:
            self.pool.discard(tokens // size, held)
        self.blocked = False
