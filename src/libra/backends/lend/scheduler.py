"""vLLM's scheduler, for an engine whose device is lent: it holds the device's token while a step is under way.

    LIBRA_LEND_DEVICE=/dev/shm/device-0 vllm serve MODEL --scheduler-cls libra.backends.lend.scheduler.LendingScheduler

Invariant: what is scheduled, and in which order, is what vLLM's own scheduler says. Only when a step begins differs:
with the token, or when the grant that is out is over. A step that is put off is one of no tokens, so that the engine
takes in who has come before it asks again. KV blocks that are ceded are free ones that no request needs.
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

from libra.backends.lend.device import Cores, LentDevice
from libra.backends.lend.device_page import EngineFacts, LendingError, ServingStep
from libra.backends.lend.kv_loan import CededKV
from libra.backends.lend.serving_token import ServingToken
from libra.lend.gate import ServingView, due
from libra.lend.quota import KVView
from libra.lend.step_cost import RolloutQueue, StepShape

_log = init_logger(__name__)

DEVICE = "LIBRA_LEND_DEVICE"  # environment variable: the file of the device's token


def device_of_environment() -> Path:
    """Raises LendingError where the variable is not set."""
    path = os.environ.get(DEVICE)
    if not path:
        raise LendingError(f"{DEVICE} is not set; set it to the file of the device's token, such as /dev/shm/device-0")
    return Path(path)


class _Shaped(Scheduler):
    """Knows what it scheduled last."""

    shape = StepShape(0, 0, 0)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        sequences = len(output.num_scheduled_tokens)
        context = sum(request.num_computed_tokens for request in self.running)
        self.shape = StepShape(sequences, output.total_num_scheduled_tokens - sequences, context)
        return output


class BorrowingScheduler(_Shaped):
    """Of an engine that borrows: what a step may compute is set before it, as `max_num_scheduled_tokens`."""

    @property
    def queue(self) -> RolloutQueue:
        """What the next step could compute."""
        seats = self.max_num_running_reqs - len(self.running)
        waiting = list(islice(self.waiting, seats))
        computed = sum(it.num_computed_tokens for it in self.running) + sum(it.num_tokens for it in waiting)
        prefilling = any(it.num_tokens - it.num_computed_tokens > 1 for it in self.running)
        return RolloutQueue(len(self.running), len(waiting), prefilling, computed)


class _Lending(_Shaped):
    """Both kinds of vLLM's scheduler have these methods; the class below it says which kind this is."""

    # Whatever it runs on: the output of a step is here when it is told of, so the step is over.
    device: LentDevice = Cores()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model, limits = self.vllm_config.model_config, self.scheduler_config
        facts = EngineFacts(model.model, model.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._token = ServingToken(device_of_environment(), facts, self.device.clock)
        self._arrivals: dict[str, float] = {}
        self._kv: CededKV | None = None
        try:
            self._kv = CededKV(self)
        except LendingError as error:
            _log.warning("%s; the device is lent, its KV memory is not", error)
        self._first_tokens: dict[str, float] = {}
        self._under_way: deque[StepShape] = deque()  # steps scheduled whose output has not come
        self._began = 0.0
        self._steps_since_grant = 0
        self._came = 0  # requests, ever
        self._current = True  # what was published last is of the last step
        self._publish()

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._arrivals[request.request_id] = self.device.clock()
        self._came += 1
        self._publish()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._publish()
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # With asynchronous scheduling a step follows while one is out: then those have to end before anybody borrows.
        if (self._under_way and self._token.can_spare(self.device.clock())) or not self._token.acquire():
            return self._nothing(*args, **kwargs)
        if self._token.lent:
            self._steps_since_grant = 0
        if not self._under_way:
            self._began = self.device.clock()
            self.device.begin()
        try:
            if self._kv is not None:
                self._kv.settle(self._token)
            output = super().schedule(*args, **kwargs)
        except BaseException:
            self._token.release()
            raise
        if output.total_num_scheduled_tokens:
            self._under_way.append(self.shape)
        return output

    def _nothing(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """A step that computes nothing."""
        most: int = self.max_num_scheduled_tokens  # type: ignore[has-type]
        self.max_num_scheduled_tokens = 0
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        step = None
        if scheduler_output.total_num_scheduled_tokens:
            shape = self._under_way.popleft()
            if not self._under_way:
                self.device.end()
            now = self.device.clock()
            self._steps_since_grant += 1
            margin = self._token.due - now if self._current else math.inf
            step = ServingStep(shape.sequences, shape.new_tokens, shape.context, now - self._began, now, margin)
            self._began = now
        # Without the lender's word nobody reads it. What was said as a request came or went stays true enough until
        # then: somebody waits, or what is due is due no sooner than that.
        self._current = self._token.leased or not self.requests
        if self._current:
            self._publish()
        if self._under_way:
            self._token.note(step)
        else:
            self._token.release(step)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self._token.close()

    def _publish(self) -> None:
        """What serving owes, as of now. First tokens are seen at the end of the step that made them."""
        now, pace = self.device.clock(), self._token.pace
        arrivals, firsts, self._arrivals, self._first_tokens = self._arrivals, self._first_tokens, {}, {}
        first_due, oldest, waiting, queued, context = math.inf, math.inf, 0, 0, 0
        for name, request in self.requests.items():
            tokens = request.num_output_tokens
            if tokens:
                self._first_tokens[name] = first = firsts.get(name, now)
                first_due = min(first_due, due(first, tokens, pace))
            else:
                waiting += 1
                self._arrivals[name] = arrival = arrivals.get(name, now)
                oldest = min(oldest, arrival)
                queued += request.num_tokens - request.num_computed_tokens
            context += request.num_computed_tokens
        live, steps = len(self.requests), self._steps_since_grant
        view = ServingView(live, waiting, first_due, oldest, queued, context, steps, self._came)
        self._token.publish(view, self._kv.view() if self._kv is not None else KVView(), pace)


class SynchronousLending(_Lending):
    pass


class AsynchronousLending(_Lending, AsyncScheduler):
    pass


def LendingScheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 - vLLM asks for a class
    """The scheduler of the kind that this engine would have without lending."""
    kind = AsynchronousLending if vllm_config.scheduler_config.async_scheduling else SynchronousLending
    return kind(vllm_config=vllm_config, **kwargs)
