"""Time of micro-batches that pass a ring of stages, layer after layer: attention, a link, FFN, a link back.

Invariant: times are exact whole numbers. A micro-batch begins in a stage when it has left the previous stage and, in a
serial stage, when the previous micro-batch has left. Micro-batches keep their order in every layer.

`serial` stages carry one micro-batch at a time. A link that carries all micro-batches at once is only a delay.
"""

from __future__ import annotations

from collections.abc import Sequence


def makespan(times: Sequence[Sequence[int]], serial: Sequence[bool], layers: int) -> int:
    """Time from the first micro-batch's start in the first layer to the last micro-batch's end in the last layer, event
    by event. `times[s][i]` is the time of micro-batch `i` in stage `s` of any layer."""
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

    In each layer, the critical path follows one micro-batch through the stages (`around`), or passes from micro-batch
    to micro-batch in the longest serial stage. All layers but the first take the longer of the two ways, which is
    max(micro_batches x longest, around), the period of MegaScale-Infer (arXiv 2504.02263, section 4).
    """
    around = sum(stages)
    longest = max(stage for stage, one in zip(stages, serial, strict=True) if one)
    return around + (micro_batches - 1) * longest + (layers - 1) * max(micro_batches * longest, around)
