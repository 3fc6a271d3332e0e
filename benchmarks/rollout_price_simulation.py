"""A synchronous step's rollout, simulated.

Invariant: engines, memory, seats and times are the plan's, and the router makes no mistake; so what differs from the
price is what the price leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from libra.plan.plan import Plan
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest
from libra.sim.clock import seconds
from libra.sim.cluster import SimCluster
from libra.sim.planned_engines import planned_engines
from libra.sim.workload.replay import Replay
from libra.trajectory import Trajectory


def roll_out(plan: Plan, batch: tuple[Trajectory, ...]) -> float:
    """Seconds until the last trajectory of the batch is finished; all begin at once, on empty engines that have their
    weights."""
    limits = tuple(bucket.up_to for bucket in plan.allocation.buckets)
    workload = Replay(batch)
    cluster = SimCluster(planned_engines(plan), workload, Oracle(batch, limits), limits=limits)
    cluster.run()
    if workload.completed != len(batch):
        raise RuntimeError(f"{len(batch) - workload.completed} trajectories did not finish: {workload.unfinished}")
    return max(seconds(request.finish or 0) for request in cluster.requests)


class Oracle:
    """Knows how long each trajectory will be, and sends it to that engine of its bucket which has the fewest tokens to
    generate; there it stays."""

    def __init__(self, batch: Iterable[Trajectory], limits: tuple[int, ...]) -> None:
        self._trajectories = {trajectory.id: trajectory for trajectory in batch}
        self._limits = limits
        self._load: dict[str, int] = {}  # of an engine: tokens that its trajectories generate in all
        self._homes: dict[str, Placement] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement:
        trajectory = self._trajectories[request.trajectory_id]
        return self._put(trajectory, self._own(trajectory), fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement:
        trajectory = self._trajectories[request.trajectory_id]
        return self._put(trajectory, self._own(trajectory), fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None

    def finished(self, trajectory: Trajectory) -> None:
        self._load[self._homes.pop(trajectory.id).instance] -= trajectory.generated_tokens

    def forget(self, trajectory_id: str) -> None:
        self._homes.pop(trajectory_id, None)

    def instance_gone(self, instance: str) -> None:
        raise NotImplementedError("no engine goes in a benchmark of prices")

    def snapshot(self) -> dict[str, Any]:
        raise NotImplementedError("an oracle is not stored")

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        raise NotImplementedError("an oracle is not stored")

    def _own(self, trajectory: Trajectory) -> int:
        return next(bucket for bucket, limit in enumerate(self._limits) if trajectory.peak_context <= limit)

    def _put(self, trajectory: Trajectory, bucket: int, fleet: Fleet) -> Placement:
        home = self._homes.get(trajectory.id)
        if home is not None and home.bucket == bucket:
            return home
        chosen = min((it for it in fleet.instances if it.bucket == bucket), key=self._order)
        if home is not None:
            self._load[home.instance] -= trajectory.generated_tokens
        self._load[chosen.id] = self._load.get(chosen.id, 0) + trajectory.generated_tokens
        placement = Placement(chosen.id, bucket, home is not None, "an oracle knows")
        self._homes[trajectory.id] = placement
        return placement

    def _order(self, instance: Instance) -> tuple[int, str]:
        return self._load.get(instance.id, 0), instance.id
