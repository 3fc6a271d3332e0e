"""Systems to compare: an initial plan, a routing policy, and a rule that may change the plan.

Invariant: a system only gets information available at that moment; one that knows the future says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libra.cost.device import SwitchCost
from libra.plan.decision import ROLE_CHANGE
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan
from libra.plan.replanner import Replanner
from libra.route.policy import Policy
from libra.sim.training_run.borrowed import BorrowedDevices
from libra.trajectory import Trajectory

# Libra (arXiv 2606.03077): train to rollout 10.8 s of engine activation; rollout to train 3.6 s of snapshot and 4.4 s
# of state recovery. Loading the weights is part of the activation.
PUBLISHED_SWITCH = SwitchCost(engine_start=10.8, trainer_join=8.0, weight_load=0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """Information about a run when it may change its plan."""

    version: int
    finished: Sequence[Trajectory]  # since the last decision
    running: Sequence[Trajectory]  # unfinished, as far as they have come
    seconds_per_step: float  # mean as measured since the last decision, role changes included


class Replan(Protocol):
    """Decides on the plan every `period` steps."""

    @property
    def period(self) -> int:
        """Steps between two decisions."""
        ...

    def decide(self, moment: Moment) -> Plan | None:
        """The plan to change to; None: keep the present one."""
        ...


@dataclass(slots=True)
class Replanning:
    """The library's replanner, with the same inputs as from an executor."""

    replanner: Replanner
    period: int  # steps

    def decide(self, moment: Moment) -> Plan | None:
        if self.replanner.looks:
            self.replanner.realised(moment.seconds_per_step)
        decision = self.replanner.step(moment.finished, moment.running)
        return self.replanner.plan if decision.taken else None


@dataclass(frozen=True, slots=True)
class System:
    """One way to run post-training on a cluster. Its plan's request has the cluster, model and recipe."""

    name: str
    plan: Plan
    route: Callable[[], Policy]  # a new policy for each run
    replan: Callable[[], Replan] | None = None  # a new one for each run; None: the plan never changes
    switch: SwitchCost = field(default=PUBLISHED_SWITCH)
    serve_by_priority: bool = False  # engines take waiting turns in the policy's order, not as they come
    # No group starts while unfinished trajectories' contexts fill the engines' caches: engines would evict KV that they
    # need next, compute it again, and take longer, so that more trajectories are unfinished.
    start_by_cache: bool = False
    tenancy: BorrowedDevices | None = None  # None: lent engines always have their share of a device
    # An engine that changes its role in a prefill/decode pair: seconds without it, and whether it drains first. If not,
    # its requests continue elsewhere at once and their KV is lost.
    role_change: float = ROLE_CHANGE
    drain: bool = True
    move_kv: bool = True  # KV follows a trajectory to another engine if that is quicker than computing it again

    @property
    def request(self) -> ClusterRequest:
        """The plan's request. Raises ValueError if the plan is not of a cluster of GPUs."""
        try:
            return self.plan.of_cluster
        except ValueError as error:
            raise ValueError(f"system {self.name}: {error}") from None
