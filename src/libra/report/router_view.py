"""A router at one moment, for its page.

Invariant: the view contains only plain values, so another process can render the page. Times of day are texts; other
times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.trajectory import Turn


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine. A field is None if the engine does not report it."""

    id: str
    bucket: int
    in_service: bool
    problem: str | None  # why its last check failed
    in_flight: int  # turns
    load_tokens: int  # contexts of these
    capacity_tokens: int  # its longest context
    turns: int  # answered
    generated_tokens: int
    running: int | None = None  # requests in its batch
    waiting: int | None = None  # requests in its queue
    kv_share: float | None = None  # share of its KV memory in use
    token_seconds: float | None = None  # expected seconds per generated token of one more turn; None: unknown


@dataclass(frozen=True, slots=True)
class SessionView:
    id: str
    task: str
    engine: str  # of its latest turn; empty: none yet
    context_tokens: int
    turns: tuple[Turn, ...]  # answered
    state: str


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A turn that the policy sent to an engine."""

    time: str
    session: str
    context_tokens: int
    engine: str
    migrated: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """Rates over the preceding seconds, and the work in flight."""

    seconds: float  # since the start
    prompt_rate: float  # tokens per second
    generated_rate: float
    in_flight: int  # turns at engines
    waiting: int  # turns that no engine has


@dataclass(frozen=True, slots=True)
class EndedLength:
    """The length of a trajectory that ended."""

    seconds: float  # since the start
    peak_context: int
    finished: bool  # False: a lower bound


@dataclass(frozen=True, slots=True)
class RouterView:
    policy: str
    seconds: float  # since the start
    limits: tuple[int, ...]  # largest final context of each bucket
    engines: tuple[EngineView, ...]
    sessions: tuple[SessionView, ...]  # the latest
    contexts: tuple[int, ...]  # present context of every session
    decisions: tuple[DecisionView, ...]  # the latest first
    samples: tuple[TrafficSample, ...]
    ended: tuple[EndedLength, ...]
    waiting: int  # turns
    turns: int  # answered since the start, like the next four fields
    prompt_tokens: int
    generated_tokens: int
    retries: int
    migrations: int
