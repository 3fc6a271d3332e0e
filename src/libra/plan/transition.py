"""The way from one allocation to another, as single-device moves in the order in which they are made.

Invariant: a device changes role at most once, no more devices change than have to, and after every move some engine
holds the longest contexts. Trainers are freed before their devices are needed and joined last; the longest shape is
started first and stopped last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from libra.cost.device import SwitchCost
from libra.plan.options.price import ranges
from libra.plan.problem import Allocation, TrainingOption

MoveKind = Literal["train->rollout", "rollout->train", "resize", "idle->rollout", "idle->train", "rebucket"]


@dataclass(frozen=True, slots=True)
class Move:
    """One device changes role, or (`rebucket`) the router takes over new ranges and no device changes.

    `idle` is a healthy device that the current allocation does not use, such as one that has come back.
    """

    kind: MoveKind
    stops: str | None = None  # shape of the engine that is stopped
    starts: str | None = None  # shape of the engine that is started

    def __str__(self) -> str:
        shapes = " -> ".join(shape for shape in (self.stops, self.starts) if shape is not None)
        return f"{self.kind} ({shapes})" if shapes else self.kind


@dataclass(frozen=True, slots=True)
class Change:
    """Groups of devices, engines of one shape or replicas of one layout, that end or begin."""

    kind: Literal["stop", "start"]
    role: Literal["replica", "engine"]
    name: str  # layout of the replicas, or shape of the engines
    count: int

    def __str__(self) -> str:
        return f"{self.kind} {self.count} {self.role}{'s' if self.count > 1 else ''} ({self.name})"


def diff(current: Allocation, wanted: Allocation) -> tuple[Move, ...]:
    """The fewest moves from `current` to `wanted`.

    `current` lists healthy devices: leave lost ones out. If it uses more devices than `wanted`, the surplus that no
    move needs is taken to be the lost ones.
    """
    before, after = engines_by_shape(current), engines_by_shape(wanted)
    idle = wanted.replicas + wanted.engines - current.replicas - current.engines
    freed = [_IDLE] * idle + [_TRAIN] * (current.replicas - wanted.replicas)
    freed += [_Role("rollout", shape) for shape in (before - after).elements()]
    needed = [_Role("rollout", shape) for shape in reversed(list((after - before).elements()))]
    needed += [_TRAIN] * (wanted.replicas - current.replicas)
    moves = [
        Move(_KINDS[source.does, target.does], source.shape, target.shape)
        for source, target in zip(freed, needed, strict=False)
    ]
    if ranges(current) != ranges(wanted):
        moves.append(Move("rebucket"))
    return tuple(moves)


def changes(current: Allocation, wanted: Allocation) -> tuple[Change | Move, ...]:
    """What ends and what begins, where an engine or a replica may have several devices.

    What ends frees the devices of what begins, so it comes first. Another layout ends and begins all replicas.
    """
    before, after = engines_by_shape(current), engines_by_shape(wanted)
    same = current.layout == wanted.layout
    leaving = max(0, current.replicas - wanted.replicas) if same else current.replicas
    joining = max(0, wanted.replicas - current.replicas) if same else wanted.replicas
    found: list[Change | Move] = [Change("stop", "engine", *item) for item in (before - after).items()]
    if leaving:
        found.append(Change("stop", "replica", current.layout, leaving))
    found += [Change("start", "engine", *item) for item in reversed((after - before).items())]
    if joining:
        found.append(Change("start", "replica", wanted.layout, joining))
    if ranges(current) != ranges(wanted):
        found.append(Move("rebucket"))
    return tuple(found)


def seconds(moves: tuple[Move, ...], switch: SwitchCost) -> float:
    """Seconds the moves take, one after the other. Stopping an engine is part of what follows it."""
    cost: dict[MoveKind, float] = {
        "train->rollout": switch.engine_start,
        "rollout->train": switch.trainer_join,
        "resize": switch.engine_start,
        "idle->rollout": switch.engine_start,
        "idle->train": switch.trainer_join,
        "rebucket": 0.0,
    }
    return sum(cost[move.kind] for move in moves)


def joins(current: Allocation, training: TrainingOption) -> int:
    """Replicas that have to be started to train so: another layout starts all of them anew."""
    return max(0, training.replicas - (current.replicas if training.layout == current.layout else 0))


def engines_by_shape(allocation: Allocation) -> Counter[str]:
    """Running engines, in the order of the buckets: shortest first."""
    engines: Counter[str] = Counter()
    for bucket in allocation.buckets:
        engines[bucket.shape] += bucket.engines
    return engines


@dataclass(frozen=True, slots=True)
class _Role:
    does: Literal["idle", "train", "rollout"]
    shape: str | None = None


_IDLE = _Role("idle")
_TRAIN = _Role("train")
_KINDS: dict[tuple[str, str], MoveKind] = {
    ("idle", "rollout"): "idle->rollout",
    ("idle", "train"): "idle->train",
    ("train", "rollout"): "train->rollout",
    ("rollout", "train"): "rollout->train",
    ("rollout", "rollout"): "resize",
}
