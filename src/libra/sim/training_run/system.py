"""What is compared: a plan to start with, who routes, and who may change the plan.

Invariant: a system is told what it could know at that moment and nothing else; one that knows the future says so.
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
from libra.sim.training_run.tenancy import Tenancy
from libra.trajectory import Trajectory

# Libra (arXiv 2606.03077): train to rollout 10.8 s of engine activation; rollout to train 3.6 s of snapshot and 4.4 s
# of state recovery. Loading the weights is part of the activation.
PUBLISHED_SWITCH = SwitchCost(engine_start=10.8, trainer_join=8.0, weight_load=0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a run knows when it may change its plan."""

    version: int
    finished: Sequence[Trajectory]  # since the last time it was asked
    running: Sequence[Trajectory]  # unfinished, as far as they have come
    seconds_per_step: float  # mean as measured since the last time, role changes included


class Replan(Protocol):
    """Decides every so often on the plan."""

    @property
    def period(self) -> int:
        """Steps between two decisions."""
        ...

    def decide(self, moment: Moment) -> Plan | None:
        """The plan to go over to; None: the present one stays."""
        ...


@dataclass(slots=True)
class Replanning:
    """The library's replanner, asked and told what an executor would ask and tell it, and no more."""

    replanner: Replanner
    period: int  # steps

    def decide(self, moment: Moment) -> Plan | None:
        if self.replanner.looks:
            self.replanner.realised(moment.seconds_per_step)
        decision = self.replanner.step(moment.finished, moment.running)
        return self.replanner.plan if decision.taken else None


@dataclass(frozen=True, slots=True)
class System:
    """One way to run post-training on a cluster. Its plan's request says which cluster, model and recipe."""

    name: str
    plan: Plan
    route: Callable[[], Policy]  # a new policy for each run
    replan: Callable[[], Replan] | None = None  # likewise; None: the plan never changes
    switch: SwitchCost = field(default=PUBLISHED_SWITCH)
    serve_by_priority: bool = False  # engines take waiting turns in the policy's order, not as they come
    # No group starts that finds the engines' caches full of unfinished trajectories' contexts: they would forget what
    # they need next, compute it again, and take longer, so that more is unfinished.
    start_by_cache: bool = False
    tenancy: Tenancy | None = None  # on devices that the plan borrows; None: lent engines have their share, always
    # An engine that changes its role in a prefill/decode pair: seconds without it, and whether it first does what it
    # has, or that goes on elsewhere at once and its KV is lost.
    role_change: float = ROLE_CHANGE
    drain: bool = True
    move_kv: bool = True  # KV follows a trajectory to another engine where that is quicker than to compute it again

    @property
    def request(self) -> ClusterRequest:
        """Raises ValueError where the plan is not of a cluster of GPUs."""
        try:
            return self.plan.of_cluster
        except ValueError as error:
            raise ValueError(f"system {self.name}: {error}") from None
