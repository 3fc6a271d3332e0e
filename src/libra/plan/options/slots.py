"""The planning request of a run on one machine: identical devices whose costs were measured.

Invariant: every device is one slot that trains one replica or runs one engine, and every device has a role. Times are
seconds, lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from libra.config.run import PlannerConfig, ShapeConfig, TrainingConfig
from libra.cost.device import DeviceProfile, slowed
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.cost.longest import MemberSeconds
from libra.cost.rollout import EngineTiming, concurrency, measured_timing, seats_taken, work
from libra.hardware.checks import require_at_least
from libra.lengths import LengthTracker, TrajectoryClass
from libra.plan.allocation import ONE_DEVICE, Allocation
from libra.plan.options.menu import Menu, check_classes, reach
from libra.plan.problem import STRICT, EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption

_POOL, _LENT_POOL = "slots", "lent"


@dataclass(frozen=True, slots=True)
class EngineShape:
    """A size in which a rollout engine can be started on one device."""

    name: str
    max_model_len: int  # longest context it serves
    max_num_seqs: int  # sequences that decode together
    kv_tokens: int  # tokens its KV memory holds

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name of an engine shape is empty; buckets refer to shapes by name")
        require_at_least(1, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs, kv_tokens=self.kv_tokens)


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Healthy devices by role: `core` always train, `rollout` always generate, `hybrid` do either."""

    core: int
    hybrid: int
    rollout: int

    def __post_init__(self) -> None:
        require_at_least(0, core=self.core, hybrid=self.hybrid, rollout=self.rollout)

    @property
    def devices(self) -> int:
        return self.core + self.hybrid + self.rollout


@dataclass(frozen=True, slots=True)
class LentSlots:
    """Lent devices, which also serve users. Each has an engine of `shape`; a plan uses all or none."""

    shape: EngineShape
    devices: int
    share: float  # of a device's time that is lent

    def __post_init__(self) -> None:
        require_at_least(1, devices=self.devices)
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is the share of a device's time: above 0, at most 1")


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """The work of one optimiser step, from the tracked distribution."""

    trajectories: int  # B: trajectories trained on in one step
    group_size: int  # samples of one prompt; a group is complete before use
    max_staleness: int  # eta: versions between generation and training
    max_turn_tokens: int  # a turn is never longer; engines keep this much room
    longest_context: int  # tokens; no trajectory grows longer, and some engine must hold this context
    train_tokens: float  # expected tokens per trajectory that go through forward and backward
    router_hit: float  # share of the work after the first tool return that the router sends to its own bucket
    classes: tuple[TrajectoryClass, ...]  # shares sum to 1, ordered by final context

    def __post_init__(self) -> None:
        require_at_least(
            1,
            trajectories=self.trajectories,
            group_size=self.group_size,
            max_turn_tokens=self.max_turn_tokens,
            longest_context=self.longest_context,
        )
        require_at_least(0, max_staleness=self.max_staleness)
        if not (math.isfinite(self.train_tokens) and self.train_tokens >= 0):
            raise ValueError(f"train_tokens is {self.train_tokens}; give the expected tokens per trajectory, >= 0")
        if not 0 <= self.router_hit <= 1:
            raise ValueError(f"router_hit is {self.router_hit}; give a share between 0 and 1")
        check_classes(self.classes, self.longest_context)


@dataclass(frozen=True, slots=True)
class SlotRequest:
    __pydantic_config__ = STRICT

    fleet: SlotCounts
    shapes: tuple[EngineShape, ...]
    profile: DeviceProfile
    workload: StepWorkload
    current: Allocation | None = None  # the running allocation, which breaks ties between plans
    kind: Literal["slots"] = "slots"
    lent: LentSlots | None = None

    def __post_init__(self) -> None:
        names = [shape.name for shape in self.shapes] + ([self.lent.shape.name] if self.lent is not None else [])
        if len({*names}) < len(names):
            raise ValueError("shapes: two have the same name; buckets refer to shapes by name, so name each once")
        if any(short.max_model_len > long.max_model_len for short, long in pairwise(self.shapes)):
            raise ValueError("shapes are not ordered; sort them by max_model_len, shortest first")

    @property
    def classes(self) -> tuple[TrajectoryClass, ...]:
        return self.workload.classes

    @property
    def trajectories(self) -> int:
        return self.workload.trajectories

    @property
    def staleness(self) -> int:
        return self.workload.max_staleness

    @property
    def devices(self) -> int:
        return self.fleet.devices

    @property
    def longest_context(self) -> int:
        return self.workload.longest_context

    @property
    def unknown_tool_seconds(self) -> float:
        return 0.0

    @property
    def refreshes(self) -> bool:
        return False

    @property
    def title(self) -> str:
        return f"{self.profile.model} on {self.fleet.devices} slots"

    @property
    def assumed_router(self) -> str:
        return ""

    @property
    def counts_unfinished(self) -> bool:
        return False

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        return ()

    def menu(self) -> Menu:
        """The menu of priced options. Raises `InfeasiblePlanError` when no device may train, or none may generate."""
        fleet, workload = self.fleet, self.workload
        if fleet.core < 1:
            raise InfeasiblePlanError(
                f"fleet.core is 0, and {fleet.hybrid} hybrid and {fleet.rollout} rollout devices cannot replace it: "
                "at least one device must always train; make one of them core"
            )
        if fleet.hybrid + fleet.rollout < 1:
            raise InfeasiblePlanError(
                f"no device is left for a rollout engine: all {fleet.core} are core and always train; "
                "add a device to fleet.hybrid or fleet.rollout"
            )
        routers = reach(workload.classes, (workload.router_hit,) * len(workload.classes))
        pools = [Pool(_POOL, fleet.devices, 1)]
        timing = measured_timing(self.profile.engine)
        engines = [
            option
            for shape in self.shapes
            for option in self._engine_options(shape, _POOL, fleet.hybrid + fleet.rollout, timing)
        ]
        if self.lent is not None:
            pools.append(Pool(_LENT_POOL, self.lent.devices, 1, serves=True))
            slower = measured_timing(slowed(self.profile.engine, 1 / self.lent.share))
            engines += self._engine_options(self.lent.shape, _LENT_POOL, self.lent.devices, slower)
        problem = Problem(
            pools=tuple(pools),
            engines=tuple(engines),
            training=tuple(self._training_option(r) for r in range(fleet.core, fleet.core + fleet.hybrid + 1)),
            peaks=tuple(cls.peak_context for cls in workload.classes),
            expected=(True,) * len(workload.classes),  # residences are expectations, so rare classes weigh little
            longest_context=workload.longest_context,
            recall_known=routers[:1],
            recall_possible=routers,
            staleness=workload.max_staleness,
            use_all_devices=True,
            one_bucket_per_shape=True,
            current=self.current,
        )
        return Menu(problem)

    def _engine_options(self, shape: EngineShape, pool: str, most: int, timing: EngineTiming) -> list[EngineOption]:
        """One option for each possible number of sequences that decode together, if 1 to `most` engines share the
        trajectories in flight.
        """
        workload = self.workload
        in_flight = (1 + workload.max_staleness) * workload.trajectories
        counts = range(1, most + 1)
        options = []
        for max_num_seqs in sorted({concurrency(shape.max_num_seqs, in_flight, engines) for engines in counts}):
            rows = [
                [workload.trajectories * cls.share * row for row in work(timing, cls, max_num_seqs, shape.kv_tokens)]
                for cls in workload.classes
            ]
            # The batch is assumed to be full of sequences of the same class.
            together = [seats_taken(cls, max_num_seqs, shape.kv_tokens) for cls in workload.classes]
            options.append(
                EngineOption(
                    shape=shape.name,
                    pool=pool,
                    devices=1,
                    max_num_seqs=max_num_seqs,
                    holds=min(shape.max_model_len, shape.kv_tokens),
                    stall=self.profile.switch.weight_load,
                    work=tuple(zip(*rows, strict=True)),
                    refresh=(0.0,) * len(rows),
                    residence=MemberSeconds.of(timing, workload.classes, together).longest(workload.trajectories),
                )
            )
        return options

    def _training_option(self, replicas: int) -> TrainingOption:
        tokens = self.workload.trajectories * self.workload.train_tokens
        # Trainers wait until all engines have loaded the new weights, so no step is shorter than training and loading.
        seconds = self.profile.train.step_seconds(tokens, replicas) + self.profile.switch.weight_load
        return TrainingOption(ONE_DEVICE, _POOL, devices=replicas, replicas=replicas, seconds=seconds, publish=0.0)


SLOT_CLASSES = 8  # few enough to read in a plan, and to solve quickly (`python -m benchmarks.planning`)


def make_tracker(planner: PlannerConfig) -> LengthTracker:
    """An empty tracker with the configuration's half-life and the engine's block size."""
    return LengthTracker(planner.half_life, block_tokens=BLOCK_TOKENS)


def engine_shapes(engines: Mapping[str, ShapeConfig]) -> tuple[EngineShape, ...]:
    """The engine sizes of the configuration, shortest first."""
    return tuple(
        EngineShape(name, shape.max_model_len, shape.max_num_seqs, shape.kv_tokens)
        for name, shape in sorted(engines.items(), key=lambda item: item[1].max_model_len)
    )


def longest_context(engines: Mapping[str, ShapeConfig]) -> int:
    """Tokens beyond which no trajectory can grow: the context of the longest engine size."""
    return max(shape.max_model_len for shape in engines.values())


def make_request(
    training: TrainingConfig,
    engines: Mapping[str, ShapeConfig],
    classes: tuple[TrajectoryClass, ...],
    profile: DeviceProfile,
    *,
    fleet: SlotCounts,
    max_turn_tokens: int,
    train_tokens: float,
    router_hit: float,
    current: Allocation | None,
    lent: LentSlots | None = None,
) -> SlotRequest:
    """The request for work of these classes. The keyword arguments are fields of `SlotRequest` and `StepWorkload`.
    Raises ValueError if no engine size holds one of the classes."""
    return SlotRequest(
        fleet=fleet,
        shapes=engine_shapes(engines),
        profile=profile,
        workload=StepWorkload(
            trajectories=training.trajectories,
            group_size=training.samples_per_prompt,
            max_staleness=training.max_staleness,
            max_turn_tokens=max_turn_tokens,
            longest_context=longest_context(engines),
            train_tokens=train_tokens,
            router_hit=router_hit,
            classes=classes,
        ),
        current=current,
        lent=lent,
    )
