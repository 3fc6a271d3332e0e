"""One session of a run: its parts wired together, from the first worker to the summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from libra.backends.launch.launcher import WorkerLauncher
from libra.backends.machine import LIBRARIES, Choice, served_dtype, versions
from libra.backends.tiny_model import TokenizerCodec, kv_bytes_per_token
from libra.backends.vllm.kv_handover import KVHandover
from libra.config.run import RunConfig, ShapeConfig, StartConfig
from libra.cost.device import DeviceProfile
from libra.cost.sources.profile_file import load_profile, save_profile
from libra.environments.protocol import Environment
from libra.exec.journal import Journal, RunEnded
from libra.exec.pool import WorkerPool, make_pool
from libra.exec.recovery import Recovery
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.evaluation import evaluate, logprob_gap
from libra.loop.fleet import ServingFleet
from libra.loop.interrupted import Interrupted, Recorded, allocation_in_force, missing_trajectories
from libra.loop.measure import measure, measure_plain, profile_words
from libra.loop.memory import MemoryWatch
from libra.loop.metrics import MetricsEndpoint
from libra.loop.observations import Observations
from libra.loop.phases import Phases
from libra.loop.process_controller import Origin, RunExecutor, begin_session
from libra.loop.profile_cache import keep_profile, kept_profile, profile_key, profile_path
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.loop.rollout import Rollout
from libra.loop.tally import EngineCounters
from libra.loop.training_loop import TrainingLoop
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.slots import longest_context
from libra.records.causes import device_words, total
from libra.records.disk import writing
from libra.records.run_log import prediction_error
from libra.records.schema import Evaluation, MovedContexts, PeriodRecord, RunSummary, read_records
from libra.report.live import Display
from libra.route.catalogue import policy_named, policy_restored


class _Observer:
    """Records changes of the pool, and tells all `planners` of losses and of slots that are back."""

    def __init__(self, recorder: Recorder, phase: Phases) -> None:
        self._recorder, self._phase = recorder, phase
        self.role, self.moved = recorder.role, recorder.moved
        self.load, self.weights, self.joined = recorder.load, recorder.weights, recorder.joined
        self.planners: list[Callable[[], None]] = []

    def lost(self, worker: str, why: str, retired: bool) -> None:
        self._recorder.lost(worker, why, retired)
        self._phase.line(f"worker {worker} is lost: {why}")
        self._plan()

    def node_back(self, worker: str) -> None:
        self._recorder.event("slot_back", worker, "there is a node for its slot again")
        self._phase.line(f"there is a node for {worker} again")
        self._plan()

    def _plan(self) -> None:
        for workers_changed in self.planners:
            workers_changed()


class Session:
    """One session of a run, in `config.run_directory`. `before` is what an interrupted run left; `began` is when this
    process started it."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        display: Display,
        phase: Phases,
        launcher: WorkerLauncher,
        metrics: MetricsEndpoint,
        arithmetic: Choice,
        model: Path,
        began: float,
        before: Interrupted | None,
    ) -> None:
        self._config, self._environment, self._display, self._phase = config, environment, display, phase
        self._model, self._began, self._before = model, began, before
        self._launcher, self._metrics, self._arithmetic = launcher, metrics, arithmetic
        self._directory = config.run_directory
        self._files = ExitStack()
        self._recorder: Recorder
        self._seconds_before = before.seconds if before is not None else 0.0

    async def run(self, memory: MemoryWatch) -> RunSummary:
        """Returns the summary, which is also written."""
        config, environment, directory, before = self._config, self._environment, self._directory, self._before
        history = before.history if before is not None else History(0)
        recorded = before.recorded if before is not None else Recorded()
        files = self._files
        journal = files.enter_context(closing(Journal(directory / "journal.jsonl")))
        episode_file = files.enter_context(closing(EpisodeFile(directory, history.step, history.groups)))
        recorder = self._recorder = files.enter_context(closing(Recorder(directory, self._seconds_before)))
        self._metrics.recorder = recorder
        for episode in missing_trajectories(directory, history.finished):
            recorder.episode(episode)
        for damage in recorded.damaged:
            recorder.event("warning", None, damage)
        codec = TokenizerCodec(self._model)
        name = config.routing.policy
        policy = (
            policy_restored(name, before.state.policy) if before is not None else policy_named(name, seed=config.seed)
        )
        cluster = config.cluster
        pool = make_pool(cluster.core, cluster.hybrid, cluster.rollout, cluster.losses_per_hour)
        recorder.event("arithmetic", None, self._arithmetic.words)
        recorder.meet(pool.all())
        allocation = self._first_allocation(pool)
        precision = self._arithmetic.precision
        kv_bytes = kv_bytes_per_token(self._model, served_dtype(precision))
        # Room for all that the largest engine holds, so that it can give everything away at once.
        handover = KVHandover(kv_bytes, max(shape.kv_tokens for shape in config.engines.values()))
        fleet = ServingFleet(policy, allocation, handover)
        observer = _Observer(recorder, self._phase)
        checkpoint = before.checkpoint if before is not None else None
        origin = Origin(self._model, precision, kv_bytes, history.step, checkpoint)
        executor = begin_session(self._launcher, pool, fleet, config, origin, journal, observer)
        model_config = json.loads((self._model / "config.json").read_text())
        key = profile_key(config, self._launcher.hardware, precision, model_config)
        profile = self._known_profile(key)
        if profile is not None:
            handover.price_by(profile)
        self._phase.show("starting engines and trainers")
        recovery = Recovery(executor, allocation, lambda text: recorder.event("warning", None, text))
        observer.planners.append(recovery.worker_lost)
        await recovery.start()
        ready = executor.allocation() or allocation
        self._phase.line(f"{ready.replicas + ready.engines} workers are ready: {ready.describe()}")
        if profile is None:
            profile = await self._measured_profile(key, executor, recovery, handover)
        with writing(directory / "profile.json"):
            save_profile(directory / "profile.json", profile)
        observations = Observations(config, profile, environment.turn_tokens)
        rollout = Rollout(
            environment, config.environment.tools, codec, fleet, executor.longest_context, recorder, recorder.now
        )
        heldout = environment.prompts("heldout", config.environment.heldout_prompts, config.seed)
        prompts = environment.prompts("train", config.environment.train_prompts, config.seed)
        temperature = config.training.temperature
        counters = EngineCounters()
        counters.gained(fleet.instances())
        if before is None:
            self._phase.show(f"evaluating on {len(heldout)} held-out questions")
            started, episodes = await recovery.during(evaluate(rollout, heldout, "start", 0, temperature))
            observations.observe(episodes, [bucket.up_to for bucket in allocation.buckets])
            observations.observe_engines(counters.gained(fleet.instances()))
        else:
            observations.restore_tracker(before.state.tracker)
            started = before.state.started
        self._phase.line(_words(started))
        trainers = executor.processes.trainers
        gaps = [await recovery.during(logprob_gap(rollout, trainers, heldout, "check-start", temperature))]
        recorder.begin()
        controller = ReplanController(
            config, executor, observations, recorder, self._display, allocation, recorded.periods
        )
        observer.planners.append(controller.worker_lost)
        training = TrainingLoop(
            config,
            prompts,
            executor,
            rollout,
            observations,
            controller,
            recorder,
            journal,
            episode_file,
            counters,
            self._display,
            started,
            history,
            recorded,
        )
        await training.run()
        self._phase.show(f"evaluating on {len(heldout)} held-out questions", training.step)
        ended, _ = await recovery.during(evaluate(rollout, heldout, "end", training.step, temperature))
        self._phase.line(_words(ended))
        gaps.append(await recovery.during(logprob_gap(rollout, trainers, heldout, "check-end", temperature)))
        await executor.processes.save_final(directory / "model")
        await memory.look()
        summary = self._summary((started, ended), training, max(gaps), memory)
        recorder.summary(summary)
        journal.commit(RunEnded(training.step))
        await executor.stop()
        if words := device_words(recorder.tally.device_seconds):
            self._phase.line(f"{words} (while steps were made)")
        return summary

    def close(self) -> None:
        self._files.close()

    def _first_allocation(self, pool: WorkerPool) -> Allocation:
        """That of the configuration, or the one that was in force when the run was interrupted."""
        before = self._before
        if before is None:
            return _start_allocation(self._config.start, self._config.engines)
        moves = ", ".join(f"{worker} was changing {move}" for worker, move in before.journal.under_way.items())
        self._phase.line(
            f"goes on from {before.checkpoint.name}; the run had come to version {before.journal.version}"
            + (f", and {moves}" if moves else "")
        )
        holds = {name: shape.max_model_len for name, shape in self._config.engines.items()}
        in_force = allocation_in_force(before.journal, pool.all(), holds)
        if in_force is None:
            self._phase.line("the workers or engines are others than before: they begin as start says")
        return in_force or _start_allocation(self._config.start, self._config.engines)

    def _known_profile(self, key: str) -> DeviceProfile | None:
        """What this machine's workers cost, from a file or from an earlier run here; None: it has to be measured."""
        if self._config.planner.calibration is not None:
            return load_profile(self._config.planner.calibration)
        profile = kept_profile(key)
        if profile is not None:
            self._phase.line(f"costs measured earlier on this hardware are used ({profile_path(key)})")
        return profile

    async def _measured_profile(
        self, key: str, executor: RunExecutor, recovery: Recovery, handover: KVHandover
    ) -> DeviceProfile:
        """What they cost now, as they will run."""
        engines, trajectories = self._config.engines, self._config.training.trajectories
        hardware = self._launcher.hardware
        self._phase.show("measuring engines and trainers, all at once")
        began = time.monotonic()
        profile = await recovery.attempts("measuring", lambda: measure(executor, engines, trajectories, hardware, key))
        handover.price_by(profile)
        if not handover.may_pay(executor.longest_context) and any(
            handover.place(entry.handle) is not None for entry in executor.processes.fleet.instances()
        ):
            # Whether KV is handed over stays decided: engines that start from here on cannot do it, whatever they cost.
            measured = profile
            profile = await recovery.attempts(
                "measuring engines that hand no KV over",
                lambda: measure_plain(executor, engines, trajectories, measured),
            )
        if len(executor.pool.healthy()) == self._config.cluster.slots:  # else it is of a smaller machine
            keep_profile(key, profile)
        self._phase.line(f"measured in {time.monotonic() - began:.1f} s: {profile_words(profile)}")
        return profile

    def _summary(
        self,
        evaluations: tuple[Evaluation, ...],
        training: TrainingLoop,
        gap: float,
        memory: MemoryWatch,
    ) -> RunSummary:
        return RunSummary(
            name=self._config.name,
            seed=self._config.seed,
            finished=True,
            # Of all sessions, as everything else that a resumed run sums up.
            wall_seconds=self._seconds_before + time.monotonic() - self._began,
            steps=training.step,
            evaluations=evaluations,
            prediction_error=prediction_error(read_records(PeriodRecord, self._directory / "periods.jsonl")),
            lost_workers=tuple(self._recorder.lost_workers),
            peak_memory_bytes=memory.peak_bytes,
            trajectories_started=training.started_trajectories,
            trajectories_trained=training.trained_trajectories,
            trajectories_unfinished=training.started_trajectories - training.trained_trajectories,
            moved_contexts=MovedContexts(**asdict(self._recorder.changes)),
            logprob_gap=gap,
            versions=versions(LIBRARIES),
            allocation_mode=self._config.allocation,
            arithmetic=self._arithmetic.words,
            device_seconds=total(self._recorder.device_seconds().values()),
        )


def _start_allocation(start: StartConfig, engines: Mapping[str, ShapeConfig]) -> Allocation:
    longest = longest_context(engines)
    buckets: list[Bucket] = []
    for index, bucket in enumerate(start.buckets):
        above = buckets[-1].up_to if buckets else 0
        up_to = longest if index == len(start.buckets) - 1 else bucket.up_to
        buckets.append(Bucket(bucket.shape, bucket.engines, above, up_to))
    return Allocation(start.replicas, tuple(buckets))


def _words(evaluation: Evaluation) -> str:
    return (
        f"{evaluation.name}: accuracy {evaluation.sampled_accuracy:.3f} sampled, {evaluation.greedy_accuracy:.3f}"
        f" greedy on {evaluation.questions} held-out questions, {evaluation.turns_mean:.2f} turns"
    )
