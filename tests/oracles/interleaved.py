"""Interleaved 1F1B, operation by operation: the order of Megatron-LM's schedule, and when each operation ends.

Independent of `libra.cost`: every operation waits for the previous operation on its device and for the operation whose
result it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
    backward: bool
    part: int  # virtual stage of the device
    micro: int  # micro-batch


def order(rank: int, stages: int, virtual: int, count: int) -> list[Operation]:
    """Operations of one device: parts of `stages` micro-batches take turns, backwards in reverse order of parts."""

    def at(step: int, backward: bool) -> Operation:
        turn, within = divmod(step, stages * virtual)
        part, micro = divmod(within, stages)
        return Operation(backward, virtual - 1 - part if backward else part, turn * stages + micro)

    total = count * virtual
    ahead = min(total, stages - rank - 1 if virtual == 1 else 2 * (stages - rank - 1) + (virtual - 1) * stages)
    found = [at(step, False) for step in range(ahead)]
    for step in range(ahead, total):
        found += [at(step, False), at(step - ahead, True)]
    return found + [at(step, True) for step in range(total - ahead, total)]


def seconds(stages: int, virtual: int, count: int, of: Callable[[int, int, int, bool], float]) -> float:
    """Seconds at which the last operation ends. An operation takes `of(rank, part, micro-batch, backward)` seconds."""
    orders = [order(rank, stages, virtual, count) for rank in range(stages)]
    position = [{operation: at for at, operation in enumerate(each)} for each in orders]
    last = stages * virtual - 1

    def needed(rank: int, operation: Operation) -> tuple[int, Operation] | None:
        place = operation.part * stages + rank  # in the model
        if not operation.backward:
            if place == 0:
                return None
            part, before = divmod(place - 1, stages)
            return before, Operation(False, part, operation.micro)
        if place == last:
            return rank, Operation(False, operation.part, operation.micro)
        part, after = divmod(place + 1, stages)
        return after, Operation(True, part, operation.micro)

    ended: dict[tuple[int, int], float] = {}
    reached = [0] * stages
    while any(at < len(each) for at, each in zip(reached, orders, strict=True)):
        before = list(reached)
        for rank, each in enumerate(orders):
            while reached[rank] < len(each):
                operation = each[reached[rank]]
                source = needed(rank, operation)
                key = None if source is None else (source[0], position[source[0]][source[1]])
                if key is not None and key not in ended:
                    break
                free = ended.get((rank, reached[rank] - 1), 0.0)
                start = max(free, 0.0 if key is None else ended[key])
                ended[rank, reached[rank]] = start + of(rank, operation.part, operation.micro, operation.backward)
                reached[rank] += 1
        assert reached != before, "the schedule waits for itself"
    return max(ended.values())


def most_held(rank: int, stages: int, virtual: int, count: int) -> float:
    """Most micro-batches whose activations a device has at once. A part counts as its share of the device's layers."""
    held = most = 0
    for operation in order(rank, stages, virtual, count):
        held += -1 if operation.backward else 1
        most = max(most, held)
    return most / virtual
