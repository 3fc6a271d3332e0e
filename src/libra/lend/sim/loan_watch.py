"""Recorder of the history of a lent device, step by step, for display.

Invariant: recording does not change the simulation. Steps that were simulated together are one span, with the smallest
of their margins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from libra.lend.gate import Grant, Refusal, ServingView, SharingRule, Slo
from libra.lend.recall import WatchedRule
from libra.lend.records.loan_history import GrantSpan, LoanHistory, RecallSpan, ServingSpan, UserRequest
from libra.lend.rules import Alternate, PositiveSlack, ServeFirst, TimeSlices
from libra.lend.traffic.envelope import Load, RateWindow
from libra.sim.clock import TICKS, seconds
from libra.sim.engine.request import Request

_NAMES = {ServeFirst: "serve-first", Alternate: "naive", PositiveSlack: "published", TimeSlices: "fixed"}


class LoanWatch:
    """Recorder for a device shared by `rule`. Arguments are in ticks, the history is in seconds."""

    def __init__(self, rule: SharingRule) -> None:
        self._rule, self._envelope = rule, rule.envelope if isinstance(rule, WatchedRule) else None
        self._window = None if self._envelope is None else RateWindow(self._envelope.window)
        self._grants, self._serving = list[GrantSpan](), list[ServingSpan]()
        self._load, self._refusals = list[tuple[float, float]](), Counter[str]()
        self._recalls, self._quotas = list[RecallSpan](), list[tuple[float, int]]()
        self._granted = 0.0

    def asked(self, view: ServingView, now: int, answer: Grant | Refusal) -> None:
        """Note a decision about the device, which is free at `now`."""
        if isinstance(answer, Grant):
            self._granted += answer.length
        else:
            self._refusals[answer.reason] += 1
        if self._envelope is not None and self._window is not None:
            load = Load(self._window.rate(now / TICKS, view.came), view.queued, view.live, view.context)
            self._load.append((seconds(now), self._envelope.used(load)))

    def used(self, start: int, end: int) -> None:
        """Record rollout's use of the device, under the grants since the latest step of rollout or serving."""
        granted, self._granted = self._granted / TICKS, 0.0
        self._grants.append(GrantSpan(seconds(start), seconds(end), granted))

    def served(self, start: int, end: int, sequences: int, margin: float) -> None:
        """Record that serving had the device. Its smallest token margin was `margin` ticks; inf: no token was due."""
        self._granted = 0.0
        known = None if margin == math.inf else margin / TICKS
        self._serving.append(ServingSpan(seconds(start), seconds(end), sequences, known))

    def recalled(self, start: int, end: int, why: str) -> None:
        self._recalls.append(RecallSpan(seconds(start), seconds(end), why))

    def has_memory(self, now: int, held: int) -> None:
        """Record that rollout has `held` bytes of KV memory from `now` on."""
        if not self._quotas or self._quotas[-1][1] != held:
            self._quotas.append((seconds(now), held))

    def history(
        self,
        name: str,
        slo: Slo,
        pace: float,
        longest: float,
        requests: Iterable[Request],
        blamed: frozenset[int] | None,
    ) -> LoanHistory:
        """The history so far. `requests` are users' requests in the order of arrival; unfinished requests are left
        out."""
        return LoanHistory(
            name,
            _NAMES.get(type(self._rule), "gate"),
            slo,
            pace,
            longest,
            self._grants,
            self._serving,
            self._load,
            self._refusals,
            self._recalls,
            self._quotas,
            requests=[_user_request(it) for it in requests if it.first_token is not None and it.finish is not None],
            blamed=blamed,
        )


def _user_request(it: Request) -> UserRequest:
    assert it.first_token is not None and it.finish is not None
    return UserRequest(
        it.number,
        seconds(it.arrival),
        seconds(it.finish),
        it.prompt_tokens,
        it.output_tokens,
        seconds(it.first_token - it.arrival),
        seconds(it.finish - it.first_token) / max(1, it.output_tokens - 1),
    )
