"""One session of a run, from the first worker to the summary."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from libra.backends.chat_format import ChatFormat
from libra.backends.launch.launcher import WorkerLauncher
from libra.backends.machine import LIBRARIES, Choice, versions
from libra.backends.tiny_model import TokenizerCodec
from libra.config.run import LENT, RunConfig
from libra.cost.device import DeviceProfile
from libra.environments.protocol import Environment, Prompt
from libra.environments.served import ServedEnvironment
from libra.exec.journal import Journal, RunEnded
from libra.loop.checkpoint import Interrupted, Recorded, missing_trajectories
from libra.loop.episode import EpisodeMaker
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.episode_server import EpisodeServer
from libra.loop.fleet import ServingFleet
from libra.loop.groups import Groups
from libra.loop.measure import try_loans
from libra.loop.metrics import MetricsEndpoint
from libra.loop.observations import Observations
from libra.loop.progress import RunProgress
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.loop.rollout import Rollout, evaluate, logprob_gap
from libra.loop.served_rollout import ServedRollout
from libra.loop.session_workers import SessionWorkers
from libra.loop.tracking import Tracking
from libra.loop.training_loop import TrainingLoop
from libra.loop.turn_maker import TurnMaker
from libra.records.causes import device_words, total
from libra.records.run_log import prediction_error
from libra.records.schema import Evaluation, MovedContexts, PeriodRecord, RunSummary, read_records
from libra.serve.span_endpoint import span_endpoint

if TYPE_CHECKING:
    from libra.loop.run_spans import RunSpans


@dataclass(frozen=True, slots=True)
class _Records:
    """The files of records, and the history of an interrupted run."""

    history: History
    recorded: Recorded
    journal: Journal
    episodes: EpisodeFile
    recorder: Recorder


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """The maker of episodes, the held-out prompts, and the observations of episodes."""

    rollout: EpisodeMaker
    heldout: Sequence[Prompt]
    observations: Observations


@dataclass(eq=False)
class Session:
    """One session of a run, in `config.run_directory`."""

    config: RunConfig
    environment: Environment | ServedEnvironment
    server: EpisodeServer | None  # of an environment that plays its episodes itself
    progress: RunProgress
    launcher: WorkerLauncher
    metrics: MetricsEndpoint
    peak_memory: Callable[[], Awaitable[int]]  # bytes of all processes
    arithmetic: Choice
    model: Path
    began: float  # start of the session, on the monotonic clock
    before: Interrupted | None  # state of the interrupted run to resume; None: a new run
    planned: str = ""  # description of the plan that the run carries out; empty: no plan was given
    files: ExitStack = field(default_factory=ExitStack)  # to be closed once all tasks of the session have ended

    async def run(self) -> RunSummary:
        """Run the session; write and return the summary."""
        records = self._open_records()
        workers = SessionWorkers(
            config=self.config,
            launcher=self.launcher,
            model=self.model,
            arithmetic=self.arithmetic,
            before=self.before,
            recorder=records.recorder,
            journal=records.journal,
            progress=self.progress,
        )
        if self.planned:
            records.recorder.event("plan", None, self.planned)
        try:
            return await self._run(records, workers)
        finally:
            if workers.borrowing is not None:
                await workers.borrowing.close()

    async def _run(self, records: _Records, workers: SessionWorkers) -> RunSummary:
        config, training = self.config, self.config.training
        profile = await workers.start()
        executor, recovery, recorder = workers.executor, workers.recovery, records.recorder
        parts = self._make_rollouts(records, workers, profile)
        rollout, heldout, trainers = parts.rollout, parts.heldout, executor.processes.trainers
        started = await self._evaluate_start(parts, workers)
        self.progress.line(_words(started))
        first, temperature = executor.processes.settings.version, training.temperature
        gaps = [await recovery.during(logprob_gap(rollout, trainers, heldout, "check-start", first, temperature))]
        recorder.begin()
        loop = self._make_loop(records, workers, parts, started)
        await loop.run()
        self.progress.phase(f"evaluating on {len(heldout)} held-out questions", loop.step)
        ended, _ = await recovery.during(evaluate(rollout, heldout, "end", loop.step, temperature))
        self.progress.line(_words(ended))
        checking = logprob_gap(rollout, trainers, heldout, "check-end", loop.step, temperature)
        gaps.append(await recovery.during(checking))
        await executor.processes.save_final(config.run_directory / "model")
        started_trajectories = loop.groups.started * training.samples_per_prompt
        summary = await self._summary(recorder, loop.step, started_trajectories, (started, ended), max(gaps))
        loans = [entry.handle.loan for entry in executor.processes.fleet.instances()]
        borrowing = workers.borrowing
        if borrowing is not None and (lending := await borrowing.end(loans, recorder.recalls)) is not None:
            summary = replace(summary, lending=lending)
            self.progress.line(lending.words)
        recorder.summary(summary)
        records.journal.commit(RunEnded(loop.step))
        await executor.stop()
        self.progress.phase("finished", loop.step)
        if words := device_words(recorder.tally.device_seconds):
            self.progress.line(f"{words} (while steps were made)")
        return summary

    def _open_records(self) -> _Records:
        """Open the files of the run directory, and add the trajectories that an interrupted run did not record."""
        directory, before = self.config.run_directory, self.before
        history = before.history if before is not None else History(0)
        recorded = before.recorded if before is not None else Recorded()
        journal = self.files.enter_context(closing(Journal(directory / "journal.jsonl")))
        episodes = self.files.enter_context(closing(EpisodeFile(directory, history.step, history.groups)))
        seconds_before = before.seconds if before is not None else 0.0
        tracking = Tracking.of_run(self.config, self.progress.line)
        recorder = self.files.enter_context(closing(Recorder(directory, seconds_before, tracking, self._spans())))
        self.metrics.recorder = recorder
        for episode in missing_trajectories(directory, history.finished):
            recorder.episode(episode)
        for damage in recorded.damaged:
            recorder.event("warning", None, damage)
        return _Records(history, recorded, journal, episodes, recorder)

    def _spans(self) -> RunSpans | None:
        """The exporter of episode spans, until `files` is closed; None without a collector."""
        collector = span_endpoint(self.config.otel, os.environ, "otel")
        if collector is None:
            return None
        from libra.loop.run_spans import RunSpans  # both imports need libraries of an extra
        from libra.serve.span_export import exporting

        return RunSpans(self.files.enter_context(exporting(collector, "libra-run")))

    def _make_rollouts(self, records: _Records, workers: SessionWorkers, profile: DeviceProfile) -> _Rollouts:
        """Build the maker of episodes. Counts the engines' earlier work first, so that it is in no observation."""
        config, environment, executor, recorder = self.config, self.environment, workers.executor, records.recorder
        fleet = executor.processes.fleet
        lent = None if config.lending is None else config.lending.engine
        observations = Observations(
            config.planner, config.training, config.engines, profile, environment.turn_tokens, lent
        )
        rollout = self._maker(fleet, executor.longest_context, recorder)
        heldout = environment.prompts("heldout", config.environment.heldout_prompts, config.seed)
        observations.counters.gained(fleet.instances())
        return _Rollouts(rollout, heldout, observations)

    def _maker(self, fleet: ServingFleet, longest_context: int, recorder: Recorder) -> EpisodeMaker:
        environment = self.environment
        if isinstance(environment, ServedEnvironment):
            assert self.server is not None
            chat = ChatFormat(self.model)
            turns = TurnMaker(environment.name, chat.stop_token, fleet, recorder)
            return ServedRollout(environment, chat, self.server, turns, longest_context, recorder.now)
        tools, codec = self.config.environment.tools, TokenizerCodec(self.model)
        return Rollout(environment, tools, codec, fleet, longest_context, recorder, recorder.now)

    async def _evaluate_start(self, parts: _Rollouts, workers: SessionWorkers) -> Evaluation:
        """Evaluate before the first step; a resumed run already has this evaluation."""
        observations, before = parts.observations, self.before
        if before is not None:
            observations.restore_tracker(before.state.tracker)
            return before.state.started
        self.progress.phase(f"evaluating on {len(parts.heldout)} held-out questions")
        evaluating = evaluate(parts.rollout, parts.heldout, "start", 0, self.config.training.temperature)
        fleet, lending = workers.executor.processes.fleet, self.config.lending
        observations.loans.observe(fleet.instances())
        trying = None if lending is None else asyncio.create_task(try_loans(fleet, lending.engine))
        try:
            started, episodes = await workers.recovery.during(evaluating)
        finally:
            if trying is not None:
                trying.cancel()
                await asyncio.gather(trying, return_exceptions=True)
        # Lent engines take no turns of an evaluation, so its placements say nothing about the router.
        borrows = any(bucket.shape == LENT for bucket in workers.allocation.buckets)
        observations.observe(episodes, () if borrows else [bucket.up_to for bucket in workers.allocation.buckets])
        observations.observe_engines(observations.counters.gained(fleet.instances()))
        observations.loans.observe(fleet.instances())
        return started

    def _make_loop(
        self, records: _Records, workers: SessionWorkers, parts: _Rollouts, started: Evaluation
    ) -> TrainingLoop:
        """The training loop and its controller. Call it after the workers have started."""
        config, training, observations = self.config, self.config.training, parts.observations
        executor, fleet = workers.executor, workers.executor.processes.fleet
        controller = ReplanController(
            executor,
            observations,
            records.recorder,
            self.progress.line,
            workers.allocation,
            steps=training.steps,
            period=config.planner.period,
            seed=config.seed,
            adaptive=config.allocation == "adaptive",
            first_period=records.recorded.periods,
        )
        workers.observer.planners.append(controller.worker_lost)
        groups = Groups(
            training,
            config.seed,
            self.environment.prompts("train", config.environment.train_prompts, config.seed),
            parts.rollout,
            records.recorder,
            records.episodes,
            records.history,
            lambda episode: observations.observe(episode.contexts, fleet.limits),
            lambda: controller.periods.predicted_seconds,
        )
        return TrainingLoop(
            training=training,
            checkpoint_every=config.checkpoint_every,
            executor=executor,
            trainers=executor.processes.trainers,
            fleet=fleet,
            rollout=parts.rollout,
            groups=groups,
            observations=observations,
            controller=controller,
            recorder=records.recorder,
            journal=records.journal,
            episodes=records.episodes,
            progress=self.progress,
            started=started,
            history=records.history,
            recorded=records.recorded,
        )

    async def _summary(
        self, recorder: Recorder, steps: int, started: int, evaluations: tuple[Evaluation, ...], gap: float
    ) -> RunSummary:
        """The summary of all sessions; memory and device time are of this session. `started` counts trajectories."""
        config, directory = self.config, self.config.run_directory
        trained = steps * config.training.trajectories
        seconds_before = self.before.seconds if self.before is not None else 0.0
        return RunSummary(
            name=config.name,
            seed=config.seed,
            finished=True,
            wall_seconds=seconds_before + time.monotonic() - self.began,
            steps=steps,
            evaluations=evaluations,
            prediction_error=prediction_error(read_records(PeriodRecord, directory / "periods.jsonl")),
            lost_workers=tuple(recorder.lost_workers),
            peak_memory_bytes=await self.peak_memory(),
            trajectories_started=started,
            trajectories_trained=trained,
            trajectories_unfinished=started - trained,
            moved_contexts=MovedContexts(**asdict(recorder.changes)),
            logprob_gap=gap,
            versions=versions(LIBRARIES),
            allocation_mode=config.allocation,
            arithmetic=self.arithmetic.words,
            device_seconds=total(recorder.device_seconds().values()),
        )


def _words(evaluation: Evaluation) -> str:
    return (
        f"{evaluation.name}: accuracy {evaluation.sampled_accuracy:.3f} sampled, {evaluation.greedy_accuracy:.3f}"
        f" greedy on {evaluation.questions} held-out questions, {evaluation.turns_mean:.2f} turns"
    )
