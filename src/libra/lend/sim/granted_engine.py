"""A rollout engine on a device that serves: an iteration begins only with a grant.

Invariant: arrivals at the server do not depend on rollout, and a serving step waits at most for the iteration in
progress. Iterations on consecutive grants are simulated together, with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from libra.lend.gate import Grant, Refusal, ServingView, SharingRule
from libra.lend.recall import WatchedRule
from libra.lend.sim.loan_watch import LoanWatch
from libra.lend.sim.step_budget import StepBudgets
from libra.lend.sim.tenant import ServingTenant
from libra.sim.clock import TICKS, seconds
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.jump import cut, end_of
from libra.sim.engine.request import Request
from libra.sim.engine.running import nothing_fits, schedule

_HORIZON = 30.0  # seconds over which the granted share is averaged


class LenderDevice:
    """The device of a serving engine, lent or not. The device outlives the engines that borrow it. `share` is the share
    of time that is granted while rollout has work: first an expected share, then the mean over recent seconds. `exact`
    simulates every serving step, which is slower and has the same outcome. `watched` keeps the history."""

    def __init__(
        self,
        tenant: ServingTenant,
        rule: SharingRule,
        share: float,
        *,
        exact: bool = False,
        watched: bool = False,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share:g}; give the granted share of time: above 0, at most 1")
        self.tenant = tenant
        self.at = 0  # tick from which the device is free
        self.lent = 0  # ticks that rollout computed
        self.recalls = 0  # of engines that borrowed the device
        self.put_out = 0  # turns that were stopped because rollout's memory shrank
        self.share = share
        self._rule, self._exact = rule, exact
        self._watched = rule if isinstance(rule, WatchedRule) else None
        self.watch = LoanWatch(rule) if watched else None
        self._since = 0  # serving steps since the last grant
        self._looked = -1, -1  # steps and requests of serving at the last look at its memory
        self._averaged, self._lent = 0, 0  # tick up to which `share` is averaged, and ticks lent by then

    @property
    def recalled(self) -> str | None:
        """Reason why the device is not lent; None: the device is lent."""
        return None if self._watched is None else self._watched.recall.recalled

    def memory(self, now: int) -> int | None:
        """Blocks of KV that the rollout engine has from now on, if serving had a step or an arrival since the last
        call; None: no change."""
        tenant = self.tenant
        if tenant.kv is None:
            return None
        tenant.arrive(now)
        seen = tenant.made, len(tenant.came)
        if seen == self._looked:
            return None
        self._looked = seen
        blocks = tenant.kv.look(now)
        if self.watch is not None:
            self.watch.has_memory(now, tenant.kv.held)
        return blocks

    def ask(self, now: int) -> Grant | Refusal:
        """Decide whether rollout gets the device next. The device is free at `now`."""
        self.tenant.arrive(now)
        return self.decide(self.tenant.view(self._since), now)

    def decide(self, view: ServingView, now: int) -> Grant | Refusal:
        answer = self._rule.decide(view, now, self.tenant.cost)
        if self._watched is not None and self._watched.breach is not None:
            self.tenant.uncover()
        if self.watch is not None:
            self.watch.asked(view, now, answer)
        return answer

    def used(self, end: int) -> None:
        """Record that rollout had the device until `end`."""
        if self.watch is not None:
            self.watch.used(self.at, end)
        self.lent += end - self.at
        self.at, self._since = end, 0

    def serve(self) -> None:
        """Make a serving step, or wait for the next request. Raises RuntimeError if no request will arrive: serving is
        idle, so only a rollout step longer than the longest grant can have been refused."""
        end = self.tenant.step(self.at)
        if end is None:
            end = self.tenant.next_arrival
            if end is None:
                raise RuntimeError("a rollout step takes longer than the longest grant: grant more, or lower its batch")
        else:
            self._since += 1
            self._tell_served(end)
        self.at = end
        elapsed, lent = end - self._averaged, self.lent - self._lent
        self.share += (1 - math.exp(-elapsed / (_HORIZON * TICKS))) * (lent / elapsed - self.share)
        self._averaged, self._lent = end, self.lent

    def serve_alone(self, now: int) -> None:
        """Serve until the device is free at `now` or later; rollout has nothing to do. Each arrival checks the load."""
        tenant = self.tenant
        if self.at >= now:
            return
        while self.at < now:
            if tenant.arrive(self.at):
                self.decide(tenant.view(self._since), self.at)
            following, made = tenant.next_arrival, tenant.made
            end = tenant.step(self.at) if self._exact else tenant.steps_until(self.at, now)
            self._since += tenant.made - made
            if end is not None:
                self._tell_served(end)
            self.at = end if end is not None else now if following is None else min(now, following)
        self._averaged, self._lent = self.at, self.lent

    def serve_out(self, now: int) -> list[Request]:
        """Serve alone until all requests that arrived by `now` have finished; returns these requests."""
        self.serve_alone(now)
        if self.tenant.arrive(self.at):
            self.decide(self.tenant.view(self._since), self.at)
        came = [request for request in self.tenant.came if request.arrival <= now]
        for request in came:
            while request.finish is None:
                self.serve_alone(self.at + TICKS)
        return came

    def _tell_served(self, end: int) -> None:
        if self.watch is not None:
            self.watch.served(self.at, end, self.tenant.served, self.tenant.closest)

    def returns(self) -> int:
        """Serve alone until the device is lent again. Returns the tick."""
        while self.recalled is not None:
            assert self._watched is not None
            resumes, following = self._watched.resumes, self.tenant.next_arrival
            until = math.ceil(min(resumes, self.at + TICKS if following is None else following))
            self.serve_alone(max(until, self.at + 1))
            self.ask(self.at)
        return self.at


@dataclass(slots=True, eq=False, repr=False)
class GrantedEngine(SimEngine):
    """The rollout engine of one loan. On a recall of the loan the engine calls `recalled` with the tick, and the
    engine's owner then closes it. While serving has the device the engine waits; calls to it take effect at the end of
    the serving step."""

    _: KW_ONLY
    device: LenderDevice
    recalled: Callable[[int], None]
    _budgets: StepBudgets = field(init=False)
    _waits: bool = field(default=False, init=False)  # for the device, until `end`

    # `dataclass` replaces a class with slots by a new one, in which super() without arguments does not work.

    def __post_init__(self) -> None:
        SimEngine.__post_init__(self)
        if self.overlapping or self.config.async_scheduling or not self.config.enable_chunked_prefill:
            raise ValueError(
                "a lent engine fits each step to a grant: set pipeline_parallel_size to 1 and enable_chunked_prefill,"
                " and leave async_scheduling out"
            )
        self._budgets = StepBudgets(self.config)
        if self.device.tenant.kv is not None:
            self.pool.resize(self.device.tenant.kv.own)

    def token_seconds(self, now: int) -> float:
        """`SimEngine.token_seconds` divided by the granted share of time."""
        return SimEngine.token_seconds(self, now) / self.device.share

    def recall_rate(self, now: int) -> float:
        """Recalls per second so far."""
        return self.device.recalls / seconds(now) if now else 0.0

    @property
    def borrowed(self) -> bool:
        return True

    def commit(self) -> list[Request]:
        if self._waits:
            self._forget_told()
            self._waits = self.busy = False
            return []
        computes, end = self._pause is None, self.end
        finished = SimEngine.commit(self)
        if computes:
            self.device.used(end)
        return finished

    def stop(self, now: int) -> None:
        if self._waits:
            self._waits = self.busy = False
        SimEngine.stop(self, now)

    def _iterate(self, now: int) -> int | None:
        device = self.device
        device.serve_alone(now)
        if device.at == now:
            lent = self._fit_memory(now)
            answer = device.ask(now)
            if device.recalled is not None or not lent:
                self.busy = False
                self.device.recalls += 1
                self.recalled(now)
                return None
            if not (self.running or self.waiting):
                self.busy = False
                return None
            if isinstance(answer, Grant) and self._use(now, int(answer.length)):
                return self.end
            device.serve()
        self.start, self.steps, self.end = now, 0, device.at
        self.busy = self._waits = True
        return self.end

    def _fit_memory(self, now: int) -> bool:
        """Set the pool to the blocks that rollout has now, and stop the turns admitted last if these need more. Returns
        whether the blocks suffice for the longest turn."""
        blocks = self.device.memory(now)
        if blocks is not None and blocks != self.pool.blocks:
            while self.pool.held > blocks:
                self.interrupt(max(self.running, key=lambda it: it.admission), now)
                self.release_leaving(now)
                self.device.put_out += 1
            self.count_held(now)
            self.pool.resize(blocks)
            self.blocked = False
        kv = self.device.tenant.kv
        return kv is None or kv.useful

    def _use(self, now: int, grant: int) -> bool:
        """Plan a step within the grant. Returns False if no step fits."""
        config = self._budgets.fitting(self, grant)
        if config is None:
            return False
        self.config, self.start, self.busy = config, now, True
        self.events += 1
        if not schedule(self, now, self.most_steps):
            raise nothing_fits(self)
        if self.steps > 1:
            self._cut_run()
        return True

    def _cut_run(self) -> None:
        """Drop the planned iterations from the first one that would get no grant, or that would begin at or after
        serving's next arrival. The first iteration always stays."""
        device, steps = self.device, 1
        following = device.tenant.next_arrival
        view = device.tenant.view(0)
        at = end_of(self.pieces, 1)
        while steps < self.steps and (following is None or at < following):
            answer, end = device.decide(view, at), end_of(self.pieces, steps + 1)
            if not isinstance(answer, Grant) or end - at > int(answer.length):
                break
            steps, at = steps + 1, end
        if steps < self.steps:
            self.steps, self.end = cut(self.pieces, self.steps, at)
