"""One post-training run: asynchronous GRPO on workers that Libra divides between generating and training.

Invariant: the trainer waits for complete groups and never drops one; weights are published before the next batch is
taken. What finishes, and what a batch takes, is on file before it counts, so a run that was interrupted goes on from
its checkpoint: it replays the steps after it, from the very batches that they were made of, and takes up the groups
that were under way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from statistics import fmean

from libra.backends.grpo.joint_step import StepResult
from libra.config.run import ConfigError, RunConfig
from libra.environments.protocol import Environment, Prompt
from libra.exec.journal import CheckpointWritten, Journal
from libra.loop.batch import StepBatch, make_batch, quantile
from libra.loop.checkpoint import RunState, save_checkpoint
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.interrupted import Recorded
from libra.loop.observations import EngineWork, Observations
from libra.loop.process_controller import RunExecutor
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.loop.rollout import Episode, Rollout
from libra.loop.tally import EngineCounters
from libra.plan.transition import describe
from libra.records.device_time import Phase, Seconds
from libra.records.schema import Evaluation, StepRecord
from libra.report.live import Display, RunView
from libra.route.admission import Admission

_RECENT_STEPS = 10  # over which the shown reward is averaged


class TrainingLoop:
    """The reinforcement-learning loop between the first and the last evaluation. `history` and `recorded` are what an
    interrupted run left."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
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
        self._config, self._environment, self._prompts = config, environment, prompts
        self._executor, self._rollout, self._observations, self._controller = (
            executor,
            rollout,
            observations,
            controller,
        )
        self._recorder, self._journal, self._episodes = recorder, journal, episodes
        self._display, self._started, self._history, self._recorded = display, started, history, recorded
        training = config.training
        self._admission: Admission[Episode] = Admission(
            training.prompts_per_step, training.samples_per_prompt, training.max_staleness, history.version
        )
        self._step = history.step
        self._groups_started = history.version * training.prompts_per_step + len(history.groups)
        self._progress = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._generated = 0
        self._engine_counters = counters
        self._rewards: list[float] = []
        self._checkpoint_seconds = 0.0  # since the last step, as is the next
        self._held_seconds = 0.0  # for which a checkpoint had to wait
        controller.changed = self._progress.set

    @property
    def step(self) -> int:
        """Optimiser steps made."""
        return self._step

    @property
    def started_trajectories(self) -> int:
        """Of all sessions of the run, as the next."""
        return self._groups_started * self._config.training.samples_per_prompt

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
            self._take_up_groups()
            ended = self._begin_steps()
            while self._step < self._config.training.steps:
                ended = await self._one_step(ended)
                await self._between_steps()
            self._recorder.phase(Phase.OUTSIDE)
            await self._controller.finish()
        finally:
            await self._controller.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
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
                    policy.forget(_episode_id(group.number, index))

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
        await self._checkpoint()  # so that nothing is made a third time

    def _take_up_groups(self) -> None:
        """Groups that were under way go on, with the episodes that have finished."""
        for group in self._history.groups:
            try:
                self._admission.resume(_group_name(group.number), group.started_at, group.episodes.values())
            except ValueError as error:
                raise ConfigError(f"training: {error}; resume with the file that the run was started with") from None
            missing = set(range(self._config.training.samples_per_prompt)) - set(group.episodes)
            self._run_episodes(group.number, group.started_at, sorted(missing))

    def _begin_steps(self) -> float:
        """What was before is of no step; returns when the first one begins."""
        began = self._recorder.now()
        self._recorder.take_device_seconds(began)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return began

    # --- steps -------------------------------------------------------------------------------------------------------

    async def _one_step(self, last_end: float) -> float:
        """Wait for a batch and train on it; returns when the step ended."""
        self._feed()
        while not self._admission.ready():
            self._progress.clear()
            self._require_sound()  # of what happened before the wait, too: it wakes nobody any more
            if self._controller.urgent:
                self._controller.at_boundary()
            await self._progress.wait()
        self._require_sound()
        groups = self._admission.take()
        self._episodes.taken(self._step + 1, [_group_number(name) for name, _ in groups])
        on_disk = asyncio.create_task(self._episodes.sync())
        try:
            ended = await self._train_on(make_batch(episodes for _, episodes in groups), last_end)
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
            self._admission.publish(result.version)
            self._feed()
        self._observations.observe_training(result, len(batch.episodes))
        self._observations.observe_engines(self._gained())
        if not replayed:
            self._recorder.phase(Phase.WAITING)
        ended = self._recorder.now()
        spent = self._recorder.take_device_seconds(ended)
        if self._step > self._recorded.step:
            self._record(batch, result, loads, last_end, trained_at, stepped_at, ended, spent)
        self._checkpoint_seconds = self._held_seconds = 0.0
        return ended

    def _gained(self) -> EngineWork:
        """What the engines did since the last call."""
        return self._engine_counters.gained(self._executor.processes.fleet.instances())

    async def _between_steps(self) -> None:
        self._require_sound()
        if self._step % self._config.checkpoint_every == 0:
            await self._checkpoint()
        self._controller.at_boundary()

    def _feed(self) -> None:
        """Start as many groups as staleness admits and the run still needs."""
        training = self._config.training
        while self._admission.may_start() and self._groups_started < training.steps * training.prompts_per_step:
            number = self._groups_started
            self._groups_started += 1
            version = self._admission.published
            self._episodes.started(number, version)
            self._admission.start(_group_name(number))
            self._run_episodes(number, version, range(training.samples_per_prompt))
        self._recorder.hold_back(self._groups_started < training.steps * training.prompts_per_step)

    def _run_episodes(self, group: int, started_at: int, indices: Sequence[int]) -> None:
        self._recorder.tally.started(len(indices))
        prompt, due = self._prompt(group), self._due(started_at)
        for index in indices:
            task = asyncio.create_task(self._run_episode(group, index, prompt, due))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _due(self, started_at: int) -> float:
        """When a group that was started under this version is needed, at the latest: for the batch after those that
        staleness lets be made meanwhile."""
        batches = started_at + 1 + self._config.training.max_staleness - self._admission.published
        return self._recorder.now() + batches * (self._controller.periods.predicted_seconds or 0.0)

    def _prompt(self, number: int) -> Prompt:
        """Prompts in a new order each epoch."""
        epoch, index = divmod(number, len(self._prompts))
        order = list(range(len(self._prompts)))
        random.Random(f"epoch:{self._config.seed}:{epoch}").shuffle(order)
        return self._prompts[order[index]]

    async def _run_episode(self, group: int, index: int, prompt: Prompt, due: float) -> None:
        temperature = self._config.training.temperature
        try:
            episode = await self._rollout.episode(_episode_id(group, index), prompt, due, temperature)
            self._episodes.finished(group, index, episode)
            self._admission.finish(_group_name(group), episode)
            self._recorder.episode(episode)
            self._observe([episode])
        except Exception as error:  # noqa: BLE001 - the end of a task: `run` raises it
            self._failure = error  # at once: no checkpoint may count an episode that is not written down everywhere
            self._progress.set()
            return
        if self._admission.ready():
            self._progress.set()

    def _observe(self, episodes: Sequence[Episode]) -> None:
        limits = [bucket.up_to for bucket in self._executor.processes.fleet.allocation.buckets]
        self._observations.observe(episodes, limits)

    def _require_sound(self) -> None:
        if self._failure is not None:
            raise self._failure
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
        self,
        batch: StepBatch,
        result: StepResult,
        loads: Sequence[float],
        last_end: float,
        trained_at: float,
        stepped_at: float,
        ended: float,
        spent: Seconds,
    ) -> None:
        stale = batch.staleness(result.version)
        contexts = sorted(episode.trajectory.final_context for episode in batch.episodes)
        tokens = self._rollout.generated_tokens
        allocation = self._executor.allocation()
        record = StepRecord(
            step=self._step,
            time=ended,
            version=result.version,
            step_seconds=ended - last_end,
            generate_seconds=self._engine_counters.busiest_seconds,
            train_seconds=result.wall_seconds - result.exchange_seconds - result.publish_seconds,
            exchange_seconds=result.exchange_seconds,
            publish_seconds=result.publish_seconds + (ended - stepped_at),
            load_seconds=fmean(loads) if loads else 0.0,
            wait_seconds=trained_at - last_end - self._checkpoint_seconds - self._held_seconds,
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
            context_p50=quantile(contexts, 0.5),
            context_p90=quantile(contexts, 0.9),
            context_p99=quantile(contexts, 0.99),
            turns_mean=fmean(len(episode.trajectory.turns) for episode in batch.episodes),
            predicted_seconds=self._controller.periods.predicted_seconds,
            allocation=describe(allocation) if allocation is not None else "",
            roles=dict(self._recorder.roles),
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


def _group_name(number: int) -> str:
    return f"g{number}"


def _group_number(name: str) -> int:
    return int(name.removeprefix("g"))


def _episode_id(group: int, index: int) -> str:
    return f"{_group_name(group)}-{index}"
