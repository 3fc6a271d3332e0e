"""A run's measurements for its planner: speeds, costs of role changes, the router's hit rate.

Invariant: every value was measured by this run, or comes from its calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from libra.backends.launch.launcher import WorkerLink
from libra.backends.protocols import Engine, StepResult
from libra.backends.transport.engine_messages import LoanState
from libra.config.run import PlannerConfig, ShapeConfig, TrainingConfig
from libra.cost.device import DeviceProfile, scaled
from libra.exec.ratio import Ratio
from libra.lengths import LengthTracker
from libra.loop.episode import Episode
from libra.loop.fleet import ServingEngine
from libra.plan.allocation import Allocation
from libra.plan.options.slots import make_tracker
from libra.plan.price_bias import PeriodSeconds, PriceBias
from libra.plan.replanner import Replanner
from libra.plan.site import SlotSite
from libra.plan.solution import Prediction
from libra.plan.transition import Device, Role
from libra.records.schema import StepLoan

_LEAST_SHARE = 0.02  # keeps the prices of a device finite that is recalled for long


class EngineWork(NamedTuple):
    """Counters of engines, as sums since their start or as differences."""

    busy_seconds: float = 0.0
    iterations: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    turns: int = 0


class EngineCounters:
    def __init__(self) -> None:
        self._seen: dict[WorkerLink, EngineWork] = {}  # by link, since the next engine of a slot counts from 0
        self.busiest_seconds = 0.0  # of the busiest engine, between the last two calls

    def gained(self, instances: Iterable[ServingEngine]) -> EngineWork:
        """Work of all engines on the run's own devices since the last call."""
        own = [entry.handle for entry in instances if not entry.handle.lent]
        seen, self._seen = self._seen, {engine.link: _work(engine) for engine in own}
        gains = [
            [new - old for new, old in zip(work, seen.get(link, EngineWork()), strict=True)]
            for link, work in self._seen.items()
        ]
        self.busiest_seconds = max((busy for busy, *_ in gains), default=0.0)
        return EngineWork._make(map(sum, zip(EngineWork(), *gains, strict=True)))


class LoanCounters:
    """Estimates the share of time for which an engine has a lent device. This is a product of two shares: the granted
    part of the time in which the engine has turns to make, and the part of the run's time in which the device is
    lent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[WorkerLink, tuple[float, float, float, float]] = {}
        self._granted, self._there = Ratio(), Ratio()
        self.last: dict[str, StepLoan] = {}  # of every lent engine, between the last two calls

    @property
    def share(self) -> float:
        """The estimated share; 1 before any observation."""
        return min(1.0, max(_LEAST_SHARE, self._granted.value * self._there.value))

    def observe(self, instances: Iterable[ServingEngine]) -> None:
        """Add the loans' grants since the last call."""
        self.last, now, there, seconds = {}, self._clock(), 0.0, 0.0
        for engine in (entry.handle for entry in instances if entry.handle.lent):
            # An engine without a report has had no grant yet, but its device may already be recalled, so its clock
            # starts.
            loan, gone = engine.loan or LoanState("", 0.0, 0.0, 0, 0), engine.away_seconds
            lent, wanted, away, at = self._seen.get(engine.link, (0.0, 0.0, gone, now))
            self.last[engine.name] = StepLoan(loan.wanted - wanted, loan.lent - lent, engine.version, loan.away)
            self._seen[engine.link] = loan.lent, loan.wanted, gone, now
            there, seconds = there + max(0.0, now - at - (gone - away)), seconds + now - at
        wanted = sum(loan.wanted for loan in self.last.values())
        lent = sum(loan.lent for loan in self.last.values())
        if wanted > 0:
            self._granted.observe(lent, wanted)
        if seconds > 0:
            self._there.observe(there, seconds)


def _work(engine: Engine) -> EngineWork:
    return EngineWork(
        engine.busy_seconds, engine.iterations, engine.generated_tokens, engine.prefilled_tokens, engine.finished_turns
    )


class Observations:
    """Feeds a run's `Replanner` with measurements, and provides its site."""

    def __init__(
        self,
        planner: PlannerConfig,
        training: TrainingConfig,
        engines: Mapping[str, ShapeConfig],
        profile: DeviceProfile,
        max_turn_tokens: int,
        lent_engine: ShapeConfig | None = None,
    ) -> None:
        """`lent_engine` is the shape of engines on lent devices."""
        self._planner, self._training, self._engines, self._lent_engine = planner, training, engines, lent_engine
        self._max_turn_tokens = max_turn_tokens
        self.profile = profile
        self.replanner = self._make_replanner(make_tracker(planner))
        self.counters = EngineCounters()
        self.loans = LoanCounters()
        self._forward_tokens = Ratio()  # tokens through the trainer, per trajectory
        self._router_hits = Ratio()
        self._routed_tokens = self._hit_tokens = 0  # since the last step
        self._engine_speed = Ratio()  # measured over modelled busy seconds
        self._train_speed = Ratio()

    @property
    def tracker(self) -> LengthTracker:
        return self.replanner.tracker

    def restore_tracker(self, snapshot: dict[str, Any]) -> None:
        """Continue from a checkpoint's statistics."""
        self.replanner = self._make_replanner(LengthTracker.restore(snapshot))

    def _make_replanner(self, tracker: LengthTracker) -> Replanner:
        """A replanner. The first allocation is the user's, so its lifetime says nothing about plans."""
        return Replanner(period=self._planner.period, tracker=tracker, holds=self._planner.horizon)

    def observe(self, episodes: Sequence[Episode], limits: Sequence[int]) -> None:
        """Learn from finished episodes. `limits` are the bucket limits of their routing; empty: unknown."""
        self.replanner.observe(episode.trajectory for episode in episodes)
        if not limits:
            return
        for episode in episodes:
            peak = episode.trajectory.peak_context
            own = next((index for index, limit in enumerate(limits) if peak <= limit), len(limits) - 1)
            for turn, bucket in list(zip(episode.trajectory.turns, episode.turn_buckets, strict=True))[1:]:
                self._routed_tokens += turn.generated_tokens * (own > 0)
                # Generated outside the first bucket, a turn of a short episode takes room meant for the long episodes
                # there.
                self._hit_tokens += turn.generated_tokens * (bucket == own if own > 0 else bucket > 0)

    def learn(self, priced: Prediction, found: PeriodSeconds, untried: bool) -> PriceBias:
        """Learn from a settled period's price and measurement; see `Replanner.learn`. Returns the new bias."""
        self.replanner.learn(priced, found, untried=untried)
        return self.replanner.bias

    def observe_training(self, result: StepResult, trajectories: int) -> None:
        """Learn from one step's training: its tokens, and the ratio of its time to the calibrated time."""
        self._forward_tokens.observe(result.forward_tokens, trajectories)
        modelled = self.profile.train.step_seconds(result.forward_tokens, result.replicas)
        self._train_speed.observe(result.wall_seconds, modelled)

    def observe_engines(self, work: EngineWork) -> None:
        """Learn from the engines' work since the last call: the ratio of its busy time to the calibrated time. Also add
        the router's hits since then."""
        self._router_hits.observe(self._hit_tokens, self._routed_tokens)
        self._routed_tokens = self._hit_tokens = 0
        cost = self.profile.engine
        context = work.generated_tokens * self.tracker.mean_decode_context
        modelled = (
            cost.step * work.iterations
            + cost.per_sequence * work.generated_tokens
            + cost.per_context_token * context
            + cost.per_prefill_token * work.prefilled_tokens
            + cost.per_turn * work.turns
        )
        if modelled > 0:
            self._engine_speed.observe(work.busy_seconds, modelled)

    def current_profile(self) -> DeviceProfile:
        """The calibration, scaled to the recent speed of the devices, since the speed of shared machines varies."""
        return scaled(self.profile, self._engine_speed.value, self._train_speed.value)

    def observe_move(self, role: Role, seconds_taken: float) -> None:
        """Replace the calibrated cost of a role change by a measured one."""
        switch = self.profile.switch
        measured = (
            replace(switch, trainer_join=seconds_taken)
            if role is Role.TRAIN
            else replace(switch, engine_start=seconds_taken)
        )
        self.profile = replace(self.profile, switch=measured)

    def site(self, devices: tuple[Device, ...], current: Allocation | None) -> SlotSite:
        """The site of these devices with their `current` allocation and the latest costs."""
        return SlotSite(
            self._training,
            self._engines,
            self._planner.horizon,
            devices,
            current,
            self.current_profile(),
            self._max_turn_tokens,
            self._forward_tokens.value if self._forward_tokens.below else self.tracker.mean_peak,
            min(1.0, self._router_hits.value),
            self._lent_engine,
            self.loans.share,
        )
