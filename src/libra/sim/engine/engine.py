"""The interface of one simulated engine: its calls, its plans, and its results.

Invariant: each iteration follows the rules of vLLM's V1 scheduler; one module for each phase of an iteration has them.
While only numbers of tokens change, many iterations are advanced together, with the same results as one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.sim.clock import TICKS
from libra.sim.engine.admission import cached_blocks, refusal, take_in
from libra.sim.engine.ahead import complete_ahead, drain_ahead, plan_ahead
from libra.sim.engine.arriving import see
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.jump import catch_up, cut_stretch, cut_to, ended_by, settle
from libra.sim.engine.messages import Pause, PullEnd, Sent
from libra.sim.engine.preemption import leave, mark, refresh
from libra.sim.engine.request import Chain, Request
from libra.sim.engine.running import complete, fill, nothing_fits, schedule
from libra.sim.engine.state import EngineState
from libra.sim.engine.tiers import Tiers


@dataclass(slots=True, eq=False, repr=False)
class SimEngine(EngineState):
    """An engine driven by its caller: `plan` returns the tick at which the next event ends, `commit` applies the event
    at that tick.

    `submit`, `cancel`, `interrupt`, `pause`, `ask` and `close` may be called at any tick in between, and return True if
    the event now ends earlier. At one tick, the caller commits first, then makes these calls, then plans. After each of
    these calls except `ask`, and after `adopt`, the caller has to plan an engine that is not busy, or is open. Only
    `plan` takes blocks for KV that is pulled. `pull_ended` reports that the KV arrived or never will; `sent` reports
    that KV kept by a request is no longer needed.

    `asked` lists the running requests that reached their `ask_at` with the last commit. `interrupted` lists requests
    that left unfinished with the last plan. `pulls` lists requests that got blocks for their KV, with the number of
    blocks. `ended` lists requests that ended without running: their KV did not arrive, or they needed only the first
    token, which came with the KV. The next commit or plan clears the four lists.
    """

    open: bool = field(default=False, init=False)  # may plan more before `end`
    closing: bool = field(default=False, init=False)  # takes no more work
    closed: bool = field(default=False, init=False)  # closing, and has no work left
    paused_ticks: int = field(default=0, init=False)
    _due: list[Pause] = field(default_factory=list, init=False)
    _pause: Pause | None = field(default=None, init=False)

    # Calls from outside

    def submit(self, request: Request, now: int) -> bool:
        """Queue a request, or refuse it (its status says so).

        Raises ValueError if the engine closes, or if the request has generated its `ask_at` tokens already.
        """
        config = self.config
        if self.closing:
            raise ValueError(f"engine {self.index} is closing: submit request {request.number} to another engine")
        if request.ask_at is not None and request.ask_at <= request.generated:
            raise ValueError(_too_late(request, request.ask_at, request.generated))
        request.engine = self.index
        room = config.max_model_len - request.prompt_tokens
        if room < 1 or request.prompt_tokens < 1 or request.output_tokens < 1:
            request.status, request.reason, request.finish = "refused", refusal(request, config), now
            return False
        if request.output_tokens > room:
            request.output_tokens = room
        if self.pool.caching:
            request.path = self.pool.path(request)
        self.carry(request.prompt_tokens)
        if not self.waiting.push(request) and self.blocked:
            return False  # the request waits behind one that does not fit
        self.blocked = False
        if len(self.running) >= config.max_num_seqs:
            return False
        return cut_stretch(self, now)

    def cancel(self, request: Request, now: int) -> bool:
        """Stop a request at the end of the current iteration, unless it finishes with that iteration. After that,
        `generated` is final."""
        if not self._has(request):
            return False
        mark(self, request, "cancelled")
        return cut_stretch(self, now)

    def interrupt(self, request: Request, now: int) -> bool:
        """Stop a request at the end of the current iteration, to continue on another engine. Unless it finishes with
        that iteration, the next plan puts it into `interrupted`. Its owner keeps the `generated` tokens, and puts them
        into the prompt of a new request. A request that is already leaving is not affected."""
        if not self._has(request) or request in self.leaving:
            return False
        mark(self, request, "interrupted")
        return cut_stretch(self, now)

    def release_leaving(self, now: int) -> None:
        """Release the leaving requests at a boundary. The next plan would release them, too, but other events at that
        tick may depend on the release."""
        if not self.busy and self.leaving:
            leave(self, sorted(self.leaving, key=lambda it: it.number), now)

    def pause(self, pause: Pause, now: int) -> bool:
        """Pause at the end of the current iteration, until the pause is over. A closing engine does not pause."""
        if self.closing:
            return False
        self._due.append(pause)
        return cut_stretch(self, now)

    def close(self, now: int) -> bool:
        """Take no more work, and stop for good at the end of the current iteration or pause. The next plan returns
        None, and puts all unfinished requests into `interrupted`, running ones first. Each `ask_at` is dropped. The
        cache can still be looked up."""
        if self.closing:
            return False
        self.closing = True
        for request in self.unfinished:
            request.ask_at = None
        return cut_stretch(self, now)

    def ask(self, request: Request, tokens: int, now: int) -> bool:
        """Stop at the end of the iteration with which a request has generated `tokens` tokens, and put the request into
        `asked`.

        This replaces the request's `ask_at`. A request that finishes with that token or before is not in `asked`.
        Raises ValueError if the request is leaving, has generated `tokens` tokens already, or neither runs nor waits on
        this engine.
        """
        if not self._has(request):
            raise ValueError(f"request {request.number} is not on engine {self.index}: ask the engine that has it")
        if self.closing or request in self.leaving:
            raise ValueError(f"request {request.number} leaves engine {self.index} with this iteration: ask earlier")
        generated = self.generated_by(request, now)
        if tokens <= generated:
            raise ValueError(_too_late(request, tokens, generated))
        request.ask_at = tokens
        generation = self.generation_of(request)
        if generation is None:
            return False
        generation.ask(request)
        steps = generation.steps_to(request, tokens)
        if not steps and self.under_way is not None:  # that token is under way
            reached = generation.generated(request)
            if reached < request.output_tokens:
                self.under_way.asks.append((request, tokens, reached))
            steps = 1
        return cut_to(self, steps)

    def pull_ended(self, request: Request, now: int, failure: str | None = None, *, first_token: bool = False) -> bool:
        """Record that the KV of a request's prompt has arrived, possibly with the request's first token; or that the
        transfer has failed, for the reason `failure`. The engine sees this at the end of the current iteration; it then
        frees the blocks of a request that was cancelled meanwhile."""
        self.notices.append(PullEnd(request, failure, first_token))
        return cut_stretch(self, now)

    def sent(self, request: Request, now: int) -> bool:
        """Free the blocks that a finished request keeps: at the end of the current iteration, or now if none runs."""
        self.notices.append(Sent(request))
        if not self.busy:
            self.count_held(now)
            see(self, now)
        return cut_stretch(self, now)

    def adopt(self, context: Chain | Request, tokens: int, now: int) -> int:
        """Take in the KV of a context's first `tokens` tokens from another engine. Returns how many of these tokens are
        newly present.

        Missing full blocks become findable, without a holder. They replace the least recently released blocks, and
        never held ones; if too few blocks are free, the last missing blocks are left out. Tokens that a running request
        is about to compute count as present, and no later block is taken in. Without prefix caching all tokens count as
        present. All present blocks of these tokens count as released last. A waiting request may fit now, so that the
        current event ends earlier: compare `end`. Raises ValueError if the engine is closing, or if the request has
        ended or has fewer than `tokens` tokens.
        """
        if self.closing:
            raise ValueError(f"engine {self.index} is closing: send KV to another engine")
        new = take_in(self, context, tokens, now)
        if new:
            self.blocked = False
            if self.waiting and len(self.running) < self.config.max_num_seqs:
                cut_stretch(self, now)
        return new * self.config.block_size

    def tier_changed(self, now: int) -> bool:
        """Record that another engine has begun a transfer in a shared tier: waiting requests are looked up again."""
        tiers = self.tiers
        return tiers is not None and bool(tiers.watched or tiers.failed) and cut_stretch(self, now)

    # What can be seen from outside

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def unfinished(self) -> list[Request]:
        """Requests accepted and not finished: running ones first."""
        return [*self.running, *self.arriving, *self.waiting]

    def generated_by(self, request: Request, now: int) -> int:
        """Tokens that a running or waiting request has generated at tick `now`."""
        ended = settle(self, now)
        generation = self.generation_of(request)
        if generation is None:
            return request.output_tokens if ended and request in self.ending else request.generated
        if self.under_way is not None:
            ended = (ended - 1) * self.lag(request)
        return generation.generated(request, ended)

    def cached_tokens(self, context: Chain | Request, now: int) -> int:
        """Tokens from the beginning of a context whose KV is in the cache. For a request, only tokens that it need not
        compute if it is admitted; for a chain, all of them."""
        return cached_blocks(self, context, now) * self.config.block_size

    def kv_usage(self, now: int) -> float:
        """Share of the blocks that are held."""
        settle(self, now)
        return self.pool.held / self.pool.blocks

    def token_seconds(self, now: int) -> float:
        """Seconds per token of one more sequence of mean length, while all accepted sequences run. If KV memory or
        `max_num_seqs` does not allow all of them at once, sequences take turns."""
        config, flights = self.config, len(self.flights.all)
        accepted = -(-(len(self.running) + len(self.arriving) + len(self.waiting)) // flights)
        # Generated tokens count as far as they exceed the prompts of requests that do not generate yet.
        generating = self.flight.generation.context_after(ended_by(self, now))
        context = max(generating, self.load_tokens // flights)
        more = context + context // accepted if accepted else 1
        turns = max(1.0, (accepted + 1) / config.max_num_seqs, flights * more / config.kv_tokens)
        batch = self.batch(max(1, int((accepted + 1) / turns)))
        return turns * self.decode_ticks(batch, int(more / turns)) / TICKS

    def decode_ticks(self, batch: DecodeBatch, context: int) -> int:
        """Ticks of one iteration of a batch whose contexts have `context` tokens in total."""
        base, slope, _ = self.cost.line(batch, context)
        return base + slope * context

    def recall_rate(self, now: int) -> float:
        """Recalls per second by the lender of the engine's device."""
        return 0.0

    @property
    def borrowed(self) -> bool:
        """Whether the engine has to yield its device to a lender. It then stops at once; its KV stays available."""
        return False

    # Next event

    def plan(self, now: int) -> int | None:
        """Choose the next event at an iteration's boundary, and return the tick at which the event ends. None: there is
        nothing to do; a closing engine is then closed."""
        if self.asked or self.interrupted or self.pulls or self.ended:
            self._forget_told()
        if now > self.seen:
            self.count_held(now)
        self.steps = 0
        if self.tiers is not None:
            self.waits = self.open = False
            self.notices += [PullEnd(request, None) for request in self.tiers.settle(now)]
        if self.notices:
            see(self, now)
        if self.closing or self.leaving or self._due or self._pause is not None:
            if self.closing and not self.flights.under_way and self.under_way is None and self._pause is None:
                self._close(now)
                return None
            if self.leaving:
                leave(self, sorted(self.leaving, key=lambda it: it.number), now)
            if self._due or self.closing or self._pause is not None:
                return self._drain(now)
        if self.overlapping:
            under_way = fill(self, now)
            self.busy, self.open = under_way > 0, under_way < len(self.flights.all)
            return self.end if under_way else None
        if not (self.running or self.waiting or self.ready) and self.under_way is None and self.tiers is None:
            self.busy = False
            return None
        return self._iterate(now)

    def _iterate(self, now: int) -> int | None:
        """Plan an iteration."""
        self.start = now
        self.busy = True
        self.events += 1
        if self.tiers is not None:
            return self._iterate_with(self.tiers, now)
        ahead = self.config.async_scheduling
        if not (plan_ahead(self, now) if ahead else schedule(self, now, self.most_steps)):
            if not (self.arriving or self.orphans or self.sending):
                raise nothing_fits(self)
            self.events -= 1
            self.busy = False
            return None
        return self.end

    def _iterate_with(self, tiers: Tiers, now: int) -> int | None:
        """As `_iterate`, with tiers: an iteration may have to wait for a store, and an engine for KV."""
        self.wait = 0
        ahead = self.config.async_scheduling
        if plan_ahead(self, now) if ahead else schedule(self, now, self.most_steps):
            tiers.fetches.forget()
            event = tiers.next_event()
            if event is not None:
                cut_stretch(self, event)
            return self.end
        self.events -= 1
        if not (self.arriving or self.orphans or self.sending):
            tiers.rest(list(self.waiting))
        following = now + self.wait if self.wait else tiers.next_event()
        if following is None:
            if (self.waiting or self.running) and not (self.orphans or self.sending):
                raise nothing_fits(self)
            self.busy = False
            return None
        self.waits, self.end, self.open = True, following, not self.wait
        return self.end

    def _drain(self, now: int) -> int:
        """Let the batches in flight end, without a new one; then begin the pause."""
        if self.flights.under_way:
            self.end = self.flights.under_way[0].end
        elif self.under_way is not None:
            drain_ahead(self, now)
        elif self._pause is None:
            self._pause = self._due.pop(0)
            self.start = now
            self.end = now + self._pause.ticks
        self.busy, self.open = True, False
        return self.end

    def commit(self) -> list[Request]:
        """Apply the plan. Returns the requests that finished with it, in order."""
        if self.asked or self.interrupted or self.pulls or self.ended:
            self._forget_told()
        self.busy = False
        if self.waits:
            self.count_held(self.end)
            self.waits = self.open = False
            return []
        if self._pause is not None:
            self.count_held(self.end)
            self.paused_ticks += self.end - self.start
            if self._pause.refresh:
                refresh(self)
            self._pause = None
            return []
        if self.overlapping:
            self.flight = flight = self.flights.land()
            # A full pipeline is busy all the time, not once for each stage.
            self.start = flight.end - (flight.end - flight.start) // len(self.flights.all)
            self.end = flight.end
        return complete_ahead(self) if self.under_way is not None else complete(self)

    def stop(self, now: int) -> None:
        """End the simulation: count the iterations that have ended by `now`, and the elapsed time of the current
        one."""
        if self.busy and self.steps > 1:
            catch_up(self, now + 1)
        self.count_held(now)
        if self._pause is not None:
            self.paused_ticks += now - self.start
        elif self.busy and not self.overlapping and not self.waits:
            self.busy_ticks += now - self.start
        for request in self.running:
            generation = self.generation_of(request)
            if generation is not None:
                request.generated = generation.generated(request, -self.lag(request))
        for request, status in self.leaving.items():
            if status == "cancelled":
                request.status, request.finish = status, now

    def _has(self, request: Request) -> bool:
        return request.engine == self.index and request.status in ("waiting", "running")

    def _forget_told(self) -> None:
        """Replace the lists of the last commit and plan by new ones; a caller may keep the old lists."""
        self.asked, self.interrupted, self.pulls, self.ended = [], [], [], []

    def _close(self, now: int) -> None:
        """Return all unfinished requests at the last boundary."""
        unfinished = self.unfinished
        for request in unfinished:
            if request not in self.leaving:
                mark(self, request, "interrupted")
        leave(self, unfinished, now)
        self.leaving.clear()  # only finished requests are left in it
        self.closed, self.busy, self.open = True, False, False
        self.start = now


def _too_late(request: Request, tokens: int, generated: int) -> str:
    return (
        f"request {request.number} has generated {generated} tokens: set ask_at to {generated + 1} or more, not"
        f" {tokens}"
    )
