"""Sites: the devices of a replanner at one moment, their duties, and the costs there.

Invariant: a site is immutable, so another thread may search during the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from libra.config.run import ShapeConfig, TrainingConfig
from libra.cost.device import DeviceProfile, SwitchCost
from libra.lengths import TrajectoryClass
from libra.plan.allocation import Allocation
from libra.plan.decision import cluster_seconds, live_refill, machine_seconds, switch_cost
from libra.plan.options.cluster_request import ClusterRequest, sharing_layouts
from libra.plan.options.menu import Menu
from libra.plan.options.slots import (
    SLOT_CLASSES,
    LentSlots,
    SlotCounts,
    SlotRequest,
    engine_shapes,
    longest_context,
    make_request,
)
from libra.plan.placement import place
from libra.plan.plan import Plan, PlanRequest, answer
from libra.plan.planner import CLASSES, Planner, what_runs
from libra.plan.problem import Problem
from libra.plan.solution import Solution
from libra.plan.transition import Device, Role, Transition, device_transition, group_transition


@dataclass(frozen=True, slots=True)
class Scenario:
    """One possible outcome for the lengths of coming trajectories."""

    classes: tuple[TrajectoryClass, ...]
    scale: float  # factor on the tracked lengths


@dataclass(frozen=True, slots=True)
class Question:
    """A request with its menu of priced options."""

    request: PlanRequest
    menu: Menu

    @property
    def problem(self) -> Problem:
        return self.menu.problem


class Site(Protocol):
    """The devices to plan for. Trajectories are divided into `classes` classes, and none is longer than
    `longest_context`. A plan's expected lifetime is at most `horizon` steps.
    """

    @property
    def classes(self) -> int: ...
    @property
    def longest_context(self) -> int: ...
    @property
    def horizon(self) -> int: ...

    @property
    def current(self) -> Allocation | None:
        """The running allocation; None if no part of it can continue."""
        ...

    def questions(self, scenarios: Sequence[Scenario]) -> tuple[Question, ...]:
        """One question for each scenario. All menus have the same shapes and layouts."""
        ...

    def transition(self, question: Question, wanted: Allocation) -> Transition:
        """The moves from the running allocation to `wanted`."""
        ...

    def seconds(self, question: Question, transition: Transition) -> float:
        """Seconds of training time that the moves cost."""
        ...

    def plan(self, question: Question, solution: Solution) -> Plan:
        """The plan of a solution."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSite:
    """Nodes of GPUs. `running` is the current plan. `switch` has measured role changes; None: assumed ones."""

    planner: Planner
    running: Plan | None = None
    switch: SwitchCost | None = None
    classes: int = CLASSES

    @property
    def longest_context(self) -> int:
        return self.planner.recipe.max_length

    @property
    def horizon(self) -> int:
        return self.planner.recipe.horizon

    @property
    def current(self) -> Allocation | None:
        return None if self.running is None else self.running.allocation

    def questions(self, scenarios: Sequence[Scenario]) -> tuple[Question, ...]:
        requests = [self.planner.request(each.classes, *what_runs(self.running)) for each in scenarios]
        return tuple(Question(request, request.menu()) for request in sharing_layouts(requests))

    def transition(self, question: Question, wanted: Allocation) -> Transition:
        if self.running is None:
            return Transition(None, wanted, ())
        placed = self.running.placement
        return group_transition(
            self.running.allocation, wanted, placed, place(question.problem, wanted, placed, question.menu.pairs)
        )

    def seconds(self, question: Question, transition: Transition) -> float:
        if not isinstance(question.request, ClusterRequest):
            raise TypeError("the question is about slots of one machine; ask their site")
        switch = self.switch or switch_cost(question.request)
        return cluster_seconds(question.problem, transition, switch, live_refill(question.request))

    def plan(self, question: Question, solution: Solution) -> Plan:
        placed = () if self.running is None else self.running.placement
        return answer(question.request, question.menu, solution, placed)


@dataclass(frozen=True, slots=True)
class SlotSite:
    """The healthy devices of a run on slots, with the values that the run has measured."""

    training: TrainingConfig
    engines: Mapping[str, ShapeConfig]
    horizon: int
    devices: tuple[Device, ...]
    current: Allocation | None
    profile: DeviceProfile
    max_turn_tokens: int
    train_tokens: float  # tokens of a trajectory that go through the trainer
    router_hit: float
    lent_engine: ShapeConfig | None = None  # on devices that serve users; None: no device does
    lent_share: float = 1.0  # share of these devices' time that is lent
    classes: int = SLOT_CLASSES

    @property
    def longest_context(self) -> int:
        return longest_context(self.engines)

    def questions(self, scenarios: Sequence[Scenario]) -> tuple[Question, ...]:
        return tuple(Question(request, request.menu()) for request in map(self.request, scenarios))

    def request(self, scenario: Scenario) -> SlotRequest:
        kinds = [device.allowed for device in self.devices if device.lent is None]
        return make_request(
            self.training,
            self.engines,
            scenario.classes,
            self.profile,
            fleet=SlotCounts(
                core=sum(kind == {Role.TRAIN} for kind in kinds),
                hybrid=sum(kind == {Role.TRAIN, Role.ROLLOUT} for kind in kinds),
                rollout=sum(kind == {Role.ROLLOUT} for kind in kinds),
            ),
            max_turn_tokens=self.max_turn_tokens,
            train_tokens=self.train_tokens * scenario.scale,
            router_hit=self.router_hit,
            current=self.current,
            lent=self._lent(),
        )

    def _lent(self) -> LentSlots | None:
        """The lent devices, which serve users; None without such devices."""
        names = [device.lent for device in self.devices if device.lent is not None]
        if not names or self.lent_engine is None:
            return None
        [shape] = engine_shapes({names[0]: self.lent_engine})
        return LentSlots(shape, len(names), self.lent_share)

    def transition(self, question: Question, wanted: Allocation) -> Transition:
        longest = {option.shape for option in question.problem.engines if option.holds >= self.longest_context}
        return device_transition(self.devices, self.current, wanted, longest)

    def seconds(self, question: Question, transition: Transition) -> float:
        return machine_seconds(transition, self.profile.switch)

    def plan(self, question: Question, solution: Solution) -> Plan:
        return answer(question.request, question.menu, solution)
