"""One iteration of an engine: what it computed, and how long that took.

Invariant: a step holds all that an iteration's time may depend on, so that times can be fitted, and a wrong prediction
traced, without the engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """Times are ticks of the engine's clock, lengths are tokens."""

    engine: int
    begin: int
    adding: int  # to take in the requests that had arrived
    duration: int  # of the iteration after that
    decodes: int  # sequences that generate a token from the one before
    attended: int  # by those, together, themselves included
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens before them) of each sequence in prefill, in order
    added: int  # requests that were taken in
    added_tokens: int  # of their prompts
    admitted: int  # requests that run for the first time, or again after a preemption
    finished: int  # requests that end with this iteration
    preempted: int
    changed: bool  # since the step before the last: that one computed a chunk, or ended or preempted a request
