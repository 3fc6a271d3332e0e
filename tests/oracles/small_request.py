"""One request of four devices, two shapes and two classes whose prices can be worked out by hand, and random ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.lengths import TrajectoryClass
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.slots import EngineShape, LentSlots, SlotCounts, SlotRequest, StepWorkload

SHORT = TrajectoryClass(0.75, 1000, 900.0, 100.0, 50_000.0, 1000.0, 2.0, 3.0, 0.6)
LONG = TrajectoryClass(0.25, 4000, 3500.0, 400.0, 800_000.0, 2000.0, 4.0, 10.0, 0.5)

WORKLOAD = StepWorkload(
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
REQUEST = SlotRequest(
    fleet=SlotCounts(core=1, hybrid=1, rollout=2),
    shapes=(EngineShape("short", 2000, 4, 10_000), EngineShape("long", 6000, 16, 20_000)),
    profile=PROFILE,
    workload=WORKLOAD,
)


def two_buckets(replicas: int, short: int, long: int, cut: int = 1000, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("short", short, 0, cut), Bucket("long", long, cut, end)))


def one_bucket(replicas: int, long: int, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("long", long, 0, end),))


@st.composite
def slot_requests(draw: st.DrawFn) -> SlotRequest:
    """Requests of up to five devices, two shapes and three classes. Some have a running allocation, some have lent
    devices."""
    sizes = sorted(draw(st.lists(st.integers(100, 5000), min_size=1, max_size=2, unique=True)))
    fleet = SlotCounts(core=draw(st.integers(1, 2)), hybrid=draw(st.integers(0, 2)), rollout=draw(st.integers(1, 2)))
    peaks = sorted(draw(st.lists(st.integers(1, sizes[-1]), min_size=1, max_size=3)))
    weights = draw(st.lists(st.integers(1, 9), min_size=len(peaks), max_size=len(peaks)))
    classes = tuple(_class(draw, peak, weight / sum(weights)) for peak, weight in zip(peaks, weights, strict=True))
    running = (one_bucket(fleet.core, fleet.devices - fleet.core, end=sizes[-1]), None)
    return SlotRequest(
        fleet=fleet,
        shapes=tuple(EngineShape(f"shape{i}", size, 4 * i + 1, size) for i, size in enumerate(sizes)),
        profile=PROFILE,
        workload=replace(
            WORKLOAD,
            trajectories=draw(st.integers(1, 20)),
            max_staleness=draw(st.integers(0, 2)),
            longest_context=sizes[-1],
            router_hit=draw(st.sampled_from([0.0, 0.5, 1.0])),
            classes=classes,
        ),
        current=draw(st.sampled_from(running)),
        lent=draw(st.one_of(st.none(), _lent(sizes[-1]))),
    )


def _lent(longest: int) -> st.SearchStrategy[LentSlots]:
    return st.builds(
        lambda holds, devices, share: LentSlots(EngineShape("lent", holds, 4, holds), devices, share),
        st.integers(1, longest - 1),
        st.integers(1, 2),
        st.sampled_from([0.25, 0.75]),
    )


def _class(draw: st.DrawFn, peak: int, share: float) -> TrajectoryClass:
    generated = draw(st.integers(0, peak))
    return TrajectoryClass(
        share=share,
        peak_context=peak,
        mean_context=peak * draw(st.floats(0.5, 1)),
        generated=float(generated),
        context_sum=peak * generated * draw(st.floats(0, 1)),
        prefill=peak * 0.5,
        turns=draw(st.floats(1, 9)),
        tool_seconds=draw(st.floats(0, 10)),
        before_first_return=draw(st.floats(0, 1)),
    )
