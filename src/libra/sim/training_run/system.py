"""Systems to compare: an initial plan, a routing policy, and a rule that may change the plan.

Invariant: a system gets only information that is available at that moment. A system that knows the future says so.
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
    running: Sequence[Trajectory]  # unfinished trajectories, with their turns so far
    seconds_per_step: float  # mean since the last decision, role changes included


class Replan(Protocol):
    """Decides on the plan every `period` steps."""

    @property
    def period(self) -> int:
        """Steps between two decisions."""
        ...

    def decide(self, moment: Moment) -> Plan | None:
        """The next plan; None: keep the present plan."""
        ...


@dataclass(slots=True)
class Replanning:
    """The library's replanner, with the inputs that an executor would give it."""

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
    replan: Callable[[], Replan] | None = None  # makes a replanner for each run; None: the plan never changes
    switch: SwitchCost = field(default=PUBLISHED_SWITCH)
    serve_by_priority: bool = False  # engines admit waiting turns in the policy's order, not in the order of arrival
    # No group starts while contexts of unfinished trajectories fill the engines' caches. Engines would evict KV that
    # they need next and compute it again, and with longer times even more trajectories would be unfinished.
    start_by_cache: bool = False
    tenancy: BorrowedDevices | None = None  # None: lent engines always have their share of a device
    role_change: float = ROLE_CHANGE  # seconds for which an engine is out of service when its role changes
    drain: bool = True  # engines drain before a role change; otherwise requests continue elsewhere and lose their KV
    move_kv: bool = True  # KV follows a trajectory to another engine if the transfer is faster than recomputation

    @property
    def request(self) -> ClusterRequest:
        """The plan's request. Raises ValueError if the plan is not for a cluster of GPUs."""
        try:
            return self.plan.of_cluster
        except ValueError as error:
            raise ValueError(f"system {self.name}: {error}") from None
