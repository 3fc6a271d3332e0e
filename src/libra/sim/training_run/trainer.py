"""The trainer of a simulated run: the start, groups and duration of its steps.

Invariant: a step has one layout from its first gradient to its update, since trainers change only between two steps.
The price of a step is the planner's (`libra.cost.train_step`), with the batch's own lengths instead of expected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from libra.config.recipe import Recipe
from libra.cost.adapters import reference_of, training_bytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout
from libra.plan.options.price import training_option
from libra.plan.plan import Plan
from libra.plan.problem import TrainingOption
from libra.route.admission import Admission
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.training_run.outcome import SimulatedStep
from libra.sim.training_run.system import System
from libra.trajectory import Trajectory

_PARTS = 8  # most parts of a batch, since replicas wait for the longest trajectory of each part
_BINS_PER_OCTAVE = 8  # lengths in one bin are priced as their mean, which keeps the sum of tokens


@dataclass(frozen=True, slots=True)
class TrainingPrice:
    """The price of training on one class of nodes."""

    model: ModelSpec
    recipe: Recipe
    nodes: NodeClass

    def seconds(self, lengths: Sequence[int], layout: ParallelLayout, *, update: bool = True) -> float:
        """Seconds of one step over trajectories with final contexts `lengths`, in tokens. Without `update`, only the
        seconds of their gradients, to be added to those of other parts."""
        work = Work(
            model=self.model,
            batch=batch_of_lengths(lengths),
            state=training_bytes(self.recipe, self.model),
            reference=reference_of(self.recipe),
            gpu=self.nodes.gpu,
            rates=training_rates(self.nodes.gpu, self.recipe.dtype, self.recipe.execution),
            fabric=fabric(self.nodes),
        )
        step = train_step(work, layout)
        return step.total if update else step.total - step.optimiser


def batch_of_lengths(lengths: Sequence[int]) -> Batch:
    """A batch of trajectories with these lengths, in which near lengths are replaced by their mean. Raises ValueError
    for an empty batch or trajectory."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{len(lengths)} lengths, shortest {min(lengths, default=0)}: give trajectories with tokens")
    sizes = np.asarray(lengths, dtype=float)
    bins = np.floor(np.log2(sizes) * _BINS_PER_OCTAVE).astype(int)
    kinds, at = np.unique(bins, return_inverse=True)
    counts = np.bincount(at, minlength=len(kinds))
    means = np.bincount(at, weights=sizes, minlength=len(kinds)) / counts
    return Batch(tuple(means[::-1].tolist()), tuple(counts[::-1].astype(float).tolist()))


@dataclass(slots=True)
class _Step:
    """A step in progress."""

    version: int  # the version that the step makes
    began: int  # tick
    layout: ParallelLayout  # of the whole step
    trajectories: list[Trajectory] = field(default_factory=list)
    training: float = 0.0  # seconds

    def record(self, ended: float, waited: float, generating_devices: int) -> SimulatedStep:
        batch = self.trajectories
        stale = [self.version - 1 - trajectory.policy_version for trajectory in batch]
        return SimulatedStep(
            version=self.version,
            started=seconds(self.began),
            ended=ended,
            waited=waited,
            training=self.training,
            trajectories=len(batch),
            generated_tokens=sum(trajectory.generated_tokens for trajectory in batch),
            final_context_tokens=sum(trajectory.final_context for trajectory in batch),
            longest_context=max(trajectory.final_context for trajectory in batch),
            staleness=sum(stale) / len(stale),
            worst_staleness=max(stale),
            training_devices=self.layout.devices,
            generating_devices=generating_devices,
        )


class SimulatedTrainer:
    """Trains on the groups that admission returns, and calls `stepped` at the end of each step. With `early_gradients`
    the trainer begins parts of a batch as groups complete, so only the last part waits for the last trajectory."""

    def __init__(
        self,
        system: System,
        admission: Admission[Trajectory],
        cluster: SimCluster,
        generating_devices: Callable[[], int],
        stepped: Callable[[SimulatedStep, int], None],
    ) -> None:
        plan = system.plan
        assert plan.layout is not None
        self.option = training_option_of(plan)
        self.layout = plan.layout
        self._system, self._recipe = system, system.request.recipe
        self._admission, self._cluster = admission, cluster
        self._generating_devices, self._stepped = generating_devices, stepped
        self._price = TrainingPrice(system.request.model, self._recipe, training_nodes(plan))
        self._busy = False
        self._step: _Step | None = None  # the step that has begun
        self._idle_since = 0
        self._blocked_until = 0  # no step begins before this tick, while trainers change their layout
        self._joining: tuple[ParallelLayout, int] | None = None  # (layout with more replicas, tick at which they join)

    @property
    def switch(self) -> float:
        """Seconds of one switch of colocated devices between rollout and training."""
        return self._system.request.switch_seconds if self._recipe.mode == "colocated" else 0.0

    def train(self, now: int) -> None:
        """Begin a step, or continue it, if there are groups to train on and the trainer is free."""
        admission = self._admission
        if self._busy:
            return
        if now < self._blocked_until:
            self._busy = True
            self._cluster.at(self._blocked_until, self._unblock)
            return
        version = admission.taken + 1
        if self._recipe.early_gradients:
            groups = admission.take_part(-(-self._recipe.prompts // _PARTS))
        else:
            groups = admission.take() if admission.ready() else []
        if not groups:
            return
        step = self._step
        if step is None:
            step = self._step = _Step(version, now, self.layout)
        part = [trajectory for _, group in groups for trajectory in group]
        complete = admission.taken == version
        waited = seconds(now - self._idle_since) - step.training
        needed = self._price.seconds([it.final_context for it in part], step.layout, update=complete)
        step.trajectories += part
        step.training += needed
        self._busy = True
        if not complete:
            self._cluster.at(now + ticks(needed), self._unblock)
            return
        record = step.record(seconds(now) + needed, waited, self._generating_devices())
        self._step = None
        self._cluster.at(now + ticks(needed + self.switch), partial(self._made, record))

    def relayout(self, plan: Plan, now: int) -> None:
        """Change to the layout of a plan. If only the number of replicas changes, replicas leave at once, or join when
        they are ready. Any other change stops training until the new trainers have joined."""
        old, new = self.layout, plan.layout
        assert new is not None
        if self._joining is not None and self._joining[0] == new:
            return
        self._joining = None
        moves = training_nodes(plan) != self._price.nodes
        if old == new and not moves:
            return
        join = now + ticks(self._system.switch.trainer_join)
        same = new.family == old.family and not moves
        if same and new.dp > old.dp:
            self._joining = new, join
            self._cluster.at(join, partial(self._joined, training_option_of(plan)))
            return
        if not same:
            self._blocked_until = join
            self._price = replace(self._price, nodes=training_nodes(plan))
        self.layout, self.option = new, training_option_of(plan)

    def _made(self, record: SimulatedStep, now: int) -> None:
        self._busy = False
        self._idle_since = now
        self._stepped(record, now)
        self.train(now)

    def _unblock(self, now: int) -> None:
        self._busy = False
        self.train(now)

    def _joined(self, option: TrainingOption, now: int) -> None:
        # A later plan may have dropped these replicas.
        if self._joining is not None and self._joining[1] == now:
            (self.layout, _), self._joining, self.option = self._joining, None, option


def training_option_of(plan: Plan) -> TrainingOption:
    """The training option of the plan's allocation, with the planner's price."""
    option = training_option(plan.request.menu().problem, plan.allocation)
    assert option is not None
    return option


def training_nodes(plan: Plan) -> NodeClass:
    """The class of the nodes on which a plan trains."""
    return plan.of_cluster.cluster.node_class(next(group.pool for group in plan.placement if group.role == "train"))
