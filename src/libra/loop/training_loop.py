"""The steps of a post-training run: asynchronous GRPO on workers that Libra divides between generating and training.

Invariant: weights are published before the next batch is taken. A run that was interrupted goes on from its checkpoint:
it replays the steps after it, from the batches that they were made of, and takes up the groups that were under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from libra.backends.grpo.joint_step import StepResult
from libra.config.run import RunConfig
from libra.environments.protocol import Prompt
from libra.exec.journal import CheckpointWritten, Journal
from libra.loop.batch import StepBatch, StepTimes, make_batch, step_record
from libra.loop.checkpoint import RunState, save_checkpoint
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.groups import Groups, episode_id
from libra.loop.interrupted import Recorded
from libra.loop.observations import EngineWork, Observations
from libra.loop.process_controller import RunExecutor
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.loop.rollout import Episode, Rollout
from libra.loop.tally import EngineCounters
from libra.records.device_time import Phase, Seconds
from libra.records.schema import Evaluation, StepRecord
from libra.report.live import Display, RunView

_RECENT_STEPS = 10  # over which the shown reward is averaged


class TrainingLoop:
    """The reinforcement-learning loop between the first and the last evaluation. `history` and `recorded` are what an
    interrupted run left."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        executor: RunExecutor,
        rollout: Rollout,
        observations: Observations,
        controller: ReplanController,
        recorder: Recorder,
        journal: Journal,
        episodes: EpisodeFile,
        counters: EngineCounters,
        display: Display,
        started: Evaluation,
        history: History,
        recorded: Recorded,
    ) -> None:
        self._config = config
        self._executor, self._rollout, self._observations, self._controller = (
            executor,
            rollout,
            observations,
            controller,
        )
        self._recorder, self._journal, self._episodes = recorder, journal, episodes
        self._display, self._started, self._history, self._recorded = display, started, history, recorded
        self._step = history.step
        self._groups = Groups(
            config.training,
            config.seed,
            prompts,
            rollout,
            recorder,
            episodes,
            history,
            lambda episode: self._observe([episode]),
            lambda: controller.periods.predicted_seconds,
        )
        self._generated = 0
        self._engine_counters = counters
        self._rewards: list[float] = []
        self._checkpoint_seconds = 0.0  # since the last step, as is the next
        self._held_seconds = 0.0  # for which a checkpoint had to wait
        controller.changed = self._groups.progress.set

    @property
    def step(self) -> int:
        """Optimiser steps made."""
        return self._step

    @property
    def started_trajectories(self) -> int:
        """Of all sessions of the run, as the next."""
        return self._groups.started * self._config.training.samples_per_prompt

    @property
    def trained_trajectories(self) -> int:
        return self._step * self._config.training.trajectories

    async def run(self) -> None:
        """Make the remaining steps. Raises whatever an episode or a decision raised."""
        try:
            self._take_up_knowledge()
            self._generated = self._rollout.generated_tokens
            self._gained()  # what came before is not of the first step
            await self._replay_steps()
            self._controller.begin(self._step)
            self._recorder.phase(Phase.WAITING)
            self._groups.take_up()
            ended = self._begin_steps()
            while self._step < self._config.training.steps:
                ended = await self._one_step(ended)
                await self._between_steps()
            self._recorder.phase(Phase.OUTSIDE)
            await self._controller.finish()
        finally:
            await self._controller.cancel()
            await self._groups.cancel()
            self._controller.close()

    # --- what an interrupted run left --------------------------------------------------------------------------------

    def _take_up_knowledge(self) -> None:
        """Learn from the episodes that finished after the checkpoint; begin those that did not finish from nothing."""
        policy = self._executor.processes.fleet.policy
        self._observe(self._history.finished)
        for episode in self._history.finished:
            policy.finished(episode.trajectory)
        for group in self._history.groups:
            for index in range(self._config.training.samples_per_prompt):
                if index not in group.episodes:
                    policy.forget(episode_id(group.number, index))

    async def _replay_steps(self) -> None:
        """The steps after the checkpoint. Only a step whose record is missing, the last one, is recorded."""
        if not self._history.batches:
            return
        self._recorder.phase(Phase.AGAIN)
        began = ended = self._begin_steps()
        for taken in self._history.batches:
            batch = make_batch(list(group.episodes.values()) for group in taken.groups)
            ended = await self._train_on(batch, ended)
        self._recorder.event(
            "resumed",
            None,
            f"replayed steps {self._history.step + 1} to {self._step}, from their own trajectories",
            ended - began,
        )
        await self._checkpoint()  # so that nothing is replayed twice

    def _begin_steps(self) -> float:
        """What was before is of no step; returns when the first one begins."""
        began = self._recorder.now()
        self._recorder.take_device_seconds(began)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return began

    # --- steps -------------------------------------------------------------------------------------------------------

    async def _one_step(self, last_end: float) -> float:
        """Wait for a batch and train on it; returns when the step ended."""
        self._groups.feed()
        while not self._groups.ready:
            self._groups.progress.clear()
            self._require_sound()  # of what happened before the wait, too: it wakes nobody any more
            if self._controller.urgent:
                self._controller.at_boundary()
            await self._groups.progress.wait()
        self._require_sound()
        groups = self._groups.take(self._step + 1)
        on_disk = asyncio.create_task(self._episodes.sync())
        try:
            ended = await self._train_on(make_batch(groups), last_end)
        finally:
            await on_disk
        self._controller.stepped(self._step, ended - last_end)
        return ended

    async def _train_on(self, batch: StepBatch, last_end: float) -> float:
        """Make one step of a batch, and publish the weights; returns when the step ended."""
        replayed = self._step < self._history.version
        if not replayed:
            self._recorder.phase(Phase.STEPPING)
        trained_at = self._recorder.now()
        result = await self._executor.processes.trainers.step(
            self._step + 1, batch.samples, len(batch.episodes), batch.generated_tokens
        )
        stepped_at = self._recorder.now()
        self._recorder.stepped(result)
        loads = await self._executor.processes.publish(result.version, result.buffer, result.checksum)
        self._step += 1
        if self._step > self._history.version:
            self._groups.publish(result.version)
        self._observations.observe_training(result, len(batch.episodes))
        self._observations.observe_engines(self._gained())
        if not replayed:
            self._recorder.phase(Phase.WAITING)
        ended = self._recorder.now()
        spent = self._recorder.take_device_seconds(ended)
        if self._step > self._recorded.step:
            times = StepTimes(last_end, trained_at, stepped_at, ended, self._checkpoint_seconds, self._held_seconds)
            self._record(batch, result, times, loads, spent)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return ended

    def _gained(self) -> EngineWork:
        """The engines' work since the last call."""
        return self._engine_counters.gained(self._executor.processes.fleet.instances())

    async def _between_steps(self) -> None:
        self._require_sound()
        if self._step % self._config.checkpoint_every == 0:
            await self._checkpoint()
        self._controller.at_boundary()

    def _observe(self, episodes: Sequence[Episode]) -> None:
        limits = [bucket.up_to for bucket in self._executor.processes.fleet.allocation.buckets]
        self._observations.observe(episodes, limits)

    def _require_sound(self) -> None:
        self._groups.require_sound()
        self._executor.processes.trainers.require_core()
        self._controller.require_sound()

    async def _checkpoint(self) -> None:
        boundary, due = self._executor.processes.trainers.boundary, self._recorder.now()
        held = boundary.locked()
        if held:
            self._recorder.phase(Phase.HELD)
        async with boundary:
            self._require_sound()
            began = self._recorder.now()
            self._recorder.phase(Phase.CHECKPOINTING)
            state = RunState(
                step=self._step,
                seconds=self._recorder.now(),
                tracker=self._observations.tracker.snapshot(),
                policy=self._executor.processes.fleet.policy.snapshot(),
                started=self._started,
            )
            self._episodes.begin_segment(self._step)  # no episode finishes between the state and this
            await self._episodes.sync()
            path = await save_checkpoint(self._recorder.directory, self._executor.processes.trainers, state)
        self._journal.commit(CheckpointWritten(self._step))
        self._episodes.forget_older()
        self._recorder.phase(Phase.WAITING)
        self._held_seconds = began - due if held else 0.0
        self._checkpoint_seconds = self._recorder.now() - began
        self._recorder.event("checkpoint", None, f"wrote {path.name}", self._checkpoint_seconds)

    def _record(
        self, batch: StepBatch, result: StepResult, times: StepTimes, loads: Sequence[float], spent: Seconds
    ) -> None:
        tokens, allocation = self._rollout.generated_tokens, self._executor.allocation()
        record = step_record(
            batch,
            result,
            times,
            loads,
            generate_seconds=self._engine_counters.busiest_seconds,
            generated_tokens=max(0, tokens - self._generated),
            predicted_seconds=self._controller.periods.predicted_seconds,
            allocation=allocation.describe() if allocation is not None else "",
            roles=self._recorder.roles,
            device_seconds=spent,
        )
        self._generated = tokens
        self._recorder.step(record)
        self._rewards.append(record.reward_mean)
        self._display.show(self._view(record))

    def _view(self, record: StepRecord) -> RunView:
        return RunView(
            name=self._config.name,
            step=record.step,
            steps=self._config.training.steps,
            reward=fmean(self._rewards[-_RECENT_STEPS:]),
            reward_steps=min(_RECENT_STEPS, len(self._rewards)),
            tokens_per_second=record.generated_tokens / record.step_seconds,
            staleness_mean=record.staleness_mean,
            staleness_max=record.staleness_max,
            workers=tuple((worker, role, "") for worker, role in record.roles.items()),
            last_decision=self._controller.last_decision,
            phase=f"step {record.step_seconds:.2f} s, training waits {record.wait_seconds:.2f} s",
            messages=tuple(self._recorder.messages),
        )
