"""The gate: when a rollout may use a device that serves, and for how long.

Invariant: if serving steps take at most C and grants end within at most B, a request's tokens after its first are never
late, and its first token comes within `ttft_bound`. The proof is in docs/lending.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["first token", "due", "load", "owner"]


@dataclass(frozen=True, slots=True)
class Slo:
    """The SLO of a server: seconds to the first token, and seconds per token after it. Raises ValueError."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value:g} s; give a positive number of seconds")

    def pace(self, use: float) -> float:
        """Seconds per token (tau) to which serving is slowed down: the share `use` of `tpot`. Raises ValueError."""
        if not 0 < use <= 1:
            raise ValueError(f"use is {use:g}; it is the share of tpot that may be spent: above 0, at most 1")
        return use * self.tpot


@dataclass(frozen=True, slots=True)
class ServingView:
    """A serving engine's requests between two steps. Times are on one monotonic clock, in one unit."""

    live: int  # requests that have arrived and have not finished
    waiting: int  # live requests without a first token
    due: float  # earliest due time of a next token (`due`); inf: no request has a first token
    oldest: float = math.inf  # arrival of the request that has waited longest
    queued: int = 0  # prompt tokens of waiting requests that are not computed yet
    context: int = 0  # tokens of the contexts of all live requests
    steps: int = 0  # serving steps since the last grant
    came: int = 0  # requests that have ever arrived

    def __post_init__(self) -> None:
        if not 0 <= self.waiting <= self.live:
            raise ValueError(f"{self.waiting} of {self.live} requests wait; give at most the live ones")


IDLE = ServingView(live=0, waiting=0, due=math.inf)


class ServingCost(Protocol):
    """Bounds on the time that serving takes, in the unit of the view's times."""

    def longest_step(self, view: ServingView) -> float:
        """C: the longest time of a step with all live requests and a full prefill chunk."""
        ...

    def catch_up(self, view: ServingView) -> float:
        """Time until serving, alone, has made a token for every live request."""
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to use the device until `expires`; serving does not wait longer for a borrower."""

    expires: float
    length: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """No grant for this view."""

    reason: Reason


class SharingRule(Protocol):
    """Decides between serving and rollout for the next use of the device."""

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal: ...


@dataclass(frozen=True, slots=True)
class Gate:
    """Grants a time b <= B under two conditions. First, no request waits for its first token: the slack of first tokens
    is reserved for requests that may still arrive. Second, the longest serving step that may follow the grant ends
    before the next token is due. If that step takes longer than the pace, tokens may be late, so the gate grants
    nothing while a token is due.
    """

    longest: float  # B, of a grant
    shortest: float  # a shorter grant has no room for a rollout step
    pace: float = math.inf  # tau; inf assumes that steps keep the pace, as they do inside a certificate's envelope

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= self.longest < math.inf:
            raise ValueError(
                f"the shortest grant is {self.shortest:g}, the longest {self.longest:g}; give 0 < shortest <= longest"
            )

    def decide(self, view: ServingView, now: float, cost: ServingCost) -> Grant | Refusal:
        if view.waiting:
            return Refusal("first token")
        if view.due == math.inf:
            return Grant(now + self.longest, self.longest)
        step = cost.longest_step(view)
        length = min(self.longest, view.due - now - step)
        return Refusal("due") if step > self.pace or length < self.shortest else Grant(now + length, length)


def due(first_token: float, tokens: int, pace: float) -> float:
    """Due time of the next token of a request with `tokens` tokens, the first of them made at `first_token`."""
    return first_token + tokens * pace


def ttft_bound(longest: float, serving_step: float, queued: int, prefill: int) -> float:
    """Time within which a request has its first token, by (ii) of docs/lending.md.

    One grant and one step may be in progress when the request arrives; the gate grants nothing more until the first
    token. Each step computes up to `prefill` of the `queued` waiting prompt tokens, which include the request's own.
    `prefill` is the token budget of a step minus one for each request that decodes. Raises ValueError if `prefill` is
    below 1.
    """
    if prefill < 1:
        raise ValueError(f"a step has room for {prefill} prompt tokens: raise max_num_batched_tokens over max_num_seqs")
    return longest + serving_step * (1 + -(-queued // prefill))


def ttft_queue(ttft: float, longest: float, serving_step: float, prefill: int) -> int:
    """The inverse of `ttft_bound`: the most prompt tokens, a request's own included, that may wait while the bound is
    at most `ttft`. 0 or less: none may wait."""
    return max(0, prefill) * (math.floor((ttft - longest) / serving_step) - 1)
