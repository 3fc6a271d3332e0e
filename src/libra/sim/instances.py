"""Views of engines for routing policies.

Invariant: a policy always sees the present state. Engines notify a policy that keeps them ordered by load of changed
loads; `watch` returns False for an engine that cannot do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from libra.route.loads import IndexedFleet
from libra.route.policy import Instance
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import DecodeBatch


class EngineInstance:
    """An engine for a routing policy, always in its present state."""

    __slots__ = ("_now", "bucket", "capacity_tokens", "engine", "id", "pace_class")

    def __init__(self, spec: EngineSpec, engine: SimEngine, now: Callable[[], int]) -> None:
        self._now = now  # tick
        self.id = spec.name
        self.bucket = spec.bucket
        self.pace_class = 0
        self.capacity_tokens = spec.config.max_model_len
        self.engine = engine

    @property
    def load_tokens(self) -> int:
        return self.engine.load_tokens

    @property
    def token_seconds(self) -> float:
        return self.engine.token_seconds(self._now())

    @property
    def recall_rate(self) -> float:
        return self.engine.recall_rate(self._now())

    @property
    def prompt_wait_seconds(self) -> float:
        return 0.0

    @property
    def requests(self) -> tuple[int, int]:
        """(waiting, running)"""
        return len(self.engine.waiting) + len(self.engine.arriving), len(self.engine.running)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold."""
        return self.engine.kv_usage(self._now())

    def watch(self, changed: Callable[[], object]) -> bool:
        if self.engine.borrowed:
            return False
        self.engine.load_changed = changed
        return True


class Decoders(Protocol):
    """The engines that decode requests after other engines have computed their prompts."""

    fleet: IndexedFleet[EngineInstance]  # engines in service


class PairInstance(EngineInstance):
    """A prefill engine with the decode engines of its bucket.

    With several buckets, a policy compares three values for the next request: speed and load of the least loaded decode
    engine, the load of prompts on this engine, and the time for which the request's prompt waits for these prompts. In
    a single bucket, all prefill engines have the same decode engines, so only prompts count."""

    __slots__ = ("_config", "_cost", "_decoders")

    def __init__(self, spec: EngineSpec, engine: SimEngine, now: Callable[[], int], decoders: Decoders) -> None:
        super().__init__(spec, engine, now)
        self._config, self._cost = spec.config, spec.cost
        self._decoders = decoders

    @property
    def load_tokens(self) -> int:
        load, _ = self._least()
        return self.engine.load_tokens + load

    @property
    def token_seconds(self) -> float:
        _, decoder = self._least()
        told = None if decoder is None else decoder.token_seconds
        return super().token_seconds if told is None else told

    @property
    def prompt_wait_seconds(self) -> float:
        """Seconds to compute the present prompts, as if no part of them were cached. Turns of many trajectories
        alternate, so once their contexts exceed the cache, each turn finds its context evicted by the others."""
        load = self.engine.load_tokens
        if not load or len(self._decoders.fleet.limits) == 1:
            return 0.0
        most = self._config.max_num_batched_tokens
        chunk = self._cost.mixed(DecodeBatch(0), 0, [(most, load // max(1, len(self.engine.unfinished)) // 2)])
        return chunk / TICKS * load / most

    def watch(self, changed: Callable[[], object]) -> bool:
        return len(self._decoders.fleet.limits) == 1 and super().watch(changed)

    def _least(self) -> tuple[int, Instance | None]:
        """(load, engine) of the least loaded decode engine of the bucket; (0, None) in a single bucket."""
        fleet = self._decoders.fleet
        return (0, None) if len(fleet.limits) == 1 else fleet.loads(0).least_in(self.bucket) or (0, None)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The engines in service that a routing policy may choose."""

    instances: tuple[EngineInstance, ...]
    limits: tuple[int, ...]
    turn_tokens: int
