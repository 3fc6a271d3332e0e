"""From a configuration to the statistics that are tracked, and from those to a `SlotRequest`.

Invariant: what the configuration decides is read here and nowhere else, so planning offline and planning during a run
ask the same question; everything else is the caller's to know, and none of it has a default.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra.config.run import PlannerConfig, ShapeConfig, TrainingConfig
from libra.cost.device import DeviceProfile
from libra.cost.engine_facts import BLOCK_TOKENS
from libra.lengths import LengthTracker, TrajectoryClass
from libra.plan.options.slots import EngineShape, SlotCounts, SlotRequest, StepWorkload
from libra.plan.problem import Allocation

SLOT_CLASSES = 8  # few enough to read in a plan, and to solve quickly (`python -m benchmarks.planning`)


def make_tracker(planner: PlannerConfig) -> LengthTracker:
    """An empty tracker that forgets as the configuration says and knows the engine's blocks."""
    return LengthTracker(planner.half_life, block_tokens=BLOCK_TOKENS)


def engine_shapes(engines: Mapping[str, ShapeConfig]) -> tuple[EngineShape, ...]:
    """The engine sizes of the configuration, shortest first."""
    return tuple(
        EngineShape(name, shape.max_model_len, shape.max_num_seqs, shape.kv_tokens)
        for name, shape in sorted(engines.items(), key=lambda item: item[1].max_model_len)
    )


def longest_context(engines: Mapping[str, ShapeConfig]) -> int:
    """Tokens beyond which no trajectory can grow: what the longest engine size holds."""
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
) -> SlotRequest:
    """The question for work of these classes. The keyword arguments are fields of `SlotRequest` and `StepWorkload`.
    Raises ValueError where no engine size holds one of the classes."""
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
    )
