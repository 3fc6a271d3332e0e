"""vLLM's data-parallel ranks with asynchronous scheduling: its own busy loop on its own schedulers, pass by pass.

Invariant: every decision is vLLM's. `DPEngineCoreProc.run_busy_loop` and `step_with_batch_queue` say what is scheduled,
what is waited for, which rank runs a dummy batch and which pass counts; all ranks begin each pass together. What is
made up is the clock: a pass lasts until the iteration under way has ended, on ranks with a dummy batch too, and the
first pass of a group at rest takes no time. What comes during a pass is seen by the next one.
"""

from __future__ import annotations

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
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.fidelity.clocked import alarms_of
from benchmarks.fidelity.groups import Ranks, step_ticks
from benchmarks.fidelity.vllm_schedule import Step, VllmEngine
from libra.sim.engine.request import Request


def vllm_ranks_ahead(ranks: Ranks, requests: Sequence[Request]) -> list[tuple[Step, ...]]:
    """The steps of each rank but its dummy batches, and those that schedule nothing."""
    cores = [_Core(ranks) for _ in range(ranks.count)]
    alarms = alarms_of(requests)
    came: list[tuple[bool, Request]] = []  # since the pass under way began
    now, under_way = 0, 0  # ticks; of the iteration that has begun, 0: none has

    def due(tick: int) -> None:
        while alarms and alarms[0][0] <= tick:
            _, arrives, _, request = alarms.pop(0)
            came.append((arrives, request))

    while alarms or came or under_way:
        if not (came or under_way):
            now = max(now, alarms[0][0])
        due(now)
        for arrives, request in came:
            core = cores[request.number % ranks.count]
            core.engine.add(request) if arrives else core.engine.cancel(request.number)
        came.clear()
        running = any(core.engines_running or core.engine.unfinished for core in cores)
        for core in cores:
            core.engines_running = running
        now += under_way
        due(now - 1)
        gone = {request.number for arrives, request in came if not arrives}
        for place, core in enumerate(cores):
            core.given_up = sorted(number for number in gone if number % ranks.count == place)
            core.go(now)
        if not running:
            for core in cores:
                while core.has_work():
                    core.go(now)
        under_way = step_ticks(ranks, [core.rows for core in cores]) if running else 0
        if running:
            _look(cores)
    return [tuple(core.steps) for core in cores]


def _look(cores: Sequence[_Core]) -> None:
    """Let each rank see with this pass whether any rank has work."""
    unfinished = any(core.unfinished for core in cores)
    with patch.object(ParallelConfig, "sync_dp_state", lambda *_, **__: (unfinished, False)):
        for core in cores:
            core.engines_running = DPEngineCoreProc._has_global_unfinished_reqs(core, core.unfinished)
            if not core.engines_running:
                core.step_counter = 0


class _Core(DPEngineCoreProc):  # type: ignore[misc]
    """A rank's core without a model. Each `go` passes its loop once."""

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
        self.batch_queue_size = 2
        self.batch_queue: deque[Any] = deque(maxlen=self.batch_queue_size)
        self.step_fn = self.step_with_batch_queue
        self.model_executor: Any = _Executor(self)
        self.dp_sync_interval = ranks.sync_interval
        self.prefill_schedule_interval = 0
        self.step_counter = self.current_wave = self.dp_rank = 0
        self.dp_group: Any = None
        self.eep_scaling_state = None
        self.output_queue: Any = SimpleQueue()
        self.engines_running = self.pending_pause = self.has_coordinator = self.publish_dp_lb_stats = False
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = self.log_stats = False
        self.async_scheduling = True
        self.enable_fault_tolerance = False
        self._weight_version: Any = None
        self.vllm_config: Any = SimpleNamespace(
            observability_config=SimpleNamespace(enable_logging_iteration_details=False)
        )

    def go(self, now: int) -> None:
        """Pass the loop; what it decides begins now."""
        self._now, self._goes, self.rows = now, True, self._dummy
        try:
            self.run_busy_loop()
        except SystemExit:
            return

    def _handle_shutdown(self) -> bool:
        goes, self._goes = self._goes, False
        return goes

    def _process_input_queue(self) -> None:
        """Do nothing: requests that arrived are with the scheduler already."""

    def _process_aborts_queue(self) -> None:
        """Do nothing: aborts come with `post_step`, as in all schedules that are compared here."""

    def post_step(self, model_executed: bool) -> None:
        for number in self.given_up:
            self.engine.cancel(number)

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.unfinished = local_unfinished
        return True

    def execute(self, output: SchedulerOutput) -> None:
        """Note the iteration that has been scheduled."""
        step = self.engine.scheduled(output)
        if step.scheduled:
            self.rows = [tokens for _, tokens in step.scheduled]
        if step.scheduled or step.preempted:
            self.steps.append(replace(step, time=self._now))


class _Executor:
    """Runs nothing: results are there when they are waited for."""

    is_sleeping = False

    def __init__(self, core: _Core) -> None:
        self._core = core

    def execute_model(self, output: SchedulerOutput, non_block: bool) -> _Result:
        self._core.execute(output)
        return _Result(self._core.engine)

    def sample_tokens(self, grammar: object, non_block: bool) -> _Result:
        return _Result(self._core.engine)

    def execute_dummy_batch(self) -> None:
        """There is nothing that it would change."""


class _Result:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def result(self) -> ModelRunnerOutput:
        return self._engine.compute_oldest()
