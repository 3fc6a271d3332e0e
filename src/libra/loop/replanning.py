"""What the planner is asked during a run: tracked work, measured costs, and the decision each period.

Invariant: everything in a request was measured or tracked by this run (or is in its calibration), and every decision
keeps the numbers it was made of, so that the report can hold it against what then happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from libra.backends.grpo.joint_step import StepResult
from libra.config.run import RunConfig
from libra.cost.device import DeviceProfile, scaled
from libra.cost.train import step_seconds
from libra.exec.ratio import Ratio
from libra.exec.workers import Role, Worker
from libra.lengths import LengthTracker
from libra.loop.rollout import Episode
from libra.plan.model.solve import solve
from libra.plan.options.slots import Fleet, SlotRequest
from libra.plan.plan import Plan, answer
from libra.plan.problem import Allocation
from libra.plan.replan import Decision, decide
from libra.plan.request import make_request, make_tracker
from libra.plan.transition import diff, seconds


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Sums over all engines since the last look."""

    busy_seconds: float
    iterations: int
    generated_tokens: int
    prefilled_tokens: int
    turns: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A solved plan and what is to be done with it."""

    plan: Plan
    decision: Decision


class Replanner:
    def __init__(self, config: RunConfig, profile: DeviceProfile, max_turn_tokens: int) -> None:
        self._config = config
        self._max_turn_tokens = max_turn_tokens
        self.profile = profile
        self.tracker = make_tracker(config)
        self._forward_tokens = Ratio()  # tokens through the trainer, per trajectory
        self._router_hits = Ratio()
        self._routed_tokens = self._hit_tokens = 0  # since the last step
        self._engine_speed = Ratio()  # measured over modelled busy seconds
        self._train_speed = Ratio()

    def restore_tracker(self, snapshot: dict[str, Any]) -> None:
        """Go on from a checkpoint's statistics."""
        self.tracker = LengthTracker.restore(snapshot)

    def observe(self, episodes: Sequence[Episode], limits: Sequence[int]) -> None:
        """Finished episodes, and the bucket limits they were routed by."""
        for episode in episodes:
            self.tracker.observe(episode.trajectory)
            peak = episode.trajectory.peak_context
            own = next((index for index, limit in enumerate(limits) if peak <= limit), len(limits) - 1)
            if own > 0:
                for turn, bucket in list(zip(episode.trajectory.turns, episode.turn_buckets, strict=True))[1:]:
                    self._routed_tokens += turn.generated_tokens
                    self._hit_tokens += turn.generated_tokens * (bucket == own)

    def observe_training(self, result: StepResult, trajectories: int) -> None:
        """One step's training: what it asked for, and how long it took against the calibration."""
        self._forward_tokens.observe(result.forward_tokens, trajectories)
        modelled = step_seconds(self.profile.train, result.forward_tokens, result.replicas)
        self._train_speed.observe(result.wall_seconds, modelled)

    def observe_engines(self, work: EngineWork) -> None:
        """What the engines did since the last call, and how long they were busy with it against the calibration; also
        closes the account of where the router sent the episodes since then."""
        self._router_hits.observe(self._hit_tokens, self._routed_tokens)
        self._routed_tokens = self._hit_tokens = 0
        cost = self.profile.engine
        context = work.generated_tokens * self.tracker.mean_decode_context
        modelled = (
            cost.step * work.iterations
            + cost.per_sequence * work.generated_tokens
            + cost.per_context_token * context
            + cost.per_prefill_token * work.prefilled_tokens
            + cost.per_turn * work.turns
        )
        if modelled > 0:
            self._engine_speed.observe(work.busy_seconds, modelled)

    def current_profile(self) -> DeviceProfile:
        """The calibration at the speed that the devices have shown lately: shared machines are not always as fast."""
        return scaled(self.profile, self._engine_speed.value, self._train_speed.value)

    def observe_move(self, role: Role, seconds_taken: float) -> None:
        """The measured cost of a role change replaces the calibrated one."""
        switch = self.profile.switch
        measured = (
            replace(switch, trainer_join=seconds_taken)
            if role is Role.TRAIN
            else replace(switch, engine_start=seconds_taken)
        )
        self.profile = replace(self.profile, switch=measured)

    def request(self, workers: Sequence[Worker], current: Allocation | None) -> SlotRequest:
        tokens = self._forward_tokens.value if self._forward_tokens.below else self.tracker.mean_peak
        return make_request(
            self._config,
            self.tracker,
            self.current_profile(),
            fleet=_fleet(workers),
            max_turn_tokens=self._max_turn_tokens,
            train_tokens=tokens,
            router_hit=self._router_hits.value,
            current=current,
        )

    def propose(self, request: SlotRequest, steps_left: int) -> Proposal:
        """Solve, and weigh the change against its cost. Pure: may run beside the event loop."""
        problem = request.problem()
        solution = solve(problem, seed=self._config.seed)
        plan = answer(request, problem, solution)
        horizon = float(min(self._config.planner.horizon, steps_left))
        uncertainty = self.tracker.work_uncertainty()
        if request.current is None:
            reason = "no worker is left that generates: the healthy ones are divided anew"
            return Proposal(
                plan, Decision(None, plan.predicted, (), None, horizon, 0.0, uncertainty, taken=True, reason=reason)
            )
        cost = seconds(diff(request.current, plan.allocation), request.profile.switch)
        decision = decide(problem, solution, horizon_steps=horizon, uncertainty=uncertainty, cost=cost)
        return Proposal(plan, decision)


def _fleet(workers: Sequence[Worker]) -> Fleet:
    kinds = [worker.allowed for worker in workers if worker.role is not Role.FAILED]
    return Fleet(
        core=sum(kind == {Role.TRAIN} for kind in kinds),
        hybrid=sum(kind == {Role.TRAIN, Role.ROLLOUT} for kind in kinds),
        rollout=sum(kind == {Role.ROLLOUT} for kind in kinds),
    )
