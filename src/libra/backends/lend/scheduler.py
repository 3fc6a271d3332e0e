"""vLLM's scheduler, for an engine whose device is lent: it holds the device's token while a step is under way.

    LIBRA_LEND_DEVICE=/dev/shm/device-0 vllm serve MODEL --scheduler-cls libra.backends.lend.scheduler.LendingScheduler

Invariant: what is scheduled, and in which order, is what vLLM's own scheduler says. Only when a step begins differs:
with the token, or when the grant that is out is over. KV blocks that are ceded are free ones that no request needs.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from libra.backends.lend.device_token import LendingError, ServingStep, ServingToken
from libra.backends.lend.kv_loan import CededKV
from libra.lend.gate import ServingView, due
from libra.lend.quota import KVView

_log = init_logger(__name__)

DEVICE = "LIBRA_LEND_DEVICE"  # environment variable: the file of the device's token


def device_of_environment() -> Path:
    """Raises LendingError where the variable is not set."""
    path = os.environ.get(DEVICE)
    if not path:
        raise LendingError(f"{DEVICE} is not set; set it to the file of the device's token, such as /dev/shm/device-0")
    return Path(path)


class _Lending(Scheduler):
    """Both kinds of vLLM's scheduler have these methods; the class below it says which kind this is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token = ServingToken(device_of_environment())
        self._kv: CededKV | None = None
        try:
            self._kv = CededKV(self)
        except LendingError as error:
            _log.warning("%s; the device is lent, its KV memory is not", error)
        self._first_tokens: dict[str, float] = {}
        self._under_way = 0  # steps scheduled whose output has not come
        self._began = 0.0
        self._steps_since_grant = 0
        self._shape = (0, 0, 0)
        self._came = 0  # requests, ever

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._came += 1
        self._publish()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._publish()
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._token.acquire()
        if self._token.lent:
            self._steps_since_grant = 0
        if not self._under_way:
            self._began = time.monotonic()
        try:
            if self._kv is not None:
                self._kv.settle(self._token.kv_asked, self._token.kv_held)
            output = super().schedule(*args, **kwargs)
        except BaseException:
            self._token.release()
            raise
        self._under_way += 1
        sequences = len(output.num_scheduled_tokens)
        self._shape = (sequences, output.total_num_scheduled_tokens - sequences, self._context())
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        now = time.monotonic()
        self._under_way -= 1
        self._steps_since_grant += 1
        self._publish(now)
        step = ServingStep(*self._shape, now - self._began) if self._shape[0] else None
        self._began = now
        if self._under_way:
            self._token.note(step)
        else:
            self._token.release(step)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self._token.close()

    def _publish(self, now: float | None = None) -> None:
        """What serving owes, as of now. First tokens are seen at the end of the step that made them."""
        now = time.monotonic() if now is None else now
        pace, firsts = self._token.pace, self._first_tokens
        first_due, oldest, waiting, queued, context, known = math.inf, math.inf, 0, 0, 0, {}
        for name, request in self.requests.items():
            tokens = request.num_output_tokens
            if tokens:
                known[name] = first = firsts.get(name, now)
                first_due = min(first_due, due(first, tokens, pace))
            else:
                waiting += 1
                # `arrival_time` is of the wall clock; how long ago that was holds on any.
                oldest = min(oldest, now - (time.time() - request.arrival_time))
                queued += request.num_tokens - request.num_computed_tokens
            context += request.num_computed_tokens
        self._first_tokens = known
        live, steps = len(self.requests), self._steps_since_grant
        view = ServingView(live, waiting, first_due, oldest, queued, context, steps, self._came)
        self._token.publish(view, self._kv.view() if self._kv is not None else KVView(), pace)

    def _context(self) -> int:
        return sum(request.num_computed_tokens for request in self.running)


class _Synchronous(_Lending):
    pass


class _Asynchronous(_Lending, AsyncScheduler):
    pass


def LendingScheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 - vLLM asks for a class
    """The scheduler of the kind that this engine would have without lending."""
    kind = _Asynchronous if vllm_config.scheduler_config.async_scheduling else _Synchronous
    return kind(vllm_config=vllm_config, **kwargs)
