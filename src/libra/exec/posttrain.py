"""One post-training run: asynchronous GRPO on workers that Libra divides between generating and training.

Invariant: the trainer waits for complete groups and never drops one; weights are published before the next batch is
taken; a decision is made from what this run has measured, and carried out while both sides go on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from libra.admission import Admission
from libra.config import RunConfig
from libra.environments.protocol import Environment, Prompt
from libra.exec.assignment import describe
from libra.exec.checkpoint import RunState, save_checkpoint
from libra.exec.counters import EngineCounters
from libra.exec.executor import Executor
from libra.exec.grpo import group_advantages
from libra.exec.joint_step import StepResult
from libra.exec.messages import Sample
from libra.exec.periods import Periods
from libra.exec.recorder import Recorder
from libra.exec.replanning import Proposal, Replanner
from libra.exec.rollout import Episode, Rollout
from libra.plan.price import fits, price
from libra.plan.problem import Allocation
from libra.report.live import Display, RunView
from libra.report.records import DecisionRecord, Evaluation, StepRecord

_RECENT_STEPS = 10  # over which the shown reward is averaged


@dataclass(frozen=True, slots=True)
class _Batch:
    """One step's groups, ready for the trainer."""

    episodes: list[Episode]
    samples: list[Sample]  # of groups with signal
    groups: int
    without_signal: int
    generated_tokens: int


class PostTraining:
    """The reinforcement-learning loop between the first and the last evaluation."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        prompts: Sequence[Prompt],
        executor: Executor,
        rollout: Rollout,
        replanner: Replanner,
        recorder: Recorder,
        counters: EngineCounters,
        display: Display,
        started: Evaluation,
        first_step: int,
    ) -> None:
        self._config, self._environment, self._prompts = config, environment, prompts
        self._executor, self._rollout, self._replanner = executor, rollout, replanner
        self._recorder, self._display, self._started = recorder, display, started
        training = config.training
        self._admission: Admission[Episode] = Admission(
            training.prompts_per_step, training.samples_per_prompt, training.max_staleness, first_step
        )
        self._step = first_step
        self._groups_started = first_step * training.prompts_per_step
        self._periods = Periods(recorder)
        self._progress = asyncio.Event()
        self._episodes: set[asyncio.Task[None]] = set()
        self._switch: asyncio.Task[None] | None = None
        self._applying = False
        self._left: Allocation | None = None
        self._lost = False
        self._failure: BaseException | None = None
        self._generated = 0
        self._engine_counters = counters
        self._rewards: list[float] = []
        self._last_decision = ""
        self.started_trajectories = 0
        self.trained_trajectories = 0

    @property
    def step(self) -> int:
        """Optimiser steps made."""
        return self._step

    @property
    def periods(self) -> Periods:
        return self._periods

    def worker_lost(self) -> None:
        """A worker is gone: plan again at the next step boundary."""
        self._lost = True
        self._progress.set()

    async def run(self) -> None:
        """Make the remaining steps. Raises whatever an episode or a decision raised."""
        self._generated = self._rollout.generated_tokens
        try:
            self._engine_counters.gained(self._executor.fleet.instances())  # what came before is not of the first step
            self._begin_period(switching=False)
            ended = self._recorder.now()
            while self._step < self._config.training.steps:
                ended = await self._one_step(ended)
                await self._between_steps()
        finally:
            for task in [*self._episodes, *([self._switch] if self._switch else [])]:
                task.cancel()
            await asyncio.gather(*self._episodes, *([self._switch] if self._switch else []), return_exceptions=True)
            self._periods.end(self._without_change)

    async def _one_step(self, last_end: float) -> float:
        """Wait for a batch, train on it, publish the weights; returns when the step ended."""
        self._feed()
        while not self._admission.ready():
            self._progress.clear()
            await self._progress.wait()
            self._raise_failure()
            if self._lost:
                await self._between_steps()
        batch = self._take()
        trained_at = self._recorder.now()
        result = await self._executor.trainers.step(
            self._step + 1, batch.samples, len(batch.episodes), batch.generated_tokens
        )
        stepped_at = self._recorder.now()
        loads = await self._executor.publish(result.version, result.buffer, result.checksum)
        self._admission.publish(result.version)
        self._feed()
        self._step += 1
        self.trained_trajectories += len(batch.episodes)
        self._replanner.observe_training(result, len(batch.episodes))
        self._replanner.observe_engines(self._engine_counters.gained(self._executor.fleet.instances()))
        ended = self._recorder.now()
        self._record(batch, result, loads, last_end, trained_at, stepped_at, ended)
        self._periods.step(ended - last_end)
        return ended

    def _feed(self) -> None:
        """Start as many groups as staleness admits and the run still needs."""
        training = self._config.training
        # Its batch is the one after those that staleness lets be made meanwhile.
        due = self._recorder.now() + (1 + training.max_staleness) * (self._periods.predicted_seconds or 0.0)
        while self._admission.may_start() and self._groups_started < training.steps * training.prompts_per_step:
            number = self._groups_started
            self._groups_started += 1
            prompt = self._prompt(number)
            group = f"g{number}"
            self._admission.start(group)
            for index in range(training.samples_per_prompt):
                self.started_trajectories += 1
                task = asyncio.create_task(self._run_episode(group, index, prompt, due))
                self._episodes.add(task)
                task.add_done_callback(self._episode_ended)

    def _prompt(self, number: int) -> Prompt:
        """Prompts in a new order each epoch."""
        epoch, index = divmod(number, len(self._prompts))
        order = list(range(len(self._prompts)))
        random.Random(f"epoch:{self._config.seed}:{epoch}").shuffle(order)
        return self._prompts[order[index]]

    async def _run_episode(self, group: str, index: int, prompt: Prompt, due: float) -> None:
        temperature = self._config.training.temperature
        episode = await self._rollout.episode(f"{group}-{index}", prompt, due, temperature)
        self._admission.finish(group, episode)
        self._recorder.episode(episode)
        limits = [bucket.up_to for bucket in self._executor.fleet.allocation.buckets]
        self._replanner.observe([episode], limits)
        if self._admission.ready():
            self._progress.set()

    def _episode_ended(self, task: asyncio.Task[None]) -> None:
        self._episodes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._progress.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._switch is not None and self._switch.done() and not self._switch.cancelled():
            error = self._switch.exception()
            if error is not None:
                raise error

    def _take(self) -> _Batch:
        """The next batch, with the advantage of every sample whose group gives signal."""
        groups = self._admission.take()
        samples: list[Sample] = []
        without_signal = 0
        for _, episodes in groups:
            advantages = group_advantages([episode.reward for episode in episodes])
            if advantages is None:
                without_signal += 1
                continue
            samples += [
                Sample(e.trajectory.id, e.tokens, e.generated, e.logprobs, e.versions, advantage)
                for e, advantage in zip(episodes, advantages, strict=True)
            ]
        episodes = [episode for _, group in groups for episode in group]
        generated = sum(episode.trajectory.generated_tokens for episode in episodes)
        return _Batch(episodes, samples, len(groups), without_signal, generated)

    async def _between_steps(self) -> None:
        """Checkpoints, periods and decisions, all at a step boundary."""
        self._raise_failure()
        if self._step and self._step % self._config.checkpoint_every == 0 and not self._lost:
            await self._checkpoint()
        switched = self._switch is not None and self._switch.done()
        if switched:
            self._switch = None
        if self._lost:
            self._lost = False
            self._periods.mark_switching()
            self._turn_page(decide=True, forced=True)
        elif switched and self._applying:
            self._applying = False
            self._turn_page(decide=False, tried=False)
        elif self._periods_full():
            self._turn_page(decide=self._config.allocation == "adaptive")

    def _periods_full(self) -> bool:
        return self._periods.length >= self._config.planner.period

    def _turn_page(self, decide: bool, forced: bool = False, tried: bool = True) -> None:
        """End the period, ask for a decision, and predict the next period."""
        self._periods.end(self._without_change)
        steps_left = self._config.training.steps - self._step
        if decide and steps_left > 0 and self._switch is None:
            self._switch = asyncio.create_task(self._decide(steps_left, forced))
        self._begin_period(switching=self._applying or forced, tried=tried)

    def _without_change(self) -> float | None:
        """Step seconds of the allocation that was left last, for the work as it is tracked now."""
        if self._left is None:
            return None
        problem = self._replanner.request(self._executor.healthy(), None).problem()
        return price(problem, self._left).step if fits(problem, self._left) is None else None

    def _begin_period(self, switching: bool, tried: bool = True) -> None:
        """Predict the next period. Buckets that were not `tried` yet have no known router."""
        allocation = self._executor.allocation()
        if allocation is None:
            return
        problem = self._replanner.request(self._executor.healthy(), allocation if tried else None).problem()
        if fits(problem, allocation) is None:
            self._periods.begin(self._step + 1, describe(allocation), price(problem, allocation), switching)

    async def _decide(self, steps_left: int, forced: bool) -> None:
        """Plan, decide, and carry the decision out, while the steps go on."""
        current = self._executor.allocation()
        request = self._replanner.request(self._executor.healthy(), current)
        static = self._config.allocation == "static"
        if forced and static and current is not None and fits(request.problem(), current) is None:
            return
        began = time.monotonic()
        proposal = await asyncio.to_thread(self._replanner.propose, request, steps_left)
        self._record_decision(proposal, current, time.monotonic() - began)
        if not proposal.decision.taken:
            return
        self._applying = True
        self._left = current
        self._periods.mark_switching()
        applied = await self._executor.apply(proposal.plan.allocation)
        for change, seconds in applied.seconds:
            self._replanner.observe_move(change.role, seconds)
        self._periods.carried_out(sum(seconds for _, seconds in applied.seconds))
        if applied.failure is not None:
            self._recorder.event("warning", None, applied.failure)
        self._progress.set()

    def _record_decision(self, proposal: Proposal, current: Allocation | None, seconds: float) -> None:
        plan, decision = proposal.plan, proposal.decision
        before = decision.current.step if decision.current is not None else plan.predicted.step
        record = DecisionRecord(
            period=self._periods.number,
            step=self._step,
            time=self._recorder.now(),
            before=describe(current) if current is not None else "nothing that can go on",
            after=describe(plan.allocation),
            before_seconds=before,
            after_seconds=plan.predicted.step,
            gain_per_step=before - plan.predicted.step,
            horizon_steps=int(decision.horizon_steps),
            cost=decision.cost,
            uncertainty=decision.uncertainty * before,
            taken=decision.taken,
            reason=decision.reason,
            solver_status=plan.proof.status,
            solver_gap=plan.proof.gap,
            solver_seconds=seconds,
            moves=tuple(str(move) for move in decision.moves),
            measured_before=self._periods.measured_before,
        )
        self._periods.decided(record)
        verb = "changed" if decision.taken else "kept"
        self._last_decision = f"step {self._step}: {verb}: {decision.reason}"
        self._display.line(f"decision at {self._last_decision}")

    async def _checkpoint(self) -> None:
        async with self._executor.trainers.boundary:
            state = RunState(
                step=self._step,
                seconds=self._recorder.now(),
                tracker=self._replanner.tracker.snapshot(),
                policy=self._executor.fleet.policy.snapshot(),
                started=self._started,
            )
            path = await save_checkpoint(self._recorder.directory, self._executor.trainers.core, state)
        self._recorder.event("checkpoint", None, f"wrote {path.name}")

    def _record(
        self,
        batch: _Batch,
        result: StepResult,
        loads: Sequence[float],
        last_end: float,
        trained_at: float,
        stepped_at: float,
        ended: float,
    ) -> None:
        stale = [result.version - 1 - min(v for v in e.versions if v >= 0) for e in batch.episodes]
        contexts = sorted(episode.trajectory.final_context for episode in batch.episodes)
        tokens = self._rollout.generated_tokens
        allocation = self._executor.allocation()
        busy = self._engine_counters.busiest_seconds
        record = StepRecord(
            step=self._step,
            time=ended,
            version=result.version,
            step_seconds=ended - last_end,
            generate_seconds=busy,
            train_seconds=result.compute_seconds,
            exchange_seconds=result.exchange_seconds,
            publish_seconds=(stepped_at - trained_at - result.compute_seconds - result.exchange_seconds)
            + (ended - stepped_at),
            load_seconds=fmean(loads) if loads else 0.0,
            wait_seconds=trained_at - last_end,
            reward_mean=fmean(episode.reward for episode in batch.episodes),
            groups=batch.groups,
            groups_without_signal=batch.without_signal,
            trajectories=len(batch.episodes),
            generated_tokens=max(0, tokens - self._generated),
            trained_tokens=result.forward_tokens,
            staleness_mean=fmean(stale),
            staleness_max=max(stale),
            behaviour_weight_mean=result.behaviour_weight_mean,
            prox_gap_mean=result.prox_gap_mean,
            clip_share=result.clip_share,
            grad_norm=result.gradient_norm,
            context_p50=_quantile(contexts, 0.5),
            context_p90=_quantile(contexts, 0.9),
            context_p99=_quantile(contexts, 0.99),
            turns_mean=fmean(len(episode.trajectory.turns) for episode in batch.episodes),
            predicted_seconds=self._periods.predicted_seconds,
            allocation=describe(allocation) if allocation is not None else "",
            roles=dict(self._recorder.roles),
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
            elapsed=record.time,
            reward=fmean(self._rewards[-_RECENT_STEPS:]),
            tokens_per_second=record.generated_tokens / record.step_seconds,
            staleness_mean=record.staleness_mean,
            staleness_max=record.staleness_max,
            workers=tuple((worker, role, "") for worker, role in record.roles.items()),
            last_decision=self._last_decision,
            phase=f"step {record.step_seconds:.2f} s, training waits {record.wait_seconds:.2f} s",
            messages=tuple(self._recorder.messages),
        )


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Nearest rank."""
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
