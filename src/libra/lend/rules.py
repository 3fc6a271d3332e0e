"""Baseline rules for sharing a device, without a latency bound, for comparison with the gate."""

from __future__ import annotations

from dataclasses import dataclass

from libra.lend.gate import Grant, Refusal, ServingCost, ServingView


@dataclass(frozen=True, slots=True)
class NoLending:
    """Rollout never gets the device."""

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        return Refusal("owner")


@dataclass(frozen=True, slots=True)
class ServeFirst:
    """Rollout runs while serving has nothing to do."""

    longest: float

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        return Refusal("load") if view.live else Grant(now + self.longest, self.longest)


@dataclass(frozen=True, slots=True)
class Alternate:
    """Naive sharing: steps of serving and rollout alternate."""

    longest: float

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        return Refusal("load") if view.live and not view.steps else Grant(now + self.longest, self.longest)


@dataclass(frozen=True, slots=True)
class TimeSlices:
    """A fixed split of the device: rollout has its share of every period, whatever serving needs."""

    longest: float
    period: float
    share: float = 0.5

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        left = self.share * self.period - now % self.period
        return Grant(now + min(left, self.longest), min(left, self.longest)) if left > 0 else Refusal("owner")


@dataclass(frozen=True, slots=True)
class PositiveSlack:
    """ROSE's rule, as published (arXiv 2605.06534): rollout runs if every live request can still be in time when
    serving runs alone after the grant. The rule also spends the slack of first tokens."""

    longest: float
    ttft: float  # longest time to the first token: the share `use` of the SLO

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        if not view.live:
            return Grant(now + self.longest, self.longest)
        due = min(view.due, view.oldest + self.ttft)
        if now + self.longest + cost.catch_up(view) > due:
            return Refusal("due")
        return Grant(now + self.longest, self.longest)
