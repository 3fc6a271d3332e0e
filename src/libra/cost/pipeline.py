"""Seconds of a pipeline with different micro-batches: 1F1B, plain or interleaved.

Invariant: each device runs its operations in the order of Megatron-LM. An operation starts when the device is free and
its input has arrived. Times are seconds.

Source: Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2. Let each of p devices have v parts of the model. For m equal
micro-batches and equal stages, the idle share is (p - 1) / (v m + p - 1) of a step, and (p - 1) / (v m) of the busy
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def pipeline_seconds(
    forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], virtual: int = 1
) -> float:
    """Seconds from the first forward to the last backward.

    `forward` and `backward` are [part][micro-batch], with parts in the order of the model. The first of p devices has
    the `virtual` parts 0, p, 2 p, .... For forwards alone (log-probabilities), give backwards of 0 seconds. The given
    seconds include sending. With more than one part per device, the number of micro-batches is a multiple of p.
    """
    parts = len(forward)
    if parts == 0 or not forward[0]:
        raise ValueError("there is no stage or no micro-batch; give one or more of both")
    count, devices = len(forward[0]), parts // virtual
    if len(backward) != parts or any(len(row) != count for row in (*forward, *backward)):
        raise ValueError(f"forward is {parts} x {count}; give every stage as many forwards as backwards")
    if virtual > 1 and (parts % virtual or count % devices):
        raise ValueError(
            f"{parts} parts and {count} micro-batches are not multiples of {virtual} virtual stages and {devices}"
            " devices: give all devices the same number of parts, and a number of micro-batches that the devices divide"
        )
    orders = [_order(device, devices, virtual, count) for device in range(devices)]
    # Ends of forwards, then of backwards; below 0: not yet.
    ends = [[-1.0] * count for _ in range(2 * parts)]
    seconds = (*forward, *reversed(backward))
    free, at = [0.0] * devices, [0] * devices
    steps = len(orders[0])
    while at[0] < steps or min(at) < steps:
        for device, order in enumerate(orders):
            now, step = free[device], at[device]
            while step < steps:
                row, micro = order[step]
                arrived = ends[row - 1][micro] if row else 0.0
                if arrived < 0:
                    break
                now = (arrived if arrived > now else now) + seconds[row][micro]
                ends[row][micro] = now
                step += 1
            free[device], at[device] = now, step
    return max(free)


@lru_cache(maxsize=4096)
def _order(device: int, devices: int, virtual: int, count: int) -> tuple[tuple[int, int], ...]:
    """Operations of one device as (row, micro-batch). Rows are the forward parts, then the backward parts, in the order
    of a micro-batch. The device first runs some forwards, then alternates one forward and one backward, then runs the
    remaining backwards. Interleaved, parts of `devices` micro-batches alternate.
    """
    parts, total = devices * virtual, count * virtual
    group = devices if virtual > 1 else 1

    def operation(step: int, first: int) -> tuple[int, int]:
        turn, within = divmod(step, group * virtual)
        part, micro = divmod(within, group)
        return first + part * devices, turn * group + micro

    forwards = [operation(step, device) for step in range(total)]
    backwards = [operation(step, 2 * parts - 1 - device - (virtual - 1) * devices) for step in range(total)]
    ahead = devices - device - 1 if virtual == 1 else 2 * (devices - device - 1) + (virtual - 1) * devices
    ahead = min(ahead, total)
    mixed = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
    return (*forwards[:ahead], *mixed, *backwards[total - ahead :])
