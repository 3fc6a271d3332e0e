"""The steps of a post-training run: asynchronous GRPO on workers that Libra divides between rollout and training.

Invariant: weights are published before the next batch is taken. An interrupted run continues from its checkpoint: it
replays the later steps from their batches, and continues the groups in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from libra.backends.protocols import StepResult, Trainer
from libra.config.run import TrainingConfig
from libra.exec.journal import CheckpointWritten, Journal
from libra.loop.checkpoint import Recorded, RunState, save_checkpoint
from libra.loop.episode import EpisodeMaker
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.fleet import ServingFleet
from libra.loop.groups import Groups, StepBatch, episode_id, make_batch
from libra.loop.observations import EngineWork, Observations
from libra.loop.process_controller import RunExecutor
from libra.loop.progress import RunProgress
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.records.device_time import Phase, Seconds
from libra.records.schema import Evaluation, StepRecord


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Moments of a step, in seconds of reinforcement learning."""

    last_end: float  # end of the previous step
    trained: float  # the batch was complete, and training began
    stepped: float  # the optimiser had stepped
    ended: float  # all engines had the new weights


@dataclass(eq=False, kw_only=True)
class TrainingLoop:
    """The reinforcement-learning loop between the first and the last evaluation."""

    training: TrainingConfig
    checkpoint_every: int  # steps
    executor: RunExecutor
    trainers: Trainer
    fleet: ServingFleet
    rollout: EpisodeMaker
    groups: Groups
    observations: Observations
    controller: ReplanController
    recorder: Recorder
    journal: Journal
    episodes: EpisodeFile
    progress: RunProgress
    started: Evaluation
    history: History  # of the interrupted run; empty for a new run
    recorded: Recorded  # extent of the interrupted run's records

    def __post_init__(self) -> None:
        self.step = self.history.step  # optimiser steps made
        self._generated = 0
        self._checkpoint_seconds = 0.0  # since the last step
        self._held_seconds = 0.0  # for which the last checkpoint waited for the boundary, since the last step
        self.controller.changed = self.groups.progress.set

    async def run(self) -> None:
        """Make the remaining steps. Raises the error of a failed episode or decision."""
        try:
            self._take_up_knowledge()
            self._generated = self.rollout.generated_tokens
            self._gained()  # excludes earlier work from the first step
            await self._replay_steps()
            self.controller.begin(self.step)
            self.recorder.phase(Phase.WAITING)
            self.groups.take_up()
            ended = self._begin_steps()
            while self.step < self.training.steps:
                ended = await self._one_step(ended)
                await self._between_steps()
            self.recorder.phase(Phase.OUTSIDE)
            await self.controller.finish()
        finally:
            await self.controller.cancel()
            await self.groups.cancel()
            self.controller.close()

    # --- state of an interrupted run ---------------------------------------------------------------------------------

    def _take_up_knowledge(self) -> None:
        """Learn from episodes that finished after the checkpoint, and forget unfinished ones, which begin again."""
        self.observations.observe(self.history.finished, self.fleet.limits)
        for episode in self.history.finished:
            self.fleet.policy.finished(episode.trajectory)
        for group in self.history.groups:
            for index in range(self.training.samples_per_prompt):
                if index not in group.episodes:
                    self.fleet.policy.forget(episode_id(group.number, index))

    async def _replay_steps(self) -> None:
        """Make the steps after the checkpoint again. Records only the last step, and only if its record is missing."""
        if not self.history.batches:
            return
        self.recorder.phase(Phase.AGAIN)
        began = ended = self._begin_steps()
        for taken in self.history.batches:
            batch = make_batch(list(group.episodes.values()) for group in taken.groups)
            ended = await self._train_on(batch, ended)
        self.recorder.event(
            "resumed",
            None,
            f"replayed steps {self.history.step + 1} to {self.step}, from their own trajectories",
            ended - began,
        )
        await self._checkpoint()  # so that a second interruption replays none of these steps

    def _begin_steps(self) -> float:
        """Exclude the time until now from all steps; returns the time at which the first step begins."""
        began = self.recorder.now()
        self.recorder.take_device_seconds(began)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return began

    # --- steps -------------------------------------------------------------------------------------------------------

    async def _one_step(self, last_end: float) -> float:
        """Wait for a batch and train on it; returns the time at which the step ended."""
        self.groups.feed()
        while not self.groups.ready:
            self.groups.progress.clear()
            self._require_sound()  # an error from before the wait does not set `progress` again
            if self.controller.urgent:
                self.controller.at_boundary()
            await self.groups.progress.wait()
        self._require_sound()
        groups = self.groups.take(self.step + 1)
        on_disk = asyncio.create_task(self.episodes.sync())
        try:
            ended = await self._train_on(make_batch(groups), last_end)
        finally:
            await on_disk
        self.controller.stepped(self.step, ended - last_end)
        return ended

    async def _train_on(self, batch: StepBatch, last_end: float) -> float:
        """Make one step from a batch, and publish the weights; returns the time at which the step ended."""
        replayed = self.step < self.history.version
        if not replayed:
            self.recorder.phase(Phase.STEPPING)
        trained_at = self.recorder.now()
        result = await self.trainers.step(self.step + 1, batch.samples, len(batch.episodes), batch.generated_tokens)
        stepped_at = self.recorder.now()
        self.recorder.stepped(result)
        loads = await self.executor.processes.publish(result.version, result.buffer, result.checksum)
        self.step += 1
        if self.step > self.history.version:
            self.groups.publish(result.version)
        self.observations.observe_training(result, len(batch.episodes))
        self.observations.observe_engines(self._gained())
        if not replayed:
            self.recorder.phase(Phase.WAITING)
        ended = self.recorder.now()
        spent = self.recorder.take_device_seconds(ended)
        if self.step > self.recorded.step:
            times = _StepTimes(last_end, trained_at, stepped_at, ended)
            self._record(batch, result, times, loads, spent)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return ended

    def _gained(self) -> EngineWork:
        """The engines' work since the last call."""
        instances = self.fleet.instances()
        self.observations.loans.observe(instances)
        return self.observations.counters.gained(instances)

    async def _between_steps(self) -> None:
        self._require_sound()
        if self.step % self.checkpoint_every == 0:
            await self._checkpoint()
        self.controller.at_boundary()

    def _require_sound(self) -> None:
        self.groups.require_sound()
        self.trainers.require_core()
        self.controller.require_sound()

    async def _checkpoint(self) -> None:
        boundary, due = self.trainers.boundary, self.recorder.now()
        held = boundary.locked()
        if held:
            self.recorder.phase(Phase.HELD)
        async with boundary:
            self._require_sound()
            began = self.recorder.now()
            self.recorder.phase(Phase.CHECKPOINTING)
            state = RunState(
                step=self.step,
                seconds=self.recorder.now(),
                tracker=self.observations.tracker.snapshot(),
                policy=self.fleet.policy.snapshot(),
                started=self.started,
            )
            self.episodes.begin_segment(self.step)  # no episode finishes between taking the state and this line
            await self.episodes.sync()
            path = await save_checkpoint(self.recorder.directory, self.trainers, state)
        self.journal.commit(CheckpointWritten(self.step))
        self.episodes.forget_older()
        self.recorder.phase(Phase.WAITING)
        self._held_seconds = began - due if held else 0.0
        self._checkpoint_seconds = self.recorder.now() - began
        self.recorder.event("checkpoint", None, f"wrote {path.name}", self._checkpoint_seconds)

    def _record(
        self, batch: StepBatch, result: StepResult, times: _StepTimes, loads: Sequence[float], spent: Seconds
    ) -> None:
        tokens, allocation = self.rollout.generated_tokens, self.executor.allocation()
        stale = batch.staleness(result.version)
        contexts = sorted(episode.trajectory.final_context for episode in batch.episodes)
        record = StepRecord(
            step=result.version,
            time=times.ended,
            version=result.version,
            step_seconds=times.ended - times.last_end,
            generate_seconds=self.observations.counters.busiest_seconds,
            train_seconds=result.wall_seconds - result.exchange_seconds - result.publish_seconds,
            exchange_seconds=result.exchange_seconds,
            publish_seconds=result.publish_seconds + (times.ended - times.stepped),
            load_seconds=fmean(loads) if loads else 0.0,
            wait_seconds=times.trained - times.last_end - self._checkpoint_seconds - self._held_seconds,
            checkpoint_seconds=self._checkpoint_seconds,
            held_seconds=result.held_seconds + self._held_seconds,
            redone_seconds=result.redone_seconds,
            reward_mean=fmean(episode.reward for episode in batch.episodes),
            groups=batch.groups,
            groups_without_signal=batch.without_signal,
            trajectories=len(batch.episodes),
            generated_tokens=max(0, tokens - self._generated),
            trained_tokens=result.forward_tokens,
            staleness_mean=fmean(stale),
            staleness_max=max(stale),
            staleness=tuple(stale.count(versions) for versions in range(max(stale) + 1)),
            behaviour_weight_mean=result.behaviour_weight_mean,
            prox_gap_mean=result.prox_gap_mean,
            clip_share=result.clip_share,
            grad_norm=result.gradient_norm,
            context_p50=_quantile(contexts, 0.5),
            context_p90=_quantile(contexts, 0.9),
            context_p99=_quantile(contexts, 0.99),
            turns_mean=fmean(len(episode.trajectory.turns) for episode in batch.episodes),
            predicted_seconds=self.controller.periods.predicted_seconds,
            allocation=allocation.describe() if allocation is not None else "",
            roles=dict(self.recorder.roles),
            device_seconds=spent,
            loans=self.observations.loans.last,
        )
        self._generated = tokens
        self.recorder.step(record)
        self.progress.step(record, self.controller.last_decision, self.recorder.messages)


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Quantile `q` by nearest rank."""
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
