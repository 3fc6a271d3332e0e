"""Engines that stand somewhere, and what decides which requests each of them gets.

Invariant: a deployment that exists can be simulated: every engine is in a bucket, and the policy is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from libra.route.catalogue import policy_named
from libra.route.cmlfq import CMLFQ
from libra.route.policy import Policy
from libra.sim.engine.config import EngineSpec
from libra.sim.weight_update import WeightUpdate

DEFAULT_ROUTE = CMLFQ.NAME  # as in `libra run`


@dataclass(frozen=True, slots=True)
class Deployment:
    """All that `simulate` is told but the workload."""

    engines: tuple[EngineSpec, ...]
    limits: tuple[int, ...] | None = None  # largest final context of each bucket; None: all engines are one bucket
    turn_tokens: int = 1  # room that one turn needs beyond its context
    route: str = DEFAULT_ROUTE
    sticky: bool = True  # a later turn follows its prefix where it can
    updates: Sequence[WeightUpdate] = ()
    time_limit: float | None = None  # seconds

    def __post_init__(self) -> None:
        if not self.engines:
            raise ValueError("engines is empty: give one or more")
        if len({engine.name for engine in self.engines}) < len(self.engines):
            raise ValueError("two engines have the same name; name each once")
        if self.limits is not None and any(longer <= shorter for shorter, longer in pairwise((0, *self.limits))):
            raise ValueError(f"limits is {list(self.limits)}; list numbers of tokens that rise, shortest bucket first")
        buckets = 1 if self.limits is None else len(self.limits)
        for engine in self.engines:
            if engine.bucket >= buckets:
                raise ValueError(
                    f"engine {engine.name} is in bucket {engine.bucket}, but limits name {buckets}, counted from 0:"
                    " add the bucket's limit, or move the engine"
                )
        if self.turn_tokens < 1:
            raise ValueError(f"turn_tokens is {self.turn_tokens}; a turn generates 1 token or more")
        self.policy()

    @property
    def longest_context(self) -> int:
        """Tokens that some engine holds."""
        return max(engine.config.max_model_len for engine in self.engines)

    def policy(self, seed: int = 0) -> Policy:
        """A new one, which has seen nothing. `seed` is for the rules that draw."""
        return policy_named(self.route, sticky=self.sticky, seed=seed)
