"""vLLM's scheduler for an engine on a lent device, which has the device's token during a step.

    LIBRA_LEND_DEVICE=/dev/shm/device-0 vllm serve MODEL --scheduler-cls libra.lend.backend.scheduler.LendingScheduler

Invariant: vLLM's scheduler decides which requests are scheduled, and in which order. Only the start of a step differs:
a step starts with the token, or at the end of the current grant. A postponed step has no tokens, so that the engine
accepts new requests before it tries again. Ceded KV blocks are free blocks that no request needs.
"""

from __future__ import annotations

import math
import os
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from libra.lend.backend.device import Cores, LentDevice
from libra.lend.backend.device_page import EngineFacts, LendingError, ServingStep
from libra.lend.backend.kv_loan import CededKV
from libra.lend.backend.serving_token import ServingToken
from libra.lend.gate import ServingView, due
from libra.lend.quota import KVView
from libra.lend.step_cost import RolloutQueue, StepShape

_log = init_logger(__name__)

DEVICE = "LIBRA_LEND_DEVICE"  # environment variable: the file of the device's token


def device_of_environment() -> Path:
    """The file of the device's token, from the environment. Raises LendingError if the variable is not set."""
    path = os.environ.get(DEVICE)
    if not path:
        raise LendingError(f"{DEVICE} is not set; set it to the file of the device's token, such as /dev/shm/device-0")
    return Path(path)


def _shape(scheduler: Scheduler, output: SchedulerOutput) -> StepShape:
    """Work of a step, just after scheduling."""
    sequences = len(output.num_scheduled_tokens)
    context = sum(request.num_computed_tokens for request in scheduler.running)
    return StepShape(sequences, output.total_num_scheduled_tokens - sequences, context)


class BorrowingScheduler(Scheduler):
    """Scheduler of an engine that borrows: its caller sets `max_num_scheduled_tokens` before each step."""

    shape = StepShape(0, 0, 0)  # of the last step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        self.shape = _shape(self, output)
        return output

    @property
    def queue(self) -> RolloutQueue:
        """Turns that the next step could compute."""
        seats = self.max_num_running_reqs - len(self.running)
        waiting = list(islice(self.waiting, seats))
        computed = sum(it.num_computed_tokens for it in self.running) + sum(it.num_tokens for it in waiting)
        prefilling = any(it.num_tokens - it.num_computed_tokens > 1 for it in self.running)
        return RolloutQueue(len(self.running), len(waiting), prefilling, computed)


class _Lending(Scheduler):
    """The methods that lending adds to both kinds of vLLM's scheduler; a subclass chooses the kind. Without the
    lender's word, no process reads serving's notices, so the scheduler only reports that it lends nothing.
    """

    # `Cores` suits any device: vLLM reports a step only with its output, so the step is over.
    device: LentDevice = Cores()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model, limits = self.vllm_config.model_config, self.scheduler_config
        facts = EngineFacts(model.model, model.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._token = ServingToken(device_of_environment(), facts, self.device.clock)
        self._kv: CededKV | None = None
        try:
            self._kv = CededKV(self)
        except LendingError as error:
            _log.warning("%s; the device is lent without its KV memory", error)
        self._arrivals: dict[str, float] = {}
        self._first_tokens: dict[str, float] = {}  # times by request, at the last full notice; inf: no first token yet
        self._said_all = True  # whether the last notice was full
        self._under_way: deque[StepShape | None] = deque()  # scheduled steps without output yet
        self._began = 0.0
        self._steps_since_grant = 0
        self._came = 0  # requests that have ever arrived
        self._publish()

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._arrivals[request.request_id] = self.device.clock()
        self._came += 1
        if self._token.leased:
            self._publish()
        else:
            self._publish_nothing()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        if self._token.leased or not self.requests:
            self._publish()
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        token, under_way, kv = self._token, self._under_way, self._kv
        # With asynchronous scheduling, vLLM schedules a step while another runs; both must end before a loan.
        if (under_way and token.can_spare()) or not token.acquire():
            return self._nothing(*args, **kwargs)
        if token.lent:
            self._steps_since_grant = 0
        leased = token.leased
        if not under_way:
            self.device.begin()
            if leased:
                self._began = self.device.clock()
        try:
            if kv is not None and (leased or kv.ceding):
                kv.settle(token)
            output = super().schedule(*args, **kwargs)
        except BaseException:
            token.release()
            raise
        if output.total_num_scheduled_tokens:
            under_way.append(_shape(self, output) if leased else None)
        return output

    def _nothing(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step that computes nothing."""
        most: int = self.max_num_scheduled_tokens  # type: ignore[has-type]
        self.max_num_scheduled_tokens = 0
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        token, under_way = self._token, self._under_way
        leased = token.leased
        if scheduler_output.total_num_scheduled_tokens:
            shape = under_way.popleft()
            if not under_way:
                self.device.end()
            self._steps_since_grant += 1
            if leased:
                now = self.device.clock()
                if shape is not None:
                    spent, margin = now - self._began, token.due - now if self._said_all else math.inf
                    token.note(ServingStep(shape.sequences, shape.new_tokens, shape.context, spent, now, margin))
                self._began = now
        if leased or not self.requests:
            self._publish()
        elif self._said_all:
            self._publish_nothing()
        if not under_way:
            token.release()
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self._token.close()

    def _publish(self) -> None:
        """Publish a full notice of serving's requests. First tokens are found at the end of the step that made them."""
        now, pace = self.device.clock(), self._token.pace
        arrivals, firsts, self._arrivals, self._first_tokens = self._arrivals, self._first_tokens, {}, {}
        first_due, oldest, waiting, queued, context = math.inf, math.inf, 0, 0, 0
        for name, request in self.requests.items():
            self._arrivals[name] = arrival = arrivals.get(name, now)
            # The first token of a request that was in no full notice is assumed to have come at the request's arrival.
            first = firsts.get(name, arrival)
            tokens = request.num_output_tokens
            if tokens:
                if first == math.inf:
                    first = now
                first_due = min(first_due, due(first, tokens, pace))
            else:
                first = math.inf
                waiting += 1
                oldest = min(oldest, arrival)
                queued += request.num_tokens - request.num_computed_tokens
            self._first_tokens[name] = first
            context += request.num_computed_tokens
        live, steps = len(self.requests), self._steps_since_grant
        view = ServingView(live, waiting, first_due, oldest, queued, context, steps, self._came)
        self._token.publish(view, self._kv.view() if self._kv is not None else KVView(), pace)
        self._said_all = True

    def _publish_nothing(self) -> None:
        """Publish a notice with one request whose first token is long overdue, so that no rule lends."""
        self._token.publish_view(ServingView(1, 1, -math.inf, -math.inf, came=self._came))
        self._said_all = False
        self._first_tokens = {}
        if len(self._arrivals) > 2 * len(self.requests):
            self._arrivals = {name: self._arrivals[name] for name in self.requests if name in self._arrivals}


class SynchronousLending(_Lending):
    pass


class AsynchronousLending(_Lending, AsyncScheduler):
    pass


def LendingScheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 - vLLM asks for a class
    """Create the scheduler with lending, asynchronous or synchronous as the engine's configuration requires."""
    kind = AsynchronousLending if vllm_config.scheduler_config.async_scheduling else SynchronousLending
    return kind(vllm_config=vllm_config, **kwargs)
