"""vLLM's own engine core steps the scheduler that lends, with and without steps that overlap: no model is behind it."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.lender_token import LenderToken
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Request

REQUESTS = [Request(number, 0, 20 + 30 * number, 30) for number in range(5)]


class Device:
    """`Executor` of a device that computes one step after the other, until somebody waits for its output."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._launched = engine, deque[Any]()
        self.computing = 0  # steps
        self.most = 0
        self.scheduled: list[dict[str, int]] = []

    def execute_model(self, output: Any, non_block: bool) -> Any:
        assert non_block
        requests = self._engine.scheduler.requests
        samples = {name: not requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        self._launched.append(samples)
        if output.total_num_scheduled_tokens:
            self.computing += 1
            self.scheduled.append(dict(output.num_scheduled_tokens))
        self.most = max(self.most, self.computing)
        return self if output.total_num_scheduled_tokens == 0 or self._engine._most_under_way == 1 else None

    def sample_tokens(self, grammar: Any, non_block: bool) -> Any:
        return self

    def result(self) -> Any:
        """Of the oldest step."""
        from vllm.v1.outputs import ModelRunnerOutput

        samples = self._launched.popleft()
        self.computing -= bool(samples)
        # No token comes of a prompt before its last chunk, or of a request that has gone.
        there = self._engine.scheduler.requests
        sampled = [[7] if made and name in there else [] for name, made in samples.items()]
        return ModelRunnerOutput(list(samples), {name: at for at, name in enumerate(samples)}, sampled)


def core_of(engine: Any) -> tuple[Any, Device]:
    """vLLM's `EngineCore` as it steps: all that its methods read."""
    from vllm.v1.engine.core import EngineCore

    class Core(EngineCore):
        def __init__(self) -> None:
            self.scheduler, self.model_executor = engine.scheduler, device
            self.vllm_config = engine.scheduler.vllm_config
            self.batch_queue_size = engine._most_under_way
            self.batch_queue = deque(maxlen=2) if self.batch_queue_size > 1 else None
            self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue
            self.aborts_queue: Any = queue.Queue()
            self.log_stats = self.is_pooling_model = self.is_mm_encoder_only = self.check_for_draft_tokens = False
            self._weight_version = None

    device = Device(engine)
    return Core(), device


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_token_is_held_until_the_last_output_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    with patch.dict("os.environ"):
        monkeypatch.syspath_prepend(Path(__file__).parents[3])
        from libra.lend.backend.scheduler import DEVICE, AsynchronousLending, SynchronousLending
        from tests.oracles.fidelity import vllm_schedule

    config = EngineConfig(512, 64, 16, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=asynchronous)
    engine = vllm_schedule.VllmEngine(config)
    core, alone = core_of(engine)
    for request in REQUESTS:
        engine.add(request)
    while engine.scheduler.has_requests() or core.batch_queue:
        core.step_fn()

    monkeypatch.setenv(DEVICE, str(tmp_path / "device"))
    monkeypatch.setattr(vllm_schedule, "Scheduler", SynchronousLending)
    monkeypatch.setattr(vllm_schedule, "AsyncScheduler", AsynchronousLending)
    engine = vllm_schedule.VllmEngine(config)
    core, device = core_of(engine)
    lender, borrower = LenderToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 1000.0)
    lender.extend(math.inf)
    for request in REQUESTS:
        engine.add(request)
    taken = refused = steps = 0
    while engine.scheduler.has_requests() or core.batch_queue:
        steps += 1
        borrower.wish(0.001 if steps % 5 == 0 else 0.0)
        core.step_fn()
        have = borrower.try_take(time.monotonic() + 60)
        assert have is not bool(device.computing)
        taken, refused = taken + have, refused + (not have)
        if have:
            borrower.release()
    assert device.scheduled == alone.scheduled
    assert device.most == alone.most == 1 + asynchronous
    assert taken > 5 and (refused > 5) is asynchronous
    borrower.close()
    lender.close()
