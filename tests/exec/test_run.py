"""Whole runs with workers that answer at once: everything but the processes, and what they compute, is real."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from far_end import PATIENCE
from made_workers import MadeLauncher
from scripted import AskTool
from test_steering import PROFILE

from libra.config import ModelConfig, RunConfig
from libra.cost.profile_file import save_profile
from libra.environments.protocol import Prompt
from libra.exec import run as run_module
from libra.exec.loop.checkpoint import latest_checkpoint
from libra.exec.rollout.episode_file import read_history
from libra.exec.rollout.rollout import Rollout
from libra.exec.run import run
from libra.exec.tiny_model import TokenizerCodec, write_tiny_model
from libra.exec.train.membership import CoreLostError
from libra.exec.wire.messages import Failure, Generate, Message, StartEngine
from libra.plan.problem import InfeasiblePlanError
from libra.report.html import render_report
from libra.report.live import PlainDisplay
from libra.report.records import PeriodRecord, RunSummary, read_records
from libra.report.run_log import prediction_error
from libra.trajectory import read_trajectories

STEPS, PER_STEP, SIZE = 12, 2, 3


async def echo(argument: str) -> str:
    return f"={argument};"


class Asking(AskTool):
    """A call, its result, and an answer that is right half of the time."""

    alphabet = "QAe:>=;?!T0123456789"

    def __init__(self) -> None:
        super().__init__({"e": echo})

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return [Prompt(f"{split}-{number}", f"Q{number % 10};", f"A{number % 2};") for number in range(count)]


class Runs:
    """Runs in a directory of the test, with a tiny model's tokenizer and a made profile."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._patch = directory, monkeypatch
        self.model = directory / "model"
        write_tiny_model(self.model, ModelConfig(hidden_size=32, heads=2, kv_heads=1), Asking.alphabet, 100)
        save_profile(directory / "profile.json", PROFILE)
        self.launcher: MadeLauncher

    def config(self, name: str, mode: str = "adaptive", steps: int = STEPS, cores: int = 1) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": name,
                "directory": str(self._directory / "runs"),
                "allocation": mode,
                "checkpoint_every": 3,
                "cluster": {"core": cores, "hybrid": 2 - cores, "rollout": 2},
                "environment": {"kind": "ask", "tools": ["e"], "train_prompts": 8, "heldout_prompts": 4},
                "model": {"directory": str(self.model)},
                "warm_up": {"steps": 0},
                "engines": {
                    "short": {"max_model_len": 64, "max_num_seqs": 8, "kv_tokens": 512},
                    "long": {"max_model_len": 100, "max_num_seqs": 4, "kv_tokens": 512},
                },
                "start": {
                    "replicas": 2,
                    "buckets": [
                        {"shape": "short", "engines": 1, "up_to": 20},
                        {"shape": "long", "engines": 1, "up_to": 100},
                    ],
                },
                "training": {"steps": steps, "prompts_per_step": PER_STEP, "samples_per_prompt": SIZE},
                "planner": {"period": 4, "calibration": str(self._directory / "profile.json")},
            }
        )

    def start(self, config: RunConfig, resume: bool = False) -> asyncio.Task[RunSummary]:
        """A run as a task; its workers are in `launcher`."""
        codec, chance = TokenizerCodec(self.model), random.Random(1)

        def speak(tokens: list[int]) -> list[int]:
            return codec.encode(f"A{chance.randrange(2)};" if "=" in codec.decode(tokens) else ">e:1;")

        self.launcher = MadeLauncher(speak)
        self._patch.setattr("libra.exec.run.LocalLauncher", self.launcher)
        config.run_directory.mkdir(parents=True, exist_ok=True)
        (config.run_directory / "config.json").write_text(config.model_dump_json())
        display = PlainDisplay(open("/dev/null", "w"))  # noqa: SIM115
        return asyncio.create_task(run(config, Asking(), display, resume))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(condition: Callable[[], bool], task: asyncio.Task[RunSummary]) -> None:
    while not condition():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.002)


def require_whole(directory: Path, summary: RunSummary, steps: int = STEPS) -> None:
    everybody = sorted(f"g{group}-{index}" for group in range(steps * PER_STEP) for index in range(SIZE))
    assert (summary.finished, summary.steps) == (True, steps)
    assert summary.trajectories_started == summary.trajectories_trained == len(everybody)
    assert summary.logprob_gap == 0.0
    assert [row["step"] for row in rows(directory, "metrics")] == list(range(1, steps + 1))
    assert sorted(t.id for t in read_trajectories(directory / "trajectories.jsonl")) == everybody
    assert all(0 <= row["staleness_max"] <= 1 for row in rows(directory, "metrics"))
    assert rows(directory, "journal")[-1] == {"kind": "end", "step": steps}
    assert (directory / "model" / "tokenizer.json").is_file()
    assert "<svg" in render_report(directory)
    numbers = [row["period"] for row in rows(directory, "periods")]
    assert numbers == sorted(set(numbers))


def test_a_run_from_its_beginning_to_its_end(runs: Runs) -> None:
    config = runs.config("whole")

    async def scenario() -> RunSummary:
        return await runs.start(config)

    require_whole(config.run_directory, asyncio.run(scenario()))
    assert [row["kind"] for row in rows(config.run_directory, "journal")].count("start") == 1


@pytest.mark.parametrize("mode", ["adaptive", "static"])
def test_the_slot_of_a_lost_engine_is_used_again(runs: Runs, mode: str) -> None:
    config = runs.config("loss", mode, steps=60)  # that there is time to plan, and to start it

    async def scenario() -> RunSummary:
        task = runs.start(config)
        await until(lambda: len(rows(config.run_directory, "metrics")) >= 2, task)
        lost = runs.launcher.workers["rollout-1"]
        lost.die()
        await until(lambda: runs.launcher.workers["rollout-1"] is not lost, task)
        return await task

    summary = asyncio.run(scenario())
    require_whole(config.run_directory, summary, steps=60)
    assert summary.lost_workers == ("rollout-1",)
    [loss] = [row for row in rows(config.run_directory, "events") if row["kind"] == "worker_lost"]
    assert loss["text"].endswith("; its slot is idle")
    assert any(
        row["kind"] == "role_change" and row["worker"] == "rollout-1" and row["text"].startswith("idle -> rollout:")
        for row in rows(config.run_directory, "events")
        if row["time"] > 0
    )


def test_the_slot_of_a_lost_core_is_used_again(runs: Runs) -> None:
    config = runs.config("core-loss", steps=60, cores=2)

    async def scenario() -> RunSummary:
        task = runs.start(config)
        await until(lambda: len(rows(config.run_directory, "metrics")) >= 2, task)
        lost = runs.launcher.workers["core-0"]
        lost.die()
        await until(lambda: runs.launcher.workers["core-0"] is not lost, task)
        return await task

    summary = asyncio.run(scenario())
    require_whole(config.run_directory, summary, steps=60)
    assert summary.lost_workers == ("core-0",)


def test_the_loss_of_the_last_core_ends_the_run_which_can_be_resumed(runs: Runs) -> None:
    config = runs.config("cores-lost", steps=60, cores=2)

    async def scenario() -> RunSummary:
        task = runs.start(config)
        await until(lambda: any(config.run_directory.glob("checkpoint-*/state.json")), task)
        for name in ("core-0", "core-1"):
            runs.launcher.workers[name].die()
        with pytest.raises(CoreLostError, match=r"core trainer .*core-1 is gone, and no other is left"):
            await task
        return await runs.start(config, resume=True)

    require_whole(config.run_directory, asyncio.run(scenario()), steps=60)


@pytest.mark.parametrize(("verb", "which"), [("evaluate", 0), ("logprob_gap", 0), ("evaluate", 1), ("logprob_gap", 1)])
def test_engines_that_are_lost_in_an_evaluation_are_started_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, verb: str, which: int
) -> None:
    """All of them, with turns that they have begun: nobody else could go on with those."""
    config, calls, real = runs.config("evaluated"), itertools.count(), getattr(run_module, verb)

    async def bereft(*arguments: Any) -> Any:
        if next(calls) == which:
            for entry in cast(Rollout, arguments[0])._fleet.instances():
                runs.launcher.workers[entry.handle.name].instead[Generate] = None
        return await real(*arguments)

    monkeypatch.setattr(run_module, verb, bereft)

    async def scenario() -> RunSummary:
        async with asyncio.timeout(PATIENCE):
            return await runs.start(config)

    summary = asyncio.run(scenario())
    require_whole(config.run_directory, summary)
    assert len(summary.lost_workers) >= 2


def test_a_run_ends_when_nobody_is_left_for_its_evaluation(runs: Runs) -> None:
    config, started = runs.config("nobody"), set[str]()

    class Broken(dict[str, dict[type[Message], Any]]):
        def pop(self, name: str, *default: Any) -> dict[type[Message], Any]:
            if name in started:
                return {StartEngine: Failure("out of memory")}
            started.add(name)
            return {Generate: None}

    async def scenario() -> None:
        task = runs.start(config)
        runs.launcher.prepared = Broken()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(InfeasiblePlanError, match=r"that are left do not become train 1 \| long 1"):
                await task

    asyncio.run(scenario())


@pytest.mark.parametrize("steps", [4, 7, 11])
def test_a_killed_controller_and_its_resumed_run(runs: Runs, steps: int) -> None:
    """What a kill leaves is what is in the directory at that moment: it is copied, and gone on with."""
    killed, resumed = runs.config(f"killed-{steps}"), runs.config(f"resumed-{steps}")

    async def scenario() -> RunSummary:
        task = runs.start(killed)
        await until(lambda: len(rows(killed.run_directory, "metrics")) >= steps, task)
        shutil.copytree(killed.run_directory, resumed.run_directory)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        step = latest_checkpoint(directory)[1].step
        version = read_history(directory, step).version
        again.extend(
            [f"made steps {step + 1} to {version} again, from their own trajectories"] if version > step else []
        )
        return await runs.start(resumed, resume=True)

    directory, again = resumed.run_directory, list[str]()
    summary = asyncio.run(scenario())
    require_whole(directory, summary)
    assert summary.prediction_error == prediction_error(read_records(PeriodRecord, directory / "periods.jsonl"))
    assert [row["kind"] for row in rows(directory, "journal")].count("start") == 2
    assert [row["text"] for row in rows(directory, "events") if row["kind"] == "resumed"] == again
