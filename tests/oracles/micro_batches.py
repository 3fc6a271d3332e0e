"""Time of micro-batches that pass a ring of stages, layer after layer: attention, a link, FFN, a link back.

Invariant: whole numbers in, whole numbers out, and exact; a micro-batch begins in a stage when it has left the one
before and, in a serial stage, when the micro-batch before it has left. They keep their order in every layer.

`serial` stages carry one micro-batch at a time; a link that carries all of them at once is a delay only.
"""

from __future__ import annotations

from collections.abc import Sequence


def makespan(times: Sequence[Sequence[int]], serial: Sequence[bool], layers: int) -> int:
    """Time from the first micro-batch's start in the first layer to the last one's end in the last, event by event;
    `times[s][i]` is the time of micro-batch `i` in stage `s` of any layer."""
    free = [0] * len(times)
    ready = [0] * len(times[0])
    for _ in range(layers):
        for i, at in enumerate(ready):
            for s, row in enumerate(times):
                if serial[s]:
                    at = free[s] = max(at, free[s]) + row[i]
                else:
                    at += row[i]
            ready[i] = at
    return max(ready)


def alike_makespan(stages: Sequence[int], serial: Sequence[bool], micro_batches: int, layers: int) -> int:
    """`makespan` of identical micro-batches, in closed form.

    The critical path follows one micro-batch through the stages of a layer (`around`), or passes from micro-batch to
    micro-batch in the longest serial stage. Its length does not depend on which layers take which way, so all but the
    first take the longer one: a layer takes max(micro_batches x longest, around), the period of MegaScale-Infer (arXiv
    2504.02263, section 4).
    """
    around = sum(stages)
    longest = max(stage for stage, one in zip(stages, serial, strict=True) if one)
    return around + (micro_batches - 1) * longest + (layers - 1) * max(micro_batches * longest, around)
