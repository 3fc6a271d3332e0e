"""The training loop: groups start when staleness admits them, batches train, weights are published, plans change.

Invariant: admission is the executor's own (`libra.route.admission`), so no token is staler than the recipe allows, and
nothing is discarded. Trajectories, engines, router and planner are those of `libra.sim` and `libra.plan`. This module
adds only their waits for each other.

    started -> turns and tools -> finished -> group complete -> batch -> trained -> published -> the next may start

Synchronous training is the case of staleness 0. In colocated training, engines and trainers alternate on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import count

from libra.cost.adapters import version_bytes
from libra.cost.quantization import rollout_quantization
from libra.cost.transfer import fabric, weight_sync
from libra.plan.plan import Plan
from libra.route.admission import Admission
from libra.route.catalogue import policy_named
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import DEFAULT_DECODE_ROUTE, WeightUpdate
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.messages import Pause
from libra.sim.engine.request import Chain, Request
from libra.sim.handover import KVMoves
from libra.sim.planned_engines import planned_network
from libra.sim.training_run.episodes import Episodes
from libra.sim.training_run.occupancy import Occupancy
from libra.sim.training_run.outcome import PlanChange, SimulatedRun, SimulatedStep
from libra.sim.training_run.service import Service, limits_of
from libra.sim.training_run.system import Moment, System
from libra.sim.training_run.trainer import SimulatedTrainer, training_nodes
from libra.sim.workload.caller import EpisodeCaller, calls
from libra.trajectory import Trajectory

_RECENT = 0.5  # weight of the latest step in the expected seconds of the next step


def simulate_posttraining(system: System, episodes: Episodes, steps: int, *, exact: bool = False) -> SimulatedRun:
    """Simulate `steps` optimiser steps of a system. The same arguments give the same outcome.

    Exactly the groups that these steps train on are started, so systems are compared over equal work. `exact` visits
    every iteration of the engines, which is slower and has the same outcome. Raises ValueError if recipe and episodes
    do not fit together, or a trajectory fits no engine.
    """
    run = PosttrainingRun(system, episodes, steps, exact=exact)
    run.finish()
    return run.outcome()


def _require_fit(system: System, episodes: Episodes, steps: int) -> None:
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
            f"trajectories grow to {episodes.max_context} tokens, but the recipe's max_length is {recipe.max_length}:"
            " raise max_length, or cut the trajectories"
        )


class PosttrainingRun:
    """One simulation of one system. It is the workload of a cluster, and also changes the cluster during the run."""

    def __init__(self, system: System, episodes: Episodes, steps: int, *, exact: bool = False) -> None:
        _require_fit(system, episodes, steps)
        request = system.request
        self._system, self._episodes, self._steps = system, episodes, steps
        self._recipe = request.recipe
        self._plan = system.plan
        self._policy = system.route()
        self._replan = system.replan() if system.replan is not None else None
        self._admission: Admission[Trajectory] = Admission(
            self._recipe.prompts, self._recipe.samples_per_prompt, self._recipe.staleness
        )
        self._numbers = count()
        self._groups = 0  # started groups
        self._live: dict[str, EpisodeCaller] = {}  # unfinished callers, by trajectory
        self._requests: dict[str, Request] = {}  # latest request, by trajectory
        self._finished: list[Trajectory] = []  # finished since the last decision
        self._trained: list[SimulatedStep] = []
        self._changes: list[PlanChange] = []
        self._decided_at = (0, 0)  # version and tick of the latest decision
        self._expected = system.plan.predicted.step  # seconds of a step
        self._published_at = 0
        self._publications: list[float] = []  # seconds at which versions were published, from the first
        self._pause_after: int | None = None  # version at whose publication the simulation pauses
        self._occupancy = Occupancy()
        self._publishing_until = 0  # tick at which the latest weights in transfer arrive
        self._interruptions = 0
        link = fabric(training_nodes(self._plan))
        quantization = rollout_quantization(self._recipe)
        self._stall = weight_sync(version_bytes(self._recipe, request.model), 1, 1, link).stall
        network = planned_network(request)
        kv_bytes = quantization.kv_bytes_per_token(request.model, context=self._recipe.max_length)

        def cluster(specs: tuple[EngineSpec, ...]) -> SimCluster:
            return SimCluster(
                specs,
                self,
                self._policy,
                limits=limits_of(self._plan),
                turn_tokens=1,
                exact=exact,
                patient=True,
                keep=False,
                kv_moves=KVMoves(kv_bytes, link) if system.move_kv else None,
                kv_transfer=network,
                decode_route=None if network is None else policy_named(DEFAULT_DECODE_ROUTE),
                interrupted=self._resume,
            )

        load = Pause(ticks(self._stall), self._refreshes)
        self._service = Service(system, cluster, lambda tenancy, made: tenancy.service(made, load, exact=exact))
        self._cluster, self._lending = self._service.cluster, self._service.lending
        self._trainer = SimulatedTrainer(
            system, self._admission, self._cluster, lambda: self._service.devices, self._stepped
        )
        self._cluster.at(0, self._fill)

    def published(self, version: int) -> tuple[float, ...]:
        """Simulate until `version` is published. Returns the seconds at which versions 1 to `version` were published. A
        later call continues. `version` is at most the run's number of steps."""
        if len(self._publications) < version:
            self._pause_after = version
            self._cluster.run()
        return tuple(self._publications[:version])

    def finish(self) -> None:
        """Simulate to the end of all steps."""
        self._cluster.run()
        if len(self._trained) < self._steps:
            raise AssertionError(f"the run ended after {len(self._trained)} of {self._steps} steps")

    def outcome(self) -> SimulatedRun:
        """The outcome up to the latest published version."""
        cluster, lending = self._cluster, self._lending
        lent = frozenset[str]() if lending is None else lending.names
        return SimulatedRun(
            system=self._system.name,
            steps=tuple(self._trained[: len(self._publications)]),
            changes=tuple(self._changes),
            seconds=seconds(self._published_at),
            engine_seconds=seconds(self._service.device_ticks(self._published_at)),
            engine_busy=sum(
                seconds(engine.busy_ticks) * spec.devices
                for engine, spec in zip(cluster.engines, cluster.specs, strict=True)
                if spec.name not in lent
            ),
            placements=cluster.placer.placements,
            migrations=cluster.placer.migrations,
            migrated_tokens=cluster.placer.migrated_tokens,
            moved_tokens=cluster.moved_tokens,
            interrupted=self._interruptions,
            preemptions=sum(engine.preemptions for engine in cluster.engines),
            lenders=() if lending is None else tuple(lending.outcome(self._published_at)),
            engines=tuple(self._occupancy.spans),
        )

    # The cluster's workload

    def start(self) -> Iterable[Request]:
        return ()

    def describe(self) -> dict[str, object]:
        return {"name": "posttraining", "system": self._system.name}

    def finished(self, request: Request, now: int) -> Request | None:
        caller = request.owner
        assert isinstance(caller, EpisodeCaller)
        if request.status != "finished" or request.output_tokens != caller.call.output_tokens - caller.generated_before:
            raise ValueError(
                f"trajectory {caller.trajectory.id}: a turn should generate {caller.call.output_tokens} tokens after a"
                f" context of {caller.call.context_tokens}, but ended after {request.generated} tokens"
                f" ({request.reason or request.status}): no engine of the plan has room for the whole turn; plan again"
                " with this log"
            )
        if caller.last:
            self._complete(caller.trajectory, caller.group, now)
            return None
        call = caller.advance()
        return self._ask(caller, now + call.delay)

    def _ask(self, caller: EpisodeCaller, arrival: int) -> Request:
        request = caller.request(next(self._numbers), arrival, caller.chain)
        self._requests[caller.trajectory.id] = request
        return request

    def _resume(self, request: Request, now: int) -> Request:
        """The request that continues a stopped turn."""
        caller = request.owner
        assert isinstance(caller, EpisodeCaller)
        caller.generated_before += request.generated
        self._interruptions += 1
        return self._ask(caller, now)

    # Rollout

    def _fill(self, now: int) -> None:
        """Start the groups that may start."""
        admission, recipe = self._admission, self._recipe
        training = self._trainer.option.after_rollout + self._trainer.option.publish
        due = seconds(now) + (1 + recipe.staleness) * self._expected - training
        while self._groups < self._steps * recipe.prompts and admission.may_start() and self._has_room():
            name = str(self._groups)
            trajectories = self._episodes.group(self._groups, admission.published)
            self._groups += 1
            admission.start(name)
            prompt = Chain(f"prompt of {name}")
            nothing_to_do = []
            for trajectory in trajectories:
                self._require_fitting(trajectory)
                made = calls(trajectory, recipe.tool_seconds_if_unknown)
                if not made:
                    nothing_to_do.append(trajectory)
                    continue
                caller = EpisodeCaller(trajectory, made, prompt, group=name, due=due)
                self._live[trajectory.id] = caller
                self._cluster.submit(self._ask(caller, now + made[0].delay))
            for trajectory in nothing_to_do:
                self._complete(trajectory, name, now)

    def _has_room(self) -> bool:
        live = len(self._live) + self._recipe.samples_per_prompt  # with one group more
        most = self._recipe.concurrency
        if most is not None and live > most:
            return False
        # One group always runs, even if it does not fit. Otherwise none would ever run.
        return not self._system.start_by_cache or not self._live or live <= self._held()

    def _held(self) -> float:
        """Number of trajectories whose contexts fit into the engines' caches, at the mean context of a generated
        token."""
        request = self._plan.request
        generated = sum(cls.share * cls.generated for cls in request.classes)
        contexts = sum(cls.share * cls.context_sum for cls in request.classes)
        return self._cluster.kv_tokens * generated / contexts if contexts else math.inf

    def _require_fitting(self, trajectory: Trajectory) -> None:
        most = self._episodes.max_context
        if trajectory.peak_context > most:
            raise ValueError(
                f"trajectory {trajectory.id} grows to {trajectory.peak_context} tokens, more than {most}, the episodes'"
                " max_context: cut it, or raise max_context"
            )

    def _complete(self, trajectory: Trajectory, group: str, now: int) -> None:
        self._live.pop(trajectory.id, None)
        self._requests.pop(trajectory.id, None)
        if self._replan is not None:
            self._finished.append(trajectory)
        self._admission.finish(group, trajectory)
        self._trainer.train(now)
        if self._recipe.concurrency is not None or self._system.start_by_cache:
            self._fill(now)

    # Versions

    def _stepped(self, step: SimulatedStep, now: int) -> None:
        """Send the optimiser's new version to the engines, while the trainer continues."""
        self._trained.append(step)
        # Versions arrive in order, even if a later layout sends them faster.
        there = max(now + ticks(self._trainer.option.publish + self._trainer.switch), self._publishing_until)
        self._publishing_until = there
        stall = min(ticks(self._stall), there - now)
        self._cluster.at(there - stall, lambda at: self._load(at, stall))
        self._cluster.at(there, lambda at: self._publish(step.version, at))
        if self._lending is not None:
            self._lending.made(step.version, now)
        if self._replan is not None and step.version < self._steps and step.version % self._replan.period == 0:
            self._decide(step.version, now)

    @property
    def _refreshes(self) -> bool:
        return self._recipe.kv_on_update == "refresh" or self._recipe.mode == "colocated"

    def _load(self, now: int, stall: int) -> None:
        own = None if self._lending is None else self._service.indices
        self._cluster.update(WeightUpdate(now, stall, self._refreshes, own))

    def _publish(self, version: int, now: int) -> None:
        self._admission.publish(version)
        latest = seconds(now - self._published_at)
        self._expected = latest if version == 1 else _RECENT * latest + (1 - _RECENT) * self._expected
        self._published_at = now
        self._publications.append(seconds(now))
        if version == self._pause_after:
            self._cluster.pause()
        self._occupancy.observe(self._service.own, limits_of(self._plan), now)
        self._fill(now)
        self._trainer.train(now)

    # Another plan

    def _decide(self, version: int, now: int) -> None:
        replan = self._replan
        assert replan is not None
        since, at = self._decided_at
        running = [self._so_far(caller, now) for caller in self._live.values()]
        moment = Moment(version, self._finished, running, seconds(now - at) / (version - since))
        self._finished, self._decided_at = [], (version, now)
        plan = replan.decide(moment)
        if plan is not None:
            self._change(plan, version, now)

    def _so_far(self, caller: EpisodeCaller, now: int) -> Trajectory:
        request = self._requests[caller.trajectory.id]
        generated = caller.generated_before + self._cluster.generated(request)
        return caller.so_far(generated, left=seconds(request.arrival - now))

    def _change(self, plan: Plan, version: int, now: int) -> None:
        stopped, started, used = self._service.change(plan, now)
        self._trainer.relayout(plan, now)
        self._plan = plan
        assert plan.layout is not None
        self._changes.append(PlanChange(version, seconds(now), stopped, started, plan.layout.devices, used))
