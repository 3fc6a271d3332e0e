"""vLLM's scheduler that lends, without a model: the device passes on between its steps, and nothing else changes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from libra.backends.lend.borrower_token import BorrowerToken
from libra.backends.lend.lender_token import LenderToken
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Request

REQUESTS = [Request(number, 0, 20 + 30 * number, 40) for number in range(4)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_device_passes_on_between_steps_and_the_schedule_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    with patch.dict("os.environ"):
        monkeypatch.syspath_prepend(Path(__file__).parents[3])
        from benchmarks.fidelity import vllm_schedule
        from libra.backends.lend.scheduler import DEVICE, AsynchronousLending, SynchronousLending

    config = EngineConfig(512, 64, 16, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=asynchronous)
    alone = vllm_schedule.vllm_schedule(config, REQUESTS)
    monkeypatch.setenv(DEVICE, str(tmp_path / "device"))
    monkeypatch.setattr(vllm_schedule, "Scheduler", SynchronousLending)
    monkeypatch.setattr(vllm_schedule, "AsyncScheduler", AsynchronousLending)
    engine = vllm_schedule.VllmEngine(config)
    lender, borrower = LenderToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 1000.0)
    lender.extend(math.inf)
    for request in REQUESTS:
        engine.add(request)
    steps: list[Any] = []
    taken = 0
    while engine.busy:
        borrower.wish(0.001 if len(steps) % 2 else 0.0)
        if engine.unfinished and engine.schedule():
            continue
        step = engine.end_oldest(0)
        if step.scheduled:
            steps.append(step)
        if borrower.try_take(time.monotonic() + 60):
            taken += 1
            borrower.release()
    assert [step.scheduled for step in steps] == [step.scheduled for step in alone]
    assert taken > (len(alone) // 4 if asynchronous else len(alone) // 2)
    said = borrower.look().view
    assert (said.live, said.came) == (0, len(REQUESTS))
    shapes = {(len(it.scheduled), sum(tokens - 1 for _, tokens in it.scheduled)) for it in alone}
    told = borrower.steps()
    assert {(step.sequences, step.new_tokens) for step in told} <= shapes
    margins = {step.margin for step in told}
    assert min(margins) > 900 and min(margins - {math.inf}) < 160_000  # at a pace of 1000 s a token, all in a moment
    borrower.close()
    lender.close()
