"""The supervised start: what a trainer is told, what is kept of it, and what is left when it fails."""

from __future__ import annotations

import asyncio
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fakes.workers import MadeLauncher

from libra.backends.grpo.trainers import DivergedError
from libra.backends.tiny_model import TokenizerCodec, write_tiny_model
from libra.backends.transport.messages import Stop
from libra.backends.transport.trainer_messages import SaveCheckpoint, StartTrainer, WarmedUp, WarmUp
from libra.config.run import ModelConfig, RunConfig
from libra.environments.calculator import Calculator
from libra.exec.protocols import WorkerLostError
from libra.loop.progress import RunProgress
from libra.loop.warmup import warm_model
from libra.report.live import PlainDisplay

STEPS, BATCH, RATE = 100, 4, 2e-3
TINY = {"hidden_size": 32, "heads": 2, "kv_heads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def configured(model: dict[str, Any] = TINY, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "warm",
            "environment": {"kind": "calculator", "tools": ["calculator"]},
            "model": model,
            "warm_up": {"steps": STEPS, "batch": BATCH, "learning_rate": RATE},
            "engines": {"long": {"max_model_len": 192, "max_num_seqs": 4, "kv_tokens": 512}},
            "start": {"replicas": 2, "buckets": [{"shape": "long", "engines": 2, "up_to": 192}]},
            "training": {"steps": 1},
            **more,
        }
    )


async def warmed(config: RunConfig, launcher: MadeLauncher, shown: StringIO | None = None) -> Path:
    progress = RunProgress(config.name, config.training.steps, PlainDisplay(shown or StringIO()))
    return await warm_model(config, Calculator(), launcher, "fp32", progress.warm_up)


async def test_a_trainer_imitates_demonstrations_and_its_model_is_kept() -> None:
    launcher, shown = MadeLauncher(), StringIO()
    model = await warmed(configured(), launcher, shown)
    start, *steps, save, stop = launcher.workers["warm-up"].orders
    assert isinstance(start, StartTrainer) and isinstance(save, SaveCheckpoint) and isinstance(stop, Stop)
    assert len(steps) == STEPS
    codec = TokenizerCodec(model)
    for step in steps:
        assert isinstance(step, WarmUp) and len(step.batch) == BATCH
        for tokens, generated in step.batch:
            assert len(tokens) == len(generated)
            question = codec.decode([token for token, own in zip(tokens, generated, strict=True) if not own])
            assert question.startswith("Q") and any(generated)
    rates = [step.learning_rate for step in steps if isinstance(step, WarmUp)]
    peak = rates.index(max(rates))
    assert min(rates) > 0 and rates[peak] <= RATE
    assert 0 < peak < STEPS - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert (model / "model.safetensors").is_file()
    assert "supervised warm-up 1/100, loss 0.500" in shown.getvalue()
    assert "supervised warm-up: 100 steps, loss 0.500\n" in shown.getvalue()


async def test_the_same_run_takes_the_model_that_was_kept_and_another_one_does_not() -> None:
    launcher, later = MadeLauncher(), MadeLauncher()
    model = await warmed(configured(), launcher)
    assert await warmed(configured(name="another"), later) == model
    assert not later.workers
    assert await warmed(configured(seed=1), later) != model
    assert later.workers


async def test_a_model_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    given = tmp_path / "given"
    write_tiny_model(given, ModelConfig(**TINY), Calculator().alphabet, 192)
    before = {path: path.read_bytes() for path in given.iterdir()}
    model = await warmed(configured({"directory": str(given)}), MadeLauncher())
    assert model != given and (model / "model.safetensors").read_text() == "0"  # what the made worker saves
    assert {path: path.read_bytes() for path in given.iterdir()} == before
    as_it_is = configured({"directory": str(given)}, warm_up={"steps": 0})
    assert await warmed(as_it_is, MadeLauncher()) == given


async def test_a_start_that_diverges_is_told_with_its_step_and_leaves_no_model(cache: Path) -> None:
    launcher = MadeLauncher()
    launcher.prepared = {"warm-up": {WarmUp: WarmedUp(math.nan)}}
    with pytest.raises(DivergedError, match=r"warm-up step 1 diverged: its loss is nan; lower warm_up\.learning_rate"):
        await warmed(configured(), launcher)
    assert not [*cache.rglob("*.safetensors")]


async def test_a_trainer_that_is_lost_leaves_nothing_behind(cache: Path) -> None:
    launcher = MadeLauncher()
    launcher.prepared = {"warm-up": {SaveCheckpoint: None}}
    with pytest.raises(WorkerLostError, match="warm-up"):
        await asyncio.wait_for(warmed(configured(), launcher), 60)
    assert not [*cache.rglob("*.safetensors")]
    assert (await warmed(configured(), launcher)).is_dir()
