"""Recall of a loan, and its resumption after a quiet time.

Invariant: while the load is outside the envelope, nothing is lent from the next step on. Each recall soon after lending
has resumed doubles the next quiet time.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.lend.gate import Grant, Refusal, ServingCost, ServingView, SharingRule
from libra.lend.traffic.envelope import Envelope, Load, RateWindow


@dataclass(frozen=True, slots=True)
class RecallPolicy:
    """Quiet times, in seconds. Raises ValueError."""

    quiet: float = 5.0  # time inside the envelope before lending resumes
    most_quiet: float = 300.0  # limit of the doubling

    def __post_init__(self) -> None:
        if not 0 < self.quiet <= self.most_quiet:
            raise ValueError(
                f"quiet is {self.quiet:g} s and most_quiet {self.most_quiet:g} s: give 0 < quiet <= most_quiet"
            )


class Recall:
    """Recalls the device when its load leaves the envelope, and lends again after a quiet time inside."""

    def __init__(self, policy: RecallPolicy) -> None:
        self.policy = policy
        self.recalled: str | None = None  # the reason; None while the device is lent
        self.recalls = 0
        self._quiet = policy.quiet
        self._calm_since: float | None = None
        self._returned = -float("inf")

    @property
    def resumes(self) -> float:
        """Time at which lending resumes without further events: inf while the load is outside its envelope."""
        return float("inf") if self._calm_since is None else self._calm_since + self._quiet

    def observe(self, breach: str | None, now: float) -> str | None:
        """Observe the load. `breach` describes how it leaves the envelope; None if it is inside. Returns the reason for
        the recall, or None while the device is lent.
        """
        if breach is not None:
            if self.recalled is None:
                self.recalls += 1
                soon = now - self._returned < self._quiet
                self._quiet = min(2 * self._quiet, self.policy.most_quiet) if soon else self.policy.quiet
            self.recalled, self._calm_since = breach, None
        elif self.recalled is not None:
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= self._quiet:
                self.recalled, self._returned = None, now
        return self.recalled


class WatchedRule:
    """Follows `rule` inside the certificate's envelope, and grants nothing outside. `second` is one second in the unit
    of the view's times."""

    def __init__(self, rule: SharingRule, envelope: Envelope, recall: Recall, second: float = 1.0) -> None:
        self._rule, self.envelope, self.recall, self._second = rule, envelope, recall, second
        self.breach: str | None = None  # how the load left the envelope, at the last decision; None: it was inside
        self._window = RateWindow(envelope.window)

    @property
    def resumes(self) -> float:
        """Time at which lending resumes without further events, in the unit of the view's times."""
        return self.recall.resumes * self._second

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        at = now / self._second
        load = Load(self._window.rate(at, view.came), view.queued, view.live, view.context)
        self.breach = self.envelope.breach(load)
        if self.recall.observe(self.breach, at) is not None:
            return Refusal("load")
        return self._rule.decide(view, now, cost)
