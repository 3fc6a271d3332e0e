"""verl's schedule policy `libra`: decides when, and for how long, the trainer's GPUs also generate as hybrid replicas.

Invariant: like verl, this policy moves all hybrid replicas or none. It decides by measured rates; in the first step,
without rates, it acts like verl's own policy.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import ray
from verl.experimental.fully_async_policy.dynamic_schedule import DynamicScheduleContext, register_policy
from verl.experimental.fully_async_policy.dynamic_schedule.default_policy import DefaultDynamicSchedulePolicy

from libra.plan.time_sharing import SharedRates

_LOG = logging.getLogger(__name__)


@register_policy("libra")
class LibraSchedulePolicy(DefaultDynamicSchedulePolicy):
    """`async_training.dynamic_schedule_policy=libra`. Spreads requests over activated replicas as verl's own policy
    does."""

    def __init__(
        self, deactivate_ratio: float = 0.3, only_hybrid: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(deactivate_ratio, only_hybrid)
        self._clock = clock
        self._rates: SharedRates | None = None
        self._last: tuple[float, int] | None = None  # time and samples generated at the end of the last step
        self._shared = 0.0  # seconds of this step in which hybrid replicas generated

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """Wait for the samples, and measure the duration, which verl does not report."""
        expected = None if self._rates is None else self._rates.expected
        ready = super().deactivate_wait_samples(ctx) if expected is None else expected.ready
        self._await_samples(ready)
        if self._last is not None:
            self._shared = self._clock() - self._last[0]
        return int(ready)

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        if self.only_hybrid:
            return True
        self._observe(ctx)
        expected = None if self._rates is None else self._rates.expected
        if expected is None:
            return bool(super().should_activate_after_step(global_steps, is_hybrid_active, ctx))
        _LOG.info("step %d: hybrid replicas %s: %s", global_steps, "generate" if expected.pays else "train", expected)
        return expected.pays

    def update_after_step(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """Begin the next step."""
        self._last, self._shared = (self._clock(), ctx.total_generated_samples), 0.0

    def _observe(self, ctx: DynamicScheduleContext) -> None:
        if self._rates is None:
            self._rates = SharedRates(ctx.step_required_samples, ctx.trigger_parameter_sync_step, self._ratio())
        if self._last is None:
            return
        began, before = self._last
        switch = ctx.last_activate_duration_s + ctx.last_deactivate_duration_s
        waited = math.fsum(ctx.step_wait_times) if sum(ctx.step_wait_samples) else 0.0
        seconds, generated = self._clock() - began, ctx.total_generated_samples - before
        self._rates.observe(seconds, generated, self._shared, waited, switch if self._shared else 0.0)

    def _ratio(self) -> float:
        """Ratio of hybrid replicas to replicas that only generate; infinite without the latter."""
        rollouter: Any = self._rollouter
        hybrid, alone = ray.get(
            [rollouter.get_all_hybrid_replicas.remote(), rollouter.get_standalone_replicas.remote()]
        )
        return len(hybrid) / len(alone) if alone else math.inf

    def _await_samples(self, count: int) -> None:
        ray.get(self._rollouter.wait_for_enough_samples.remote(count))
