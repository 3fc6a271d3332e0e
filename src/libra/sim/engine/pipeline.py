"""One engine whose layers are divided over pipeline stages, with a batch under way in each.

Invariant: a request is in one batch at a time; a batch passes all stages, in the order in which batches were scheduled,
and a stage works on one batch at a time. Waiting requests, KV blocks and seats are the engine's, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.sim.engine.batching import Engine
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.generation import Generation
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.request import Request


@dataclass(slots=True)
class _Lane:
    """Requests that are always scheduled together."""

    generation: Generation
    finishing: list[Request] = field(default_factory=list)
    under_way: bool = False
    start: int = 0
    end: int = 0


class PipelinedEngine(Engine):
    """Schedules the next batch as soon as one of its stages has none, as vLLM's batch queue does.

    A stage takes its share of an iteration's time: layers are taken to be divided evenly, and what is sent from stage
    to stage to take no time. A batch that runs out of blocks preempts among its own requests only; vLLM would also
    preempt one whose batch is under way. Every iteration is visited, so `exact` changes nothing.
    """

    __slots__ = ("_at", "_free", "_lane_of", "_lanes", "_queue", "_seen")

    def __init__(self, config: EngineConfig, cost: IterationCost, index: int = 0, *, exact: bool = False) -> None:
        super().__init__(config, cost, index, exact=exact)
        stages = config.pipeline_parallel_size
        self._most_steps = 0
        self._lanes = [_Lane(Generation(config.block_size)) for _ in range(stages)]
        self._at = self._lanes[0]  # the lane that is looked at
        self._generation, self._finishing = self._at.generation, self._at.finishing
        self._lane_of: dict[Request, _Lane] = {}  # of each running request that is not partial
        self._queue: list[_Lane] = []  # batches under way, oldest first
        self._seen = 0  # tick
        self._free = [0] * stages  # tick at which each stage has worked off what was sent to it

    def plan(self, now: int) -> int | None:
        self._look_back(now)
        if self.asked or self.interrupted:
            self._forget_told()
        if self.closing and not self._queue and self._pause is None:
            self._close(now)
            return None
        if self._leaving:
            self._let_leave(sorted(self._leaving, key=lambda it: it.number), now)
        if self.closing or self._due or self._pause is not None:
            if not self._queue and self._pause is None:
                self._pause = self._due.pop(0)
                self.start = now
                self.end = self._pause.until(now)
            elif self._queue:
                self.end = self._queue[0].end
            self.busy, self.open = True, False
            return self.end
        for lane in self._lanes:
            if not lane.under_way:
                self._look_at(lane)
                if self._has_work():
                    self._schedule(lane, now)
        self.busy, self.open = bool(self._queue), len(self._queue) < len(self._lanes)
        if not self._queue:
            if self._waiting:
                super()._nothing_fits()
            return None
        self.end = self._queue[0].end
        return self.end

    def commit(self) -> list[Request]:
        if self._pause is not None:
            self._look_back(self.end)
            return self._commit_once()
        lane = self._queue.pop(0)
        self._look_at(lane)
        lane.under_way = False
        self.steps = 0
        # So that a full pipeline is busy all the time, and not as many times as it has stages.
        self.start = lane.end - (lane.end - lane.start) // len(self._lanes)
        self.end = lane.end
        self._look_back(self.end)
        return self._commit_once()

    def _commit_once(self) -> list[Request]:
        held = self.held_ticks
        done = super().commit()
        self.held_ticks = held
        return done

    def stop(self, now: int) -> None:
        """Time is up. What is under way does not count as busy."""
        self._look_back(now)
        for request in self._running:
            self._count_generated(request)
        for request, status in self._leaving.items():
            if status == "cancelled":
                request.status, request.finish = status, now

    def _look_back(self, now: int) -> None:
        """Batches overlap, so blocks are counted from one look to the next."""
        self.held_ticks += 2 * self.pool.held * (now - self._seen)
        self._seen = now

    def _has_work(self) -> bool:
        if self._generation.count or self._partial is not None:
            return True
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return False
        return self._room(self._waiting.head, self.config.max_num_batched_tokens) is not None

    def _schedule(self, lane: _Lane, now: int) -> None:
        self.start, self.steps, self._taken = now, 0, 0
        self.events += 1
        self._iterate(now)
        if self._generation.count or self._finishing or self._partial is not None:
            lane.under_way = True
            lane.start, lane.end = now, self.end
            self._queue.append(lane)
            for request in self._finishing:
                self._lane_of[request] = lane

    def _nothing_fits(self) -> None:
        """The batches that are under way hold the blocks."""

    def _generating(self, request: Request) -> Generation | None:
        lane = self._lane_of.get(request)
        if lane is None:
            return None
        finishing = self._finishing if lane is self._at else lane.finishing
        return None if request in finishing else lane.generation

    def _through(self, now: int, ticks: int) -> int:
        share, rest = divmod(ticks, len(self._free))
        at = now
        for stage, free in enumerate(self._free):
            at = max(at, free) + share + (rest if stage == 0 else 0)
            self._free[stage] = at
        return at

    def _look_at(self, lane: _Lane) -> None:
        self._at.finishing = self._finishing
        self._generation, self._finishing = lane.generation, lane.finishing
        self._at = lane

    def _members(self) -> list[Request]:
        at = self._at
        return [it for it in self._running if it is self._partial or self._lane_of.get(it) is at]

    def _computed(self, request: Request) -> int:
        return self._lane_of[request].generation.computed(request)

    def _release(self, request: Request, tokens: int) -> None:
        self._lane_of.pop(request, None)
        super()._release(request, tokens)

    def _let_go(self, request: Request, scheduled: int = 0) -> None:
        lane = self._lane_of.get(request)
        if lane is not None:
            self._look_at(lane)
            if request in self._finishing:  # cancelled while its last chunk is under way
                self._finishing.remove(request)
                if self.pool.caching:
                    self._write(request, request.computed)
                self._release(request, request.computed)
                return
            if lane.under_way:
                scheduled = 1  # its next token has a place already
        super()._let_go(request, scheduled)
