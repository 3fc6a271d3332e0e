"""Simulation of a plan: the rollout of its steps, or a whole run.

Invariant: the simulator gets the same inputs as the planner (engines, memory, times, lengths, tools). So a difference
between simulation and plan comes from effects that the planner's price leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from libra.plan.options.price import BucketPrice, bucket_prices
from libra.plan.options.request import PlanningRequest
from libra.plan.plan import Plan
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.clock import ticks
from libra.sim.deployment import DEFAULT_ROUTE, Deployment, WeightUpdate
from libra.sim.engine.config import COLOCATED, EngineSpec
from libra.sim.outcome.result import SimulationResult
from libra.sim.planned_engines import planned_engines, planned_network
from libra.sim.simulate import Elapsed, simulate_deployment
from libra.sim.training_run.borrowed import BorrowedDevices
from libra.sim.training_run.episodes import Resampled
from libra.sim.training_run.loop import PosttrainingRun
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import System
from libra.sim.workload.replay import Replay, draw
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """The plan's forecast for the rollout of `steps` steps, in seconds."""

    steps: int
    work: float  # time for which the engines of the busiest bucket compute, weight loads included
    longest: float  # the longest trajectory of a step, from its first token to its last

    @property
    def seconds(self) -> float:
        """Seconds of the rollout without waits for training."""
        return max(self.work, self.longest)

    def error(self, simulated: float) -> float:
        """Simulated time over forecast time, minus 1."""
        return simulated / self.seconds - 1


def simulate_plan(
    plan: Plan,
    trajectories: Iterable[Trajectory],
    route: Policy | str = DEFAULT_ROUTE,
    *,
    steps: int = 1,
    concurrency: int | None = None,
    samples_per_prompt: int = 1,
    unknown_tool_seconds: float | None = None,
    learned: Iterable[Trajectory] = (),
    time_limit: float | None = None,
    seed: int = 0,
    exact: bool = False,
    progress: Callable[[Elapsed], None] | None = None,
) -> SimulationResult:
    """Simulate the plan's engines on the trajectories of `steps` steps, drawn from the finished trajectories of a log.

    Before the run, `route` learns from the finished trajectories of `learned`. See `planned_run` and `simulate` for the
    other arguments. Raises ValueError if the plan's engines cannot run, or a trajectory fits no engine.
    """
    deployment, workload = planned_run(
        plan,
        trajectories,
        steps=steps,
        concurrency=concurrency,
        samples_per_prompt=samples_per_prompt,
        unknown_tool_seconds=unknown_tool_seconds,
        seed=seed,
    )
    policy = policy_named(route, seed=seed) if isinstance(route, str) else route
    teach(policy, learned)
    return simulate_deployment(
        deployment, workload, policy, seed=seed, time_limit=time_limit, exact=exact, progress=progress
    )


def planned_run(
    plan: Plan,
    trajectories: Iterable[Trajectory],
    *,
    steps: int = 1,
    concurrency: int | None = None,
    samples_per_prompt: int = 1,
    unknown_tool_seconds: float | None = None,
    seed: int = 0,
) -> tuple[Deployment, Replay]:
    """(the plan's engines, a replay of the trajectories of `steps` steps, drawn from the finished ones of a log).

    Each drawn trajectory is repeated `samples_per_prompt` times. `concurrency` trajectories are in flight; None: the
    most that the plan's staleness allows. All engines pause for new weights at the times at which the plan begins its
    steps. A tool of unrecorded duration takes `unknown_tool_seconds`; None: the plan's assumption.
    """
    wanted: PlanningRequest = plan.request
    if steps < 1:
        raise ValueError(f"steps is {steps}; simulate 1 step or more")
    if steps > 1 and not wanted.staleness:
        raise ValueError(f"steps is {steps}, but the steps of a synchronous plan do not overlap: simulate 1 step")
    total = steps * wanted.trajectories
    if samples_per_prompt < 1 or total % samples_per_prompt:
        raise ValueError(
            f"samples_per_prompt is {samples_per_prompt}, which does not divide {total} trajectories: give a divisor"
        )
    log = [trajectory for trajectory in trajectories if trajectory.finished]
    drawn = draw(log, total // samples_per_prompt, seed, same_prompts=samples_per_prompt == 1)
    engines = planned_engines(plan)
    longest = max(engine.config.max_model_len for engine in engines)
    _require_room(drawn, longest)
    forecast = forecast_of(plan, steps)
    deployment = Deployment(
        engines,
        limits=tuple(bucket.up_to for bucket in plan.allocation.buckets),
        turn_tokens=_turn_tokens(drawn, longest),
        updates=_updates(plan, engines, steps),
        kv_transfer=planned_network(plan.of_cluster) if any(it.role is not COLOCATED for it in engines) else None,
    )
    workload = Replay(
        drawn,
        concurrency=(1 + wanted.staleness) * wanted.trajectories if concurrency is None else concurrency,
        samples_per_prompt=samples_per_prompt,
        unknown_tool_seconds=wanted.unknown_tool_seconds if unknown_tool_seconds is None else unknown_tool_seconds,
        source={
            "name": "steps of a plan",
            "steps": steps,
            "log": len(log),
            "drawn": len(drawn),
            "seed": seed,
            "forecast": {**asdict(forecast), "seconds": forecast.seconds},
        },
    )
    return deployment, workload


def simulate_run(
    plan: Plan,
    trajectories: Iterable[Trajectory],
    steps: int,
    route: Policy | str = DEFAULT_ROUTE,
    *,
    learned: Iterable[Trajectory] = (),
    seed: int = 0,
    exact: bool = False,
    tenancy: BorrowedDevices | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> SimulatedRun:
    """Simulate the first `steps` optimiser steps of a longer run (`run_of`). With a `tenancy` the run has only these
    steps, and serving requests run to their end. Before the run, `route` learns from the finished trajectories of
    `learned`. `tell` is called with the number of each step."""
    policy = policy_named(route, seed=seed) if isinstance(route, str) else route
    teach(policy, learned)
    ahead = 0 if tenancy is not None else 1 + plan.request.staleness  # batches in flight at the end
    run = run_of(plan, trajectories, steps + ahead, policy, seed=seed, exact=exact, tenancy=tenancy)
    for step in range(1, steps + 1):
        run.published(step)
        tell(step)
    if not ahead:
        run.finish()
    return run.outcome()


def run_of(
    plan: Plan,
    trajectories: Iterable[Trajectory],
    steps: int,
    policy: Policy,
    *,
    seed: int = 0,
    exact: bool = False,
    tenancy: BorrowedDevices | None = None,
) -> PosttrainingRun:
    """Make a run of `steps` optimiser steps by the plan, without starting it. Groups are drawn from the log, prompt by
    prompt, with the recipe's number of samples. Engines and trainers wait for each other as the recipe's staleness
    demands.

    `policy` routes, with its present knowledge. `tenancy` describes serving on the devices that the plan borrows;
    without it, a lent engine has the speed of its share of the device. Raises ValueError for a plan that is not for a
    cluster, and for a trajectory that fits no engine of the plan.
    """
    system = System("plan", plan, lambda: policy, tenancy=tenancy)
    recipe = system.request.recipe
    log = [trajectory for trajectory in trajectories if trajectory.finished]
    _require_room(log, max(engine.config.max_model_len for engine in planned_engines(plan)))
    episodes = Resampled(tuple(log), recipe.samples_per_prompt, recipe.max_length, seed)
    return PosttrainingRun(system, episodes, steps, exact=exact)


def forecast_of(plan: Plan, steps: int = 1) -> PlannedRollout:
    prices = _prices(plan)
    return PlannedRollout(
        steps, steps * max(bucket.load for bucket in prices), max(bucket.residence for bucket in prices)
    )


def teach(policy: Policy, finished: Iterable[Trajectory]) -> None:
    """Let a policy learn from the trajectories that are finished."""
    for trajectory in finished:
        if trajectory.finished:
            policy.finished(trajectory)


def _prices(plan: Plan) -> tuple[BucketPrice, ...]:
    return bucket_prices(plan.request.menu().problem, plan.allocation)


def _updates(plan: Plan, engines: Sequence[EngineSpec], steps: int) -> tuple[WeightUpdate, ...]:
    """A plan's weight updates. Engines pause for the stall of their bucket. The first update refreshes nothing, since
    there are no contexts yet."""
    stalls = [ticks(price.option.stall) for price in _prices(plan)]
    members = [
        frozenset(index for index, engine in enumerate(engines) if engine.bucket == bucket)
        for bucket in range(len(stalls))
    ]
    refresh = plan.request.refreshes
    return tuple(
        WeightUpdate(ticks(step * plan.predicted.step), stall, refresh and step > 0, engines=its)
        for step in range(steps)
        for stall, its in zip(stalls, members, strict=True)
        if stall
    )


def _require_room(trajectories: Sequence[Trajectory], longest: int) -> None:
    for trajectory in trajectories:
        if trajectory.peak_context > longest:
            raise ValueError(
                f"trajectory {trajectory.id!r} has a context of {trajectory.peak_context} tokens, more than the"
                f" {longest} of the plan's largest engine: truncate it, or plan again with this log"
            )


def _turn_tokens(trajectories: Sequence[Trajectory], longest: int) -> int:
    """Tokens of the longest turn, limited to the room that the longest context leaves on the largest engine."""
    generated = max((turn.generated_tokens for it in trajectories for turn in it.turns), default=1)
    left = longest - max((context for it in trajectories for context in it.contexts()), default=0)
    return max(1, min(generated, left))
