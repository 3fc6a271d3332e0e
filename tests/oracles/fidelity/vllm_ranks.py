"""vLLM's data-parallel ranks: its own busy loop on its own schedulers, pass by pass.

Invariant: every decision is vLLM's. `DPEngineCoreProc.run_busy_loop`, with `step` or with `step_with_batch_queue` where
scheduling is asynchronous, says what is scheduled, what is waited for, which rank runs a dummy batch and which pass
counts; all ranks begin each pass together. What is made up is the clock. A pass lasts as long as the iteration that it
decides. With asynchronous scheduling it lasts until the iteration under way has ended, on ranks with a dummy batch too,
and the first pass of a group at rest takes no time. What comes during a pass is seen by the next one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import ParallelConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import DPEngineCoreProc

from libra.sim.engine.request import Request
from tests.oracles.fidelity.clocked import alarms_of
from tests.oracles.fidelity.groups import Ranks, step_ticks
from tests.oracles.fidelity.vllm_schedule import Step, VllmEngine


def vllm_ranks(ranks: Ranks, requests: Sequence[Request]) -> list[tuple[Step, ...]]:
    """The steps of each rank but its dummy batches, and those that schedule nothing."""
    cores = [_Core(ranks) for _ in range(ranks.count)]
    ahead, alarms = ranks.config.async_scheduling, alarms_of(requests)
    came: list[tuple[bool, Request]] = []  # since the pass under way began
    now, under_way, running = 0, 0, False  # ticks; of the iteration that has begun, 0: none has

    def due(tick: int) -> None:
        while alarms and alarms[0][0] <= tick:
            _, arrives, _, request = alarms.pop(0)
            came.append((arrives, request))

    while alarms or came or under_way or running:
        if not (came or under_way or running):
            now = max(now, alarms[0][0])
        due(now)
        for arrives, request in came:
            core = cores[request.number % ranks.count]
            core.engine.add(request) if arrives else core.engine.cancel(request.number)
        came.clear()
        running = any(core.engines_running or core.engine.unfinished for core in cores)
        for core in cores:
            core.engines_running = running
        if ahead:
            now += under_way
            due(now - 1)
            _give_up(cores, came)
        for core in cores:
            core.go(now, to_rest=not running)
        ticks = step_ticks(ranks, [core.rows for core in cores]) if running else 0
        if ahead:
            under_way = ticks
        else:
            now += ticks
            due(now - 1)
            _give_up(cores, came)
            for core in cores:
                core.end()
        if running:
            running = _look(cores)
    return [tuple(core.steps) for core in cores]


def _give_up(cores: Sequence[_Core], came: Sequence[tuple[bool, Request]]) -> None:
    """Tell each rank what is cancelled during this pass."""
    gone = sorted(request.number for arrives, request in came if not arrives)
    for place, core in enumerate(cores):
        core.given_up = [number for number in gone if number % len(cores) == place]


def _look(cores: Sequence[_Core]) -> bool:
    """Let each rank see with this pass whether any rank has work. Returns whether they go on."""
    unfinished = any(core.unfinished for core in cores)
    with patch.object(ParallelConfig, "sync_dp_state", lambda *_, **__: (unfinished, False)):
        for core in cores:
            core.engines_running = DPEngineCoreProc._has_global_unfinished_reqs(core, core.unfinished)
            if not core.engines_running:
                core.step_counter = 0
    return cores[0].engines_running


class _Core(DPEngineCoreProc):  # type: ignore[misc]
    """A rank's core without a model."""

    def __init__(self, ranks: Ranks) -> None:
        self.engine = VllmEngine(ranks.config)
        self.scheduler = self.engine.scheduler
        self.steps: list[Step] = []
        self._dummy = [ranks.config.tokens_each]
        self.rows = self._dummy  # tokens of each request of the iteration that the latest pass decided
        self.unfinished = False  # after it
        self.given_up: list[int] = []  # during it
        self._now = 0
        self._goes = False
        # As vLLM sets them up
        ahead = ranks.config.async_scheduling
        self.batch_queue_size = 2 if ahead else 1
        self.batch_queue: deque[Any] | None = deque(maxlen=self.batch_queue_size) if ahead else None
        self.step_fn = self.step_with_batch_queue if ahead else self.step
        self._result = SimpleNamespace(result=self.engine.compute_oldest)  # it is there when it is waited for
        self.model_executor: Any = SimpleNamespace(
            is_sleeping=False,
            execute_model=self._execute,
            sample_tokens=lambda grammar, non_block: self._result,
            execute_dummy_batch=lambda: None,
        )
        self.dp_sync_interval = ranks.sync_interval
        self.prefill_schedule_interval = 0
        self.step_counter = self.current_wave = self.dp_rank = 0
        self.dp_group: Any = None
        self.eep_scaling_state = None
        self.output_queue: Any = SimpleQueue()
        self.engines_running = self.pending_pause = self.has_coordinator = self.publish_dp_lb_stats = False
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = self.log_stats = False
        self.async_scheduling = ahead
        self.enable_fault_tolerance = False
        self._weight_version: Any = None
        observed = SimpleNamespace(enable_logging_iteration_details=False)
        self.vllm_config: Any = SimpleNamespace(observability_config=observed)

    def go(self, now: int, to_rest: bool) -> None:
        """Pass the loop, once or until there is nothing to do; what it decides begins now."""
        self._now, self._goes, self.rows = now, True, self._dummy
        with contextlib.suppress(SystemExit):
            self.run_busy_loop()
        if to_rest and self.has_work():
            self.go(now, to_rest)

    def end(self) -> None:
        """End a pass whose iteration has ended with it."""
        for number in self.given_up:
            self.engine.cancel(number)
        self.given_up, self.unfinished = [], self.engine.unfinished

    def _handle_shutdown(self) -> bool:
        goes, self._goes = self._goes, False
        return goes

    def _process_input_queue(self) -> None:
        """Do nothing: requests that arrived are with the scheduler already."""

    def _process_aborts_queue(self) -> None:
        """Do nothing: aborts come with `post_step`, as in all schedules that are compared here."""

    def post_step(self, model_executed: bool) -> None:
        self.engine.draft()
        for number in self.given_up:
            self.engine.cancel(number)

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.unfinished = local_unfinished
        return True

    def _execute(self, output: SchedulerOutput, non_block: bool) -> SimpleNamespace:
        """Note the iteration that has been scheduled."""
        step = self.engine.scheduled(output)
        if step.scheduled:
            self.rows = [tokens for _, tokens in step.scheduled]
        if step.scheduled or step.preempted:
            self.steps.append(replace(step, time=self._now))
        return self._result
