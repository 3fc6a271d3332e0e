"""Whole runs with workers that answer at once: everything but the processes, and what they compute, is real."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from fakes.scripted import AskTool, echo
from fakes.small_run import PROFILE, rows
from fakes.workers import NO_PROCESS, MadeLauncher, MadeWorker

from libra.backends.grpo.membership import CoreLostError
from libra.backends.machine import Bf16Speed
from libra.backends.tiny_model import TokenizerCodec, kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Generate,
    Generated,
    HandoverMeasured,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    StartEngine,
)
from libra.backends.transport.messages import Dtype, Failure, Message, Ready
from libra.backends.transport.trainer_messages import Follow, MeasureTraining, Publish, StartTrainer, Train
from libra.config.run import ModelConfig, RunConfig
from libra.config.yaml_file import ConfigError
from libra.cost.device import HandoverCost
from libra.cost.sources.files import load_profile, save_profile
from libra.environments.protocol import Prompt
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.exec.recovery import Recovery
from libra.loop import calibration, session
from libra.loop import run as run_module
from libra.loop.checkpoint import Interrupted, latest_checkpoint
from libra.loop.episode_file import read_history
from libra.loop.rollout import Rollout
from libra.loop.run import MemoryWatch, run
from libra.plan.problem import InfeasiblePlanError
from libra.records.run_log import prediction_error
from libra.records.schema import PeriodRecord, RunSummary, read_records
from libra.report.live import PlainDisplay
from libra.report.run_page import render_report
from libra.trajectory.log_file import read_trajectories

STEPS, PER_STEP, SIZE = 12, 2, 3
PARTS = ("wait", "checkpoint", "held", "redone", "train", "exchange", "publish")  # of a step

Orders = dict[type[Message], Any]  # what a worker does instead at such an order
NO_ENGINE: Orders = {StartEngine: Failure("out of memory")}
NO_TURN: Orders = {Generate: None}


class Asking(AskTool):
    """A call, its result, and an answer that is right half of the time."""

    alphabet = "QAe:>=;?!T0123456789"

    def __init__(self) -> None:
        super().__init__({"e": echo})

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return [Prompt(f"{split}-{number}", f"Q{number % 10};", f"A{number % 2};") for number in range(count)]


WORKERS = ("core-0", "hybrid-0", "rollout-0", "rollout-1")


class Succession(dict[str, Orders]):
    """What the first process of each slot does instead, and what all later ones there do."""

    def __init__(self, first: Mapping[str, Orders], later: Mapping[str, Orders]) -> None:
        self._first, self._later, self._started = first, later, set[str]()

    def pop(self, name: str, *default: Any) -> Orders:
        orders = (self._later if name in self._started else self._first).get(name, {})
        self._started.add(name)
        return orders


class Runs:
    """Runs in a directory of the test, with a tiny model's tokenizer and a made profile."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._patch = directory, monkeypatch
        self.model = directory / "model"
        write_tiny_model(self.model, ModelConfig(hidden_size=32, heads=2, kv_heads=1), Asking.alphabet, 100)
        save_profile(directory / "profile.json", PROFILE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        self.launcher: MadeLauncher

    def cached_profiles(self) -> list[Path]:
        return [*(self._directory / "cache" / "libra" / "profiles").glob("*")]

    def config(
        self, name: str, mode: str = "adaptive", steps: int = STEPS, cores: int = 1, measured: bool = False
    ) -> RunConfig:
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
                "planner": {
                    "period": 4,
                    "calibration": None if measured else str(self._directory / "profile.json"),
                },
            }
        )

    def start(self, config: RunConfig, resume: bool = False) -> asyncio.Task[RunSummary]:
        """A run as a task; its workers are in `launcher`."""
        codec, chance = TokenizerCodec(self.model), random.Random(1)

        def speak(tokens: list[int]) -> list[int]:
            return codec.encode(f"A{chance.randrange(2)};" if "=" in codec.decode(tokens) else ">e:1;")

        self.launcher = MadeLauncher(speak)
        self._patch.setattr("libra.loop.run.LocalLauncher", self.launcher)
        config.run_directory.mkdir(parents=True, exist_ok=True)
        (config.run_directory / "config.json").write_text(config.model_dump_json())
        display = PlainDisplay(open("/dev/null", "w"))  # noqa: SIM115
        return asyncio.create_task(run(config, Asking(), display, resume))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


async def until(condition: Callable[[], bool], task: asyncio.Task[RunSummary]) -> None:
    while not condition():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.002)


async def steps_made(count: int, config: RunConfig, task: asyncio.Task[RunSummary]) -> None:
    await until(lambda: len(rows(config.run_directory, "metrics")) >= count, task)


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
    for row in rows(directory, "metrics"):
        parts = [row[f"{part}_seconds"] for part in PARTS]
        assert min(parts) >= 0
        assert sum(parts) <= row["step_seconds"] + 1e-9
        assert len(row["device_seconds"]) == 4  # that each adds up to the step, the record sees to
        assert sum(row["staleness"]) == row["trajectories"]
        assert len(row["staleness"]) == row["staleness_max"] + 1
    numbers = [row["period"] for row in rows(directory, "periods")]
    assert numbers == sorted(set(numbers))


async def test_a_run_from_its_beginning_to_its_end(runs: Runs) -> None:
    config = runs.config("whole")
    summary = await runs.start(config)
    require_whole(config.run_directory, summary)
    assert [row["kind"] for row in rows(config.run_directory, "journal")].count("start") == 1


@pytest.mark.parametrize(
    ("worker", "mode", "cores"), [("rollout-1", "adaptive", 1), ("rollout-1", "static", 1), ("core-0", "adaptive", 2)]
)
async def test_the_slot_of_a_lost_worker_is_used_again(runs: Runs, worker: str, mode: str, cores: int) -> None:
    config = runs.config("loss", mode, steps=60, cores=cores)  # that there is time to plan, and to start it
    task = runs.start(config)
    await steps_made(2, config, task)
    lost = runs.launcher.workers[worker]
    lost.die()
    await until(lambda: runs.launcher.workers[worker] is not lost, task)
    summary = await task
    require_whole(config.run_directory, summary, steps=60)
    assert summary.lost_workers == (worker,)
    events = rows(config.run_directory, "events")
    [loss] = [row for row in events if row["kind"] == "worker_lost"]
    assert loss["text"].endswith("; its slot is idle")
    changes = [row["text"] for row in events if row["kind"] == "role_change" and row["worker"] == worker]
    assert any(text.startswith("idle -> ") for text in changes[1:])


async def test_a_step_that_is_made_again_says_what_that_took(runs: Runs) -> None:
    """A replica goes away in the middle of a step: the other one makes it again."""
    config = runs.config("again", "static")
    task = runs.start(config)
    await steps_made(2, config, task)
    runs.launcher.workers["hybrid-0"].instead[Train] = None
    summary = await task
    require_whole(config.run_directory, summary)
    assert summary.lost_workers == ("hybrid-0",)
    steps = rows(config.run_directory, "metrics")
    [lossy] = [row for row in steps if row["device_seconds"]["core-0"].get("redoing", 0.0) > 0]
    assert lossy["device_seconds"]["core-0"]["redoing"] == pytest.approx(lossy["redone_seconds"], rel=1e-3)
    assert all(row["redone_seconds"] == 0 for row in steps if row is not lossy)
    assert lossy["device_seconds"]["hybrid-0"]["failed"] > 0
    assert "redoing" in summary.device_seconds


async def test_a_slot_is_not_used_again_once_it_has_lost_as_many_as_the_configuration_allows(runs: Runs) -> None:
    config = runs.config("retired", steps=40)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"losses_per_hour": 1})})
    task = runs.start(config)
    await steps_made(2, config, task)
    runs.launcher.workers["rollout-1"].die()
    summary = await task
    require_whole(config.run_directory, summary, steps=40)
    [loss] = [row for row in rows(config.run_directory, "journal") if row["kind"] == "lost"]
    assert (loss["worker"], loss["retired"]) == ("rollout-1", True)
    assert rows(config.run_directory, "metrics")[-1]["roles"]["rollout-1"] == "failed"


async def test_the_loss_of_the_last_core_ends_the_run_which_can_be_resumed(runs: Runs) -> None:
    config = runs.config("cores-lost", steps=60, cores=2)
    task = runs.start(config)
    await until(lambda: any(config.run_directory.glob("checkpoint-*[0-9]/state.json")), task)
    for name in ("core-0", "core-1"):
        runs.launcher.workers[name].die()
    with pytest.raises(CoreLostError, match=r"core trainer .*core-1 is gone, and none is left"):
        await task
    summary = await runs.start(config, resume=True)
    require_whole(config.run_directory, summary, steps=60)


HOLDER = "held = bytes(range(256)) * (1 << 18); print(len(held), flush=True); input()"


async def test_the_memory_of_a_run_is_also_that_of_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        held = int(process.stdout.readline())
        roots = [process.pid, NO_PROCESS]
        async with MemoryWatch(lambda: roots) as both, MemoryWatch(lambda: []) as own:
            assert await both.peak() > await own.peak() + held / 2
            process.stdin.close()
            process.wait()
            assert await both.peak() > await own.peak() + held / 2  # it is gone, and was there


async def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_made(runs: Runs) -> None:
    done = runs.config("longer", steps=6)
    fewer = done.model_copy(update={"training": done.training.model_copy(update={"steps": 5})})
    await runs.start(done)
    with pytest.raises(ConfigError, match=r"training.steps: 5, but .*longer has already made 6 steps"):
        await runs.start(fewer, resume=True)
    assert len(rows(done.run_directory, "metrics")) == 6


@pytest.mark.parametrize(
    "broken",
    [
        {"core-0": {StartTrainer: None}},
        {"core-0": {Publish: None}},
        {"hybrid-0": {StartTrainer: None}},
        {"hybrid-0": {Follow: None}},
        {"rollout-0": {StartEngine: None}, "rollout-1": {LoadWeights: None}},
    ],
)
async def test_workers_that_are_killed_as_a_run_starts_are_started_again(runs: Runs, broken: dict[str, Orders]) -> None:
    config = runs.config("begun", steps=3)
    task = runs.start(config)
    runs.launcher.prepared |= broken
    summary = await task
    require_whole(config.run_directory, summary, steps=3)
    assert {row["worker"] for row in rows(config.run_directory, "journal") if row["kind"] == "failed"} == set(broken)


async def test_a_run_starts_with_fewer_workers_where_a_slot_is_no_good(runs: Runs) -> None:
    config = runs.config("smaller", steps=3)
    task = runs.start(config)
    runs.launcher.prepared = Succession({"rollout-0": {StartEngine: None}}, {"rollout-0": {StartEngine: None}})
    summary = await task
    require_whole(config.run_directory, summary, steps=3)
    failed = [row for row in rows(config.run_directory, "journal") if row["kind"] == "failed"]
    assert [row["worker"] for row in failed] == ["rollout-0"] * 3 and failed[-1]["retired"]


@pytest.mark.parametrize(
    ("name", "orders", "error"),
    [
        ("rollout-0", {StartEngine: Failure("out of memory")}, WorkerFailedError),  # as a wrong configuration has it
        ("core-0", {StartTrainer: None}, WorkerLostError),
    ],
)
async def test_a_run_whose_workers_cannot_start_says_why(
    runs: Runs, name: str, orders: Orders, error: type[Exception]
) -> None:
    config = runs.config("never")
    task = runs.start(config)
    runs.launcher.prepared = Succession({name: orders}, {name: orders})
    with pytest.raises(error, match=f"{name}"):
        await task


@pytest.mark.parametrize(("verb", "which"), [("evaluate", 0), ("logprob_gap", 0), ("evaluate", 1), ("logprob_gap", 1)])
async def test_engines_that_are_lost_in_an_evaluation_are_started_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, verb: str, which: int
) -> None:
    """All of them, with turns that they have begun: nobody else could go on with those."""
    config, calls, real = runs.config("evaluated"), itertools.count(), getattr(session, verb)

    async def bereft(*arguments: Any) -> Any:
        if next(calls) == which:
            for entry in cast(Rollout, arguments[0])._turns.fleet.instances():
                runs.launcher.workers[entry.handle.name].instead[Generate] = None
        return await real(*arguments)

    monkeypatch.setattr(session, verb, bereft)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary)
    assert len(summary.lost_workers) >= 2


@pytest.mark.parametrize(
    ("broken", "next_broken", "lost"),
    [
        ({}, {}, set()),
        ({"rollout-0": {MeasureEngine: None}}, {}, {"rollout-0"}),
        ({"rollout-1": {MeasureEngine: Failure("out of memory")}}, {}, {"rollout-1"}),
        ({"rollout-1": {MeasureHandover: None}}, {}, {"rollout-1"}),
        ({"rollout-1": {MeasureHandover: Failure("out of memory")}}, {}, {"rollout-1"}),
        ({"rollout-0": {Generate: None}, "rollout-1": {Generate: None}}, {}, {"rollout-0", "rollout-1"}),
        ({"rollout-0": {LoadWeights: None}, "rollout-1": {LoadWeights: None}}, {}, {"rollout-0", "rollout-1"}),
        ({}, {"hybrid-0": {MeasureTraining: None}}, {"hybrid-0"}),
        ({}, {"hybrid-0": {Follow: None}}, set()),  # its move fails: it was in no service
        ({}, {"rollout-0": {StartEngine: Failure("out of memory")}}, set()),
    ],
)
async def test_workers_that_are_lost_while_they_are_measured_are_started_again(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[str, Orders],
    next_broken: dict[str, Orders],
    lost: set[str],
) -> None:
    """Their processes, or those that replace them as restarts are measured, break at such an order."""
    config, real, attempts = runs.config("measured", steps=3, measured=True), calibration.measure, itertools.count()

    async def measured(*arguments: Any) -> Any:
        if next(attempts) == 0:
            runs.launcher.prepared |= next_broken
            for name, orders in broken.items():
                runs.launcher.workers[name].instead |= orders
        return await real(*arguments)

    monkeypatch.setattr(calibration, "measure", measured)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary, steps=3)
    assert set(summary.lost_workers) == lost
    again = [row for row in rows(config.run_directory, "events") if "measuring begins again" in row["text"]]
    assert len(again) == next(attempts) - 1 == (1 if broken or next_broken else 0)
    [cached] = runs.cached_profiles()
    assert load_profile(cached) == load_profile(config.run_directory / "profile.json")


async def test_who_is_lost_as_another_one_is_started_again_is_started_again_too(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real, found = runs.config("both", steps=1, measured=True), calibration.measure, list[str]()

    async def start_slowly() -> Message:
        runs.launcher.workers["rollout-1"].die()
        while executors[0].pool["rollout-1"].duty.shape is not None:
            await asyncio.sleep(0)
        return Ready(0.1, (), 0)

    executors: list[Any] = []

    async def measured(*arguments: Any) -> Any:
        executors.append(arguments[0])
        found.append(arguments[0].allocation().describe())
        if len(found) == 1:
            runs.launcher.workers["rollout-0"].instead[MeasureEngine] = None
            runs.launcher.prepared["rollout-0"] = {StartEngine: start_slowly}
        return await real(*arguments)

    monkeypatch.setattr(calibration, "measure", measured)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary, steps=1)
    assert set(summary.lost_workers) == {"rollout-0", "rollout-1"}
    assert found == 2 * found[:1]


async def test_an_engine_for_the_longest_contexts_that_is_lost_between_two_evaluations_is_started_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody recovers it at that moment, and those who come next find an allocation without it."""
    config, real, calls = runs.config("between"), Recovery.during, itertools.count()

    async def late(recovery: Recovery, work: Any) -> Any:
        if next(calls) == 1:
            executor = recovery._executor
            [longest] = [worker.id for worker in executor.pool.all() if worker.duty.shape == "long"]
            runs.launcher.workers[longest].die()
            while executor.pool[longest].duty.shape is not None:
                await asyncio.sleep(0)
        return await real(recovery, work)

    monkeypatch.setattr(Recovery, "during", late)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary)
    assert len(summary.lost_workers) == 1


@pytest.mark.parametrize(
    ("handover", "prepared"),
    [(None, False), (HandoverCost(0.0, 1e-4), False), (HandoverCost(0.01, 0.0), False), (HandoverCost(0.0, 0.0), True)],
)
async def test_engines_hand_kv_over_where_that_can_pay(
    runs: Runs, handover: HandoverCost | None, prepared: bool
) -> None:
    """Contexts have 100 tokens at most, of 0.1 ms each."""
    config = runs.config("known", steps=1)
    assert config.planner.calibration is not None
    engine = replace(PROFILE.engine, step=1e-3)
    save_profile(config.planner.calibration, replace(PROFILE, engine=engine, handover=handover))
    await runs.start(config)
    starts = [order for worker in runs.launcher.workers.values() for order in worker.orders]
    assert {order.kv is not None for order in starts if isinstance(order, StartEngine)} == {prepared}


@pytest.mark.parametrize(("fixed", "prepared"), [(1.0, False), (0.0, True)])
async def test_costs_are_those_of_engines_as_they_will_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, fixed: float, prepared: bool
) -> None:
    """An engine that is prepared to hand KV over is twice as slow here, and nobody pays for that in vain."""
    config, answer = runs.config("as-run", steps=3, measured=True), MadeWorker._answer
    busy: dict[MadeWorker, float] = defaultdict(float)

    async def slower(worker: MadeWorker, order: Message) -> Message | None:
        said = await answer(worker, order)
        slow = any(isinstance(start, StartEngine) and start.kv is not None for start in worker.orders)
        each = 2e-3 if slow else 1e-3
        if isinstance(order, MeasureHandover):
            return HandoverMeasured([(tokens, fixed + 1e-9 * tokens) for tokens in order.contexts] * order.repeats)
        if isinstance(order, MeasureEngine):
            return EngineMeasured([(n, 0.0, n * c, each * (n + 0.1 * n * c)) for n, c in order.points])
        if isinstance(said, Generated):
            busy[worker] += each * (sum(len(piece.tokens) for piece in said.pieces) + 0.1 * len(order.tokens))
            return msgspec.structs.replace(said, busy_seconds=busy[worker])
        return said

    monkeypatch.setattr(MadeWorker, "_answer", slower)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary, steps=3)
    profile = load_profile(config.run_directory / "profile.json")
    assert profile.handover is not None and profile.handover.fixed == pytest.approx(fixed, abs=1e-3)
    assert profile.engine.per_sequence == pytest.approx(2e-3 if prepared else 1e-3, rel=1e-3)
    assert profile.engine.per_prefill_token == pytest.approx(2e-4 if prepared else 1e-4, rel=1e-3)
    starts = [[o for o in worker.orders if isinstance(o, StartEngine)] for worker in runs.launcher.workers.values()]
    assert {start.kv is not None for [start] in filter(None, starts)} == {prepared}


@pytest.mark.parametrize("order", [MeasureEngine, StartEngine])
async def test_an_engine_that_is_lost_as_it_is_measured_without_handover_is_started_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, order: type[Message]
) -> None:
    config, real, attempts = runs.config("plain", steps=3, measured=True), calibration.measure_plain, itertools.count()

    async def measured(*arguments: Any) -> Any:
        if next(attempts) == 0:
            runs.launcher.prepared["rollout-1"] = {order: None}
        return await real(*arguments)

    monkeypatch.setattr(calibration, "measure_plain", measured)
    summary = await runs.start(config)
    require_whole(config.run_directory, summary, steps=3)
    assert next(attempts) == 2
    [again] = [row["text"] for row in rows(config.run_directory, "events") if "begins again" in row["text"]]
    assert again.startswith("measuring engines that hand no KV over begins again: ")
    for worker in runs.launcher.workers.values():
        assert all(start.kv is None for start in worker.orders if isinstance(start, StartEngine))


async def test_costs_that_were_measured_here_are_not_measured_again(runs: Runs) -> None:
    first, second = (runs.config(name, steps=2, measured=True) for name in ("measured", "known"))
    for config, measured in ((first, True), (second, False)):
        await runs.start(config)
        orders = [type(order) for worker in runs.launcher.workers.values() for order in worker.orders]
        assert (MeasureEngine in orders) == (MeasureTraining in orders) == measured
        assert load_profile(config.run_directory / "profile.json") == load_profile(*runs.cached_profiles())


async def test_a_profile_of_fewer_workers_is_not_kept(runs: Runs) -> None:
    config = runs.config("fewer", steps=3, measured=True)
    task = runs.start(config)
    runs.launcher.prepared = Succession({"rollout-0": {MeasureEngine: None}}, {"rollout-0": NO_ENGINE})
    summary = await task
    require_whole(config.run_directory, summary, steps=3)
    assert (config.run_directory / "profile.json").is_file() and not runs.cached_profiles()


async def test_a_run_ends_when_its_workers_cannot_be_measured(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    config, attempts = runs.config("never-measured", measured=True), itertools.count(1)

    async def lost(*arguments: Any) -> Any:
        next(attempts)
        runs.launcher.workers["rollout-0"].die()
        raise WorkerLostError("engine rollout-0 is gone")

    monkeypatch.setattr(calibration, "measure", lost)
    with pytest.raises(WorkerLostError, match="engine rollout-0 is gone"):
        await runs.start(config)
    assert next(attempts) == 4


async def test_a_run_ends_when_nobody_is_left_for_its_evaluation(runs: Runs) -> None:
    config = runs.config("nobody")
    task = runs.start(config)
    runs.launcher.prepared = Succession(dict.fromkeys(WORKERS, NO_TURN), dict.fromkeys(WORKERS, NO_ENGINE))
    with pytest.raises(InfeasiblePlanError, match=r"the remaining workers do not become train 1 \| long 1"):
        await task


@pytest.mark.parametrize("steps", [4, 7, 11])
async def test_a_killed_controller_and_its_resumed_run(runs: Runs, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """What a kill leaves is what is in the directory at that moment: it is copied, and gone on with."""
    killed, resumed = runs.config(f"killed-{steps}"), runs.config(f"resumed-{steps}")
    real = run_module.read_interrupted

    def an_hour_later(directory: Path) -> Interrupted:
        before = real(directory)
        return replace(before, recorded=replace(before.recorded, time=3600.0))

    monkeypatch.setattr(run_module, "read_interrupted", an_hour_later)

    directory, again = resumed.run_directory, list[str]()
    task = runs.start(killed)
    await steps_made(steps, killed, task)
    shutil.copytree(killed.run_directory, resumed.run_directory)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    step = latest_checkpoint(directory)[1].step
    version = read_history(directory, step).version
    again.extend([f"replayed steps {step + 1} to {version}, from their own trajectories"] if version > step else [])
    summary = await runs.start(resumed, resume=True)
    require_whole(directory, summary)
    assert summary.prediction_error == prediction_error(read_records(PeriodRecord, directory / "periods.jsonl"))
    assert [row["kind"] for row in rows(directory, "journal")].count("start") == 2
    resumed_events = [row for row in rows(directory, "events") if row["kind"] == "resumed"]
    assert [row["text"] for row in resumed_events] == again
    assert all(row["seconds"] > 0 for row in resumed_events)
    assert ("redoing" in summary.device_seconds) == bool(again)
    assert summary.wall_seconds > rows(directory, "metrics")[-1]["time"] > 3600
    assert sum(summary.device_seconds.values()) < 3600  # they are of the session


async def test_records_that_a_loss_of_power_tore_are_made_whole_by_the_resumed_run(runs: Runs) -> None:
    config = runs.config("torn")
    directory, written = config.run_directory, config.run_directory / "trajectories.jsonl"
    task = runs.start(config)
    await steps_made(4, config, task)
    # What a checkpoint speaks of is on the disk: only later lines can be lost.
    await until(lambda: len(read_history(directory, latest_checkpoint(directory)[1].step).finished) >= 2, task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    *whole, torn, _ = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(whole) + torn[:10] + b"\n")
    summary = await runs.start(config, resume=True)
    require_whole(directory, summary)
    told = [row["text"] for row in rows(directory, "events") if row["kind"] == "warning"]
    assert told == ["trajectories.jsonl: 1 torn lines are left out"]


@pytest.mark.parametrize(
    ("devices", "precision", "dtype"),
    [
        ((Bf16Speed("", 16.0),), "fp32", "float32"),
        ((Bf16Speed("AVX-512 BF16", 0.25),), "bf16", "bfloat16"),
        ((Bf16Speed("AVX-512 BF16", 0.25), Bf16Speed("", 16.0)), "fp32", "float32"),
    ],
)
async def test_everything_computes_in_what_is_fast(
    runs: Runs, devices: tuple[Bf16Speed, ...], precision: str, dtype: Dtype
) -> None:
    config = runs.config("fast", steps=2, measured=True)
    task = runs.start(config)
    runs.launcher.bf16 = devices
    summary = await task
    starts = [order for worker in runs.launcher.workers.values() for order in worker.orders]
    assert {order.precision for order in starts if isinstance(order, StartTrainer)} == {precision}
    engines = [order for order in starts if isinstance(order, StartEngine)]
    assert {order.dtype for order in engines} == {dtype}
    per_token = kv_bytes_per_token(runs.model, dtype)
    assert {order.kv_cache_bytes for order in engines} == {512 * per_token}
    assert json.loads((config.run_directory / "config.json").read_text())["training"]["precision"] == precision
    [told] = [row["text"] for row in rows(config.run_directory, "events") if row["kind"] == "arithmetic"]
    assert told == summary.arithmetic and told.startswith(f"computes in {precision}")
    assert told in render_report(config.run_directory)


async def test_an_arithmetic_that_is_asked_for_is_obeyed(runs: Runs) -> None:
    config = runs.config("asked", steps=2).computing_in("bf16")
    summary = await runs.start(config)
    starts = [order for worker in runs.launcher.workers.values() for order in worker.orders]
    assert {order.dtype for order in starts if isinstance(order, StartEngine)} == {"bfloat16"}
    assert summary.arithmetic == (
        "computes in bf16 as configured: matrix products in bf16 take 16 times as long as in fp32 here, auto would"
        " choose fp32"
    )
