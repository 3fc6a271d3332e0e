"""The difference between two allocations as moves, which the plan prices and the executor carries out.

Invariant: on one machine, every device takes at most one new duty, except a device that temporarily replaces another.
The run can continue after each move (see `unsafe`). On a cluster, groups of devices end and begin; a group that keeps
its place is not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from libra.plan.allocation import Allocation
from libra.plan.placement import DeviceGroup
from libra.plan.problem import TrainingOption


class Role(StrEnum):
    """The role of a worker. Only an executor sees the transitional roles `joining` and `draining`, and `failed`."""

    IDLE = "idle"
    JOINING = "joining"  # a process is starting, or entering the gradient exchange
    ROLLOUT = "rollout"
    TRAIN = "train"
    DRAINING = "draining"  # finishes its work, and accepts no new work
    FAILED = "failed"  # its process has ended


@dataclass(frozen=True, slots=True)
class Duty:
    """The steady role of a device or a group of devices. `shape` is the shape of an engine, or the layout of a replica
    on several devices.
    """

    role: Role
    shape: str | None = None

    def __post_init__(self) -> None:
        if self.role is Role.ROLLOUT and self.shape is None:
            raise ValueError("a rollout duty has no shape; give the shape of its engine")
        if self.role not in (Role.ROLLOUT, Role.TRAIN) and self.shape is not None:
            raise ValueError(f"a duty of {self.role} has shape {self.shape}; only engines and replicas have one")

    def __str__(self) -> str:
        return f"{self.role}:{self.shape}" if self.shape is not None else str(self.role)


IDLE, TRAIN = Duty(Role.IDLE), Duty(Role.TRAIN)
_AS = " as "  # between the shape of an engine and its role in a prefill/decode pair


@dataclass(frozen=True, slots=True)
class Device:
    """One healthy device of a machine. `allowed` are the roles that it may take in addition to `idle`."""

    id: str
    slot: int
    allowed: frozenset[Role]
    duty: Duty = IDLE
    lent: str | None = None  # shape of the only engine that may run there, if the device serves users; else None


@dataclass(frozen=True, slots=True)
class Move:
    """A change of duty. `worker` is the id of a device, or the location of a group of devices."""

    worker: str
    before: Duty
    after: Duty

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Transition:
    """The moves from one allocation to another. `before` is None if nothing runs that could continue."""

    before: Allocation | None
    after: Allocation
    moves: tuple[Move, ...]  # in order; on a cluster, all groups that end come before groups that begin

    @property
    def rebuckets(self) -> bool:
        """Whether the router needs other bucket ranges."""
        return self.before is None or self.before.ranges != self.after.ranges

    def words(self) -> tuple[str, ...]:
        """The moves as a text, with equal moves counted."""
        counts = Counter(str(move) for move in self.moves)
        moves = [f"{count} x {text}" if count > 1 else text for text, count in counts.items()]
        return (*moves, "new bucket ranges") if self.rebuckets else tuple(moves)

    def conflict(self, duties: Mapping[str, Duty]) -> str | None:
        """The reason why the moves do not apply to workers with these duties; None if they do."""
        now = dict(duties)
        for move in self.moves:
            if move.worker not in now:
                return f"there is no worker {move.worker}"
            if now[move.worker] != move.before:
                return f"the duty of {move.worker} is {now[move.worker]}, not {move.before}"
            now[move.worker] = move.after
        wanted = Counter({Duty(Role.ROLLOUT, shape): count for shape, count in self.after.engines_by_shape.items()})
        wanted[TRAIN] = self.after.replicas
        made = Counter(duty for duty in now.values() if duty != IDLE)
        return None if made == wanted else f"the moves do not lead to {self.after.describe()}"


def unsafe(devices: Sequence[Device], move: Move, longest: Collection[str]) -> str | None:
    """The reason why the move is unsafe now; None if it is safe. `longest` are the shapes that hold the longest
    contexts.

    While a device moves, a core replica must train and, if several engines run, another engine must hold the longest
    contexts. If such a replica or engine is already missing, moves that do not make it worse are safe, so that the run
    can recover.
    """
    others = [device for device in devices if device.id != move.worker and device.lent is None]
    cores = [device.id for device in devices if device.duty.role is Role.TRAIN and device.allowed == {Role.TRAIN}]
    if cores == [move.worker]:
        return f"{move.worker} is the last core replica"
    if move.before.shape not in longest or any(device.duty.shape in longest for device in others):
        return None
    if move.after.shape not in longest:
        return f"{move.worker} is the last engine for the longest contexts"
    if any(device.duty.role is Role.ROLLOUT for device in others):
        return f"no other engine holds the longest contexts while {move.worker} starts again"
    return None


def device_transition(
    devices: Sequence[Device], before: Allocation | None, wanted: Allocation, longest: Collection[str]
) -> Transition:
    """The fewest moves that turn the healthy `devices` of a machine into `wanted`; each device is a replica or an
    engine.

    Idle devices start first, since this interrupts no work and helps even if a later move fails. Then trainers leave.
    Engines for longer contexts start before others, and replicas join training last. `longest` are the shapes that hold
    the longest contexts. Raises ValueError if the devices cannot form `wanted`, or if none of its engines holds the
    longest contexts.
    """
    if not any(bucket.shape in longest for bucket in wanted.buckets):
        raise ValueError(f"no engine of {wanted.describe()} holds the longest contexts; {', '.join(longest)} would")
    kept = _kept_engines(devices, wanted)
    may_train = sorted(
        (device for device in devices if Role.TRAIN in device.allowed),
        # Devices that can only train come first, then devices that train already, then devices whose engine is not
        # kept. Of these, an engine for the longest contexts comes first, so that its replacement can start before it
        # ends.
        key=lambda d: (
            Role.ROLLOUT in d.allowed,
            d.duty.role is not Role.TRAIN,
            d.id in kept,
            d.duty.shape not in longest,
            d.slot,
        ),
    )
    training = may_train[: wanted.replicas]
    if len(training) < wanted.replicas:
        raise ValueError(f"{wanted.replicas} replicas are wanted, but only {len(training)} workers may train")
    missing = wanted.engines_by_shape
    for shape, count in Counter(device.lent for device in devices if device.lent is not None).items():
        if missing[shape] not in (0, count):
            raise ValueError(f"{missing[shape]} engines of {shape} are wanted, and {count} devices are lent for them")
    # An engine on a lent device that is not wanted stays: no other engine needs the device, and it gets no turns.
    generating = [
        device for device in devices if device not in training and (device.lent is None or missing[device.lent])
    ]
    if len(generating) != missing.total() or any(Role.ROLLOUT not in device.allowed for device in generating):
        raise ValueError(f"{missing.total()} engines are wanted, but {len(generating)} workers are left for them")
    moving, starts = [], []
    for device in generating:
        if device.duty.shape is not None and missing[device.duty.shape] > 0:
            missing[device.duty.shape] -= 1
        elif device.lent is not None:
            starts.append(Move(device.id, device.duty, Duty(Role.ROLLOUT, device.lent)))
            missing[device.lent] -= 1
        else:
            moving.append(device)
    longest_first = [bucket.shape for bucket in reversed(wanted.buckets) for _ in range(missing[bucket.shape])]
    moving.sort(key=lambda d: (d.duty != IDLE, d.duty.role is not Role.TRAIN, d.duty.shape in longest, d.slot))
    starts += [
        Move(device.id, device.duty, Duty(Role.ROLLOUT, shape))
        for device, shape in zip(moving, longest_first, strict=True)
    ]
    joins = [Move(device.id, device.duty, TRAIN) for device in training if device.duty.role is not Role.TRAIN]
    moves = sorted([*starts, *joins], key=lambda move: move.before != IDLE)
    return Transition(before, wanted, _without_a_gap(devices, moves, longest))


def _without_a_gap(devices: Sequence[Device], moves: Sequence[Move], longest: Collection[str]) -> tuple[Move, ...]:
    """Avoid times without an engine for the longest contexts. If the only such engine restarts in another shape that
    holds them, another engine first takes this shape, by one more move.
    """
    state = {device.id: device for device in devices}
    found: list[Move] = []
    for index, planned in enumerate(moves):
        move = replace(planned, before=state[planned.worker].duty)
        steps = [move]
        if unsafe([*state.values()], move, longest):
            moves_later = {later.worker for later in moves[index + 1 :]}
            engines = [
                d for d in state.values() if d.duty.role is Role.ROLLOUT and d.id != move.worker and d.lent is None
            ]
            stands_in = min(engines, key=lambda d: (d.id in moves_later, d.slot))
            # The two devices exchange duties, unless the other one moves later anyway.
            instead = move.after if stands_in.id in moves_later else stands_in.duty
            steps = [Move(stands_in.id, stands_in.duty, move.after), replace(move, after=instead)]
        for step in steps:
            state[step.worker] = replace(state[step.worker], duty=step.after)
        found += steps
    return tuple(found)


def _kept_engines(devices: Sequence[Device], wanted: Allocation) -> set[str]:
    """Ids of the engines that `wanted` keeps unchanged. Engines on devices that cannot train are kept first."""
    missing = wanted.engines_by_shape
    kept = set()
    for device in sorted(devices, key=lambda d: (Role.TRAIN in d.allowed, -d.slot)):
        if device.duty.shape is not None and missing[device.duty.shape] > 0:
            missing[device.duty.shape] -= 1
            kept.add(device.id)
    return kept


def group_transition(
    before: Allocation, wanted: Allocation, placed: Sequence[DeviceGroup] = (), placement: Sequence[DeviceGroup] = ()
) -> Transition:
    """The groups that end and begin on a cluster; a group is the devices of one engine or replica.

    `placed` and `placement` are the locations of the groups before and after: a displaced group restarts at another
    location. Without them, every group of a remaining kind is assumed to keep its place. A change of layout restarts
    all replicas.
    """
    known = bool(placed and placement)
    old = Counter(map(_located, placed)) if known else _groups(before)
    new = Counter(map(_located, placement)) if known else _groups(wanted)
    stops = [Move(where, duty, IDLE) for where, duty in (old - new).elements()]
    starts = [Move(where, IDLE, duty) for where, duty in (new - old).elements()]
    # In both lists, engines come before replicas. Engines for longer contexts start first.
    starts.reverse()
    by_role = [sorted(moves, key=_replicas_last) for moves in (stops, starts)]
    return Transition(before, wanted, (*by_role[0], *by_role[1]))


def _replicas_last(move: Move) -> bool:
    return Role.TRAIN in (move.before.role, move.after.role)


def _located(group: DeviceGroup) -> tuple[str, Duty]:
    role = Role.TRAIN if group.role == "train" else Role.ROLLOUT
    nodes, gpus = (",".join(map(str, numbers)) for numbers in (group.nodes, group.gpus))
    shape = group.name if group.role in ("train", "generate") else f"{group.name}{_AS}{group.role}"
    return f"{group.pool} nodes {nodes} GPUs {gpus}", Duty(role, shape)


def engine_shape(duty: Duty) -> str | None:
    """The shape of the engine to start for a duty. Engines of a pair differ only in their role."""
    return None if duty.shape is None else duty.shape.partition(_AS)[0]


def _groups(allocation: Allocation) -> Counter[tuple[str, Duty]]:
    groups = Counter({("", Duty(Role.TRAIN, allocation.layout)): allocation.replicas})
    for shape, engines in allocation.engines_by_shape.items():
        groups["", Duty(Role.ROLLOUT, shape)] += engines
    return groups


def joins(current: Allocation, training: TrainingOption) -> int:
    """Number of replicas to start for a training option; a change of layout restarts all replicas."""
    return max(0, training.replicas - (current.replicas if training.layout == current.layout else 0))
