"""The training loop: groups start as staleness admits them, batches train, weights are published, plans change.

Invariant: admission is the executor's own (`libra.admission`), so no token is staler than the recipe allows and nothing
is discarded; trajectories, engines, router and planner are those of `libra.sim` and `libra.plan`. All that is added
here is who waits for whom.

    started -> turns and tools -> finished -> group complete -> batch -> trained -> published -> the next may start

Synchronous training is the case of staleness 0; colocated training has engines and trainers take turns on all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count

from libra.admission import Admission
from libra.cost.collectives import fabric
from libra.cost.transfer import weight_sync
from libra.plan.cluster_request import ClusterRequest
from libra.plan.plan import Plan
from libra.plan.price import training_option
from libra.plan.problem import TrainingOption
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import Cluster, EngineSpec
from libra.sim.engine.chain import Chain
from libra.sim.engine.request import Request
from libra.sim.kv_move import KVMoves
from libra.sim.planned_engines import planned_engines
from libra.sim.posttrain.caller import EpisodeCaller
from libra.sim.posttrain.episodes import Episodes
from libra.sim.posttrain.outcome import PlanChange, PostTraining, StepRecord
from libra.sim.posttrain.system import Moment, System
from libra.sim.posttrain.training import TrainingPrice
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.calls import calls
from libra.trajectory import Trajectory

_RECENT = 0.5  # weight of the latest step in the expected seconds of the next


def simulate_posttraining(
    system: System, episodes: Episodes, steps: int, *, progress: Callable[[StepRecord], None] | None = None
) -> PostTraining:
    """`steps` optimiser steps of a system. The same arguments give the same outcome.

    Exactly the groups that these steps train on are started, so that systems are compared over equal work. Raises
    ValueError where recipe and episodes do not fit together, or a trajectory does not fit any engine.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; simulate 1 step or more")
    recipe = system.request.recipe
    if episodes.samples_per_prompt != recipe.samples_per_prompt:
        raise ValueError(
            f"samples_per_prompt is {recipe.samples_per_prompt} in the recipe and {episodes.samples_per_prompt} in the"
            " episodes: make them equal"
        )
    if episodes.max_context > recipe.max_length:
        raise ValueError(
            f"trajectories grow to {episodes.max_context} tokens, the recipe's max_length is {recipe.max_length}: raise"
            " it, or cut them"
        )
    return _Run(system, episodes, steps, progress).outcome()


class _Run:
    """One simulation of one system: a workload that the cluster asks, and that makes things happen to it."""

    def __init__(
        self, system: System, episodes: Episodes, steps: int, progress: Callable[[StepRecord], None] | None
    ) -> None:
        request = system.request
        self._system, self._episodes, self._steps, self._progress = system, episodes, steps, progress
        self._recipe = request.recipe
        self._plan = system.plan
        self._policy = system.route()
        self._replan = system.replan() if system.replan is not None else None
        self._admission: Admission[Trajectory] = Admission(
            self._recipe.prompts, self._recipe.samples_per_prompt, self._recipe.staleness
        )
        self._numbers = count()
        self._groups = 0  # started
        self._live: dict[str, EpisodeCaller] = {}  # by trajectory: unfinished
        self._requests: dict[str, Request] = {}  # by trajectory: its latest
        self._finished: list[Trajectory] = []  # since the last decision
        self._trained: list[StepRecord] = []
        self._changes: list[PlanChange] = []
        self._busy = False  # the trainer
        self._idle_since = 0
        self._blocked_until = 0  # tick before which no step begins: trainers change their layout
        self._decided_at = (0, 0)  # version and tick of the latest decision
        self._expected = system.plan.predicted.step  # seconds of a step
        self._published_at = 0
        self._trainer_devices = 0  # device seconds of training
        self._interruptions = 0
        self._pending: dict[str, EngineSpec] = {}  # engines that are being started
        nodes = request.cluster.node_class(_pool(self._plan))
        self._price = TrainingPrice(request.model, self._recipe, nodes)
        self._fabric = fabric(nodes)
        self._stall = weight_sync(
            request.model.parameters * self._recipe.rollout_weight_bytes, 1, 1, self._fabric
        ).stall
        self._option = _option(self._plan)
        self._layout = self._plan.layout
        assert self._layout is not None
        kv_bytes = request.model.kv_bytes_per_token(self._recipe.kv_bytes)
        self._cluster = Cluster(
            self._specs(self._plan),
            self,
            self._policy,
            limits=_limits(self._plan),
            turn_tokens=1,
            patient=True,
            keep=False,
            kv_moves=KVMoves(kv_bytes, self._fabric) if system.move_kv else None,
            interrupted=self._resume,
        )

    def outcome(self) -> PostTraining:
        cluster = self._cluster
        cluster.at(0, self._fill)
        cluster.run()
        if len(self._trained) < self._steps:
            raise AssertionError(f"the run ended after {len(self._trained)} of {self._steps} steps")
        end = seconds(self._published_at)
        devices = [spec.devices for spec in cluster.specs]
        return PostTraining(
            system=self._system.name,
            steps=tuple(self._trained),
            changes=tuple(self._changes),
            seconds=end,
            device_seconds=end * self._system.request.cluster.devices,
            engine_busy=sum(
                seconds(engine.busy_ticks) * its for engine, its in zip(cluster.engines, devices, strict=True)
            ),
            trainer_busy=sum(step.training * step.training_devices for step in self._trained),
            placements=cluster.placements,
            migrations=cluster.migrations,
            migrated_tokens=cluster.migrated_tokens,
            moved_tokens=cluster.moved_tokens,
            interrupted=self._interruptions,
            preemptions=sum(engine.preemptions for engine in cluster.engines),
        )

    # What the cluster asks

    def start(self) -> Iterable[Request]:
        return ()

    def describe(self) -> dict[str, object]:
        return {"name": "posttraining", "system": self._system.name, "episodes": self._episodes.describe()}

    def finished(self, request: Request, now: int) -> Request | None:
        caller = request.owner
        assert isinstance(caller, EpisodeCaller)
        if request.status != "finished" or request.output_tokens != caller.call.output_tokens - caller.generated_before:
            raise ValueError(
                f"trajectory {caller.trajectory.id}: a turn of {caller.call.output_tokens} tokens after"
                f" {caller.call.context_tokens} ended with {request.generated} ({request.reason or request.status}):"
                " no engine of the plan holds it whole"
            )
        if caller.last:
            self._complete(caller.trajectory, caller.group, now)
            return None
        call = caller.advance()
        return self._ask(caller, now + call.delay)

    def _ask(self, caller: EpisodeCaller, arrival: int) -> Request:
        request = caller.request(next(self._numbers), arrival)
        self._requests[caller.trajectory.id] = request
        return request

    def _resume(self, request: Request, now: int) -> Request:
        """A turn that was stopped on its engine."""
        caller = request.owner
        assert isinstance(caller, EpisodeCaller)
        caller.generated_before += request.generated
        self._interruptions += 1
        return self._ask(caller, now)

    # Rollout

    def _fill(self, now: int) -> None:
        """Start what may start."""
        admission, recipe = self._admission, self._recipe
        training = self._option.seconds + self._option.publish
        due = seconds(now) + (1 + recipe.staleness) * self._expected - training
        while self._groups < self._steps * recipe.prompts and admission.may_start():
            name = str(self._groups)
            trajectories = self._episodes.group(self._groups, admission.published)
            self._groups += 1
            admission.start(name)
            prompt = Chain(f"prompt of {name}")
            for trajectory in trajectories:
                made = calls(trajectory, recipe.tool_seconds_if_unknown)
                if not made:
                    self._complete(trajectory, name, now)
                    continue
                caller = EpisodeCaller(trajectory, made, name, due, prompt)
                self._live[trajectory.id] = caller
                self._cluster.submit(self._ask(caller, now + made[0].delay))

    def _complete(self, trajectory: Trajectory, group: str, now: int) -> None:
        self._live.pop(trajectory.id, None)
        self._requests.pop(trajectory.id, None)
        self._finished.append(trajectory)
        self._admission.finish(group, trajectory)
        self._train(now)

    # Training

    def _train(self, now: int) -> None:
        """Begin a step, if there is a batch and nothing is in its way."""
        if self._busy or not self._admission.ready():
            return
        if now < self._blocked_until:
            self._busy = True
            self._cluster.at(self._blocked_until, self._unblock)
            return
        version = self._admission.taken + 1
        batch = [trajectory for _, group in self._admission.take() for trajectory in group]
        layout = self._layout
        assert layout is not None
        needed = self._price.seconds([trajectory.final_context for trajectory in batch], layout)
        stale = [version - 1 - trajectory.policy_version for trajectory in batch]
        fleet = self._cluster.fleet.instances
        specs = self._cluster.specs
        step = StepRecord(
            version=version,
            started=seconds(now),
            waited=seconds(now - self._idle_since),
            training=needed,
            trajectories=len(batch),
            generated_tokens=sum(trajectory.generated_tokens for trajectory in batch),
            final_context_tokens=sum(trajectory.final_context for trajectory in batch),
            longest_context=max(trajectory.final_context for trajectory in batch),
            staleness=sum(stale) / len(stale),
            worst_staleness=max(stale),
            training_devices=layout.devices,
            generating_devices=sum(specs[instance.engine.index].devices for instance in fleet),
        )
        self._busy = True
        switch = self._switch
        self._cluster.at(now + ticks(needed + switch), lambda at: self._stepped(step, at))

    @property
    def _switch(self) -> float:
        """Seconds for colocated devices to change sides, once."""
        if self._recipe.mode != "colocated":
            return 0.0
        return self._system.request.switch_seconds

    def _unblock(self, now: int) -> None:
        self._busy = False
        self._train(now)

    def _stepped(self, step: StepRecord, now: int) -> None:
        """The optimiser has made a version; its weights go to the engines while the trainer goes on."""
        self._trained.append(step)
        self._busy = False
        self._idle_since = now
        if self._progress is not None:
            self._progress(step)
        if self._replan is not None and step.version < self._steps and step.version % self._replan.period == 0:
            self._decide(step.version, now)
        publish = self._option.publish + self._switch
        stall = min(self._stall, publish)
        self._cluster.at(now + ticks(publish - stall), lambda at: self._load(at, stall))
        self._cluster.at(now + ticks(publish), lambda at: self._publish(step.version, at))
        self._train(now)

    def _load(self, now: int, stall: float) -> None:
        refresh = self._recipe.kv_on_update == "refresh" or self._recipe.mode == "colocated"
        self._cluster.update(WeightUpdate(now, ticks(stall), refresh))

    def _publish(self, version: int, now: int) -> None:
        self._admission.publish(version)
        latest = seconds(now - self._published_at)
        self._expected = latest if version == 1 else _RECENT * latest + (1 - _RECENT) * self._expected
        self._published_at = now
        self._fill(now)
        self._train(now)

    # Another plan

    def _decide(self, version: int, now: int) -> None:
        replan = self._replan
        assert replan is not None
        since, at = self._decided_at
        running = [caller.so_far(self._generated(caller)) for caller in self._live.values()]
        moment = Moment(version, self._finished, running, self._policy, seconds(now - at) / (version - since))
        self._finished, self._decided_at = [], (version, now)
        plan = replan.decide(moment)
        if plan is not None:
            self._change(plan, version, now)

    def _generated(self, caller: EpisodeCaller) -> int:
        """Tokens of the present turn."""
        request = self._requests[caller.trajectory.id]
        return caller.generated_before + self._cluster.generated(request)

    def _change(self, plan: Plan, version: int, now: int) -> None:
        """Engines and replicas of the old plan that are not in the new one end, the others go on; new ones come into
        service when they are ready. Nobody waits but who has to: trainers where the layout changes."""
        cluster, switch = self._cluster, self._system.switch
        wanted = {spec.name: spec for spec in self._specs(plan)}
        # An engine's name says which GPUs it has, so one of the same name is the same.
        here = {instance.id for instance in cluster.fleet.instances}
        self._pending = {name: wanted[name] for name in self._pending if name in wanted}
        closing = sorted(here - wanted.keys())
        for name in closing:
            cluster.close(name)
        cluster.reallocate(_limits(plan), {name: wanted[name].bucket for name in here & wanted.keys()})
        starting = [spec for name, spec in wanted.items() if name not in here and name not in self._pending]
        for spec in starting:
            self._pending[spec.name] = spec
            cluster.at(now + ticks(switch.engine_start), partial(self._ready, spec))
        self._relayout(plan, now)
        self._plan = plan
        used = sum(spec.devices for spec in wanted.values())
        assert self._layout is not None and plan.layout is not None
        self._changes.append(PlanChange(version, seconds(now), len(closing), len(starting), plan.layout.devices, used))

    def _ready(self, spec: EngineSpec, now: int) -> None:
        # A later plan may want it in another bucket, or not at all.
        latest = self._pending.pop(spec.name, None)
        if latest is not None:
            self._cluster.add(latest)

    def _relayout(self, plan: Plan, now: int) -> None:
        """Replicas of the same layout leave at once and join when they are ready; another layout stops training."""
        old, new = self._layout, plan.layout
        assert old is not None and new is not None
        join = ticks(self._system.switch.trainer_join)
        option = _option(plan)
        if old == new:
            return
        if replace(old, dp=new.dp) != new:
            self._blocked_until = now + join
        if replace(old, dp=new.dp) == new and new.dp > old.dp:
            self._cluster.at(now + join, lambda _: self._joined(plan))
            return
        self._layout, self._option = new, option

    def _joined(self, plan: Plan) -> None:
        if self._plan is plan:
            self._layout, self._option = plan.layout, _option(plan)

    def _specs(self, plan: Plan) -> tuple[EngineSpec, ...]:
        specs = planned_engines(plan)
        if not self._system.serve_by_priority:
            return specs
        return tuple(replace(spec, config=replace(spec.config, policy="priority")) for spec in specs)


def _limits(plan: Plan) -> tuple[int, ...]:
    return tuple(bucket.up_to for bucket in plan.allocation.buckets)


def _option(plan: Plan) -> TrainingOption:
    assert isinstance(plan.request, ClusterRequest)
    option = training_option(plan.request.menu().problem, plan.allocation)
    assert option is not None
    return option


def _pool(plan: Plan) -> str:
    return next(group.pool for group in plan.placement if group.role == "train")
