"""vLLM's scheduler that lends, without a model: the device passes on between its steps, and nothing else changes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.lender_token import LenderToken
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Request

REQUESTS = [Request(number, 0, 20 + 30 * number, 40) for number in range(4)]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's scheduler without a model."""
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    with patch.dict("os.environ"):
        monkeypatch.syspath_prepend(Path(__file__).parents[3])
        from tests.oracles.fidelity import vllm_schedule
    return vllm_schedule


def lending_engine(vllm: Any, config: EngineConfig, device: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from libra.lend.backend.scheduler import DEVICE, AsynchronousLending, SynchronousLending

    monkeypatch.setenv(DEVICE, str(device))
    monkeypatch.setattr(vllm, "Scheduler", SynchronousLending)
    monkeypatch.setattr(vllm, "AsyncScheduler", AsynchronousLending)
    return vllm.VllmEngine(config)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_device_passes_on_between_steps_and_the_schedule_is_the_same(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    from tests.oracles.fidelity.clocked import vllm_schedule

    config = EngineConfig(512, 64, 16, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=asynchronous)
    alone = vllm_schedule(config, REQUESTS)
    engine = lending_engine(vllm, config, tmp_path / "device", monkeypatch)
    lender, borrower = LenderToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 1000.0)
    lender.extend(math.inf)
    for request in REQUESTS:
        engine.add(request)
    steps: list[Any] = []
    taken = 0
    while engine.busy:
        borrower.wish(0.001 if len(steps) % 2 else 0.0)
        if engine.unfinished:
            engine.schedule()
            if not engine.full:
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_the_lenders_word_steps_say_nothing_and_then_no_more_than_is_true(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Who was there before is due as if its first token had come with its request."""
    pace, page = 10.0, tmp_path / "device"
    config = EngineConfig(512, 64, 16, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=asynchronous)
    engine = lending_engine(vllm, config, page, monkeypatch)
    lender, borrower, scheduler = LenderToken(page), BorrowerToken(page, pace), engine.scheduler

    def step() -> None:
        while engine.schedule():
            pass
        engine.end_oldest(0)

    arrived: dict[str, tuple[float, float]] = {}
    for request in REQUESTS[:3]:
        before = time.monotonic()
        engine.add(request)
        arrived[next(reversed(scheduler.requests))] = before, time.monotonic()
    said = page.read_bytes()
    for _ in range(10):
        step()
    assert page.read_bytes() == said
    view = borrower.look().view
    assert (view.waiting, view.due, view.came) == (1, -math.inf, 3)
    lender.extend(math.inf)
    step()
    tokens = {name: request.num_output_tokens for name, request in scheduler.requests.items()}
    view = borrower.look().view
    assert (view.live, view.waiting) == (3, 0) and min(tokens.values()) > 0
    least, most = (min(arrived[name][end] + pace * made for name, made in tokens.items()) for end in (0, 1))
    assert least <= view.due <= most
    engine.add(REQUESTS[3])  # its first token is seen
    assert borrower.look().view.waiting == 1
    before, name = time.monotonic(), next(reversed(scheduler.requests))
    while not scheduler.requests[name].num_output_tokens:
        step()
    assert before <= scheduler._first_tokens[name] <= time.monotonic()
    lender.extend(0.0)
    step()
    assert borrower.look().view.due == -math.inf
    while engine.busy:
        if engine.unfinished:
            engine.schedule()
            if not engine.full:
                continue
        engine.end_oldest(0)
    assert (borrower.look().view.live, borrower.look().view.came) == (0, 4)
    borrower.close()
    lender.close()
