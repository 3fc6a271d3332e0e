"""One request of four devices, two shapes and two classes whose prices can be worked out by hand."""

from __future__ import annotations

from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.lengths import TrajectoryClass
from libra.plan.problem import Allocation, Bucket, EngineShape, Fleet, PlanRequest, Workload

SHORT = TrajectoryClass(0.75, 1000, 100.0, 50_000.0, 1000.0, 2.0, 3.0, 0.6)
LONG = TrajectoryClass(0.25, 4000, 400.0, 800_000.0, 2000.0, 4.0, 10.0, 0.5)

WORKLOAD = Workload(
    trajectories=8,
    group_size=4,
    max_staleness=1,
    max_turn_tokens=256,
    longest_context=5000,
    train_tokens=2500.0,
    router_hit=0.5,
    classes=(SHORT, LONG),
)
PROFILE = DeviceProfile(
    hardware="slot",
    model="tiny",
    engine=EngineCost(step=0.01, per_sequence=0.001, per_context_token=1e-6, per_prefill_token=1e-4, per_turn=0.1),
    train=TrainCost(step=0.5, per_token=1e-4, exchange=0.25),
    switch=SwitchCost(engine_start=8.0, trainer_join=3.0, weight_load=0.3),
    heldout_error=0.05,
)
REQUEST = PlanRequest(
    fleet=Fleet(core=1, hybrid=1, rollout=2),
    shapes=(EngineShape("short", 2000, 4, 10_000), EngineShape("long", 6000, 16, 20_000)),
    profile=PROFILE,
    workload=WORKLOAD,
)


def two_buckets(replicas: int, short: int, long: int, cut: int = 1000, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("short", short, 0, cut), Bucket("long", long, cut, end)))


def one_bucket(replicas: int, long: int, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("long", long, 0, end),))
