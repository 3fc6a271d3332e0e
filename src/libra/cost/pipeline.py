"""The 1F1B pipeline schedule, in seconds.

Invariant: a stage does one thing at a time, in the order 1F1B fixes, and starts it as soon as its input is there. For
equal stages and micro-batches the idle share is (p - 1) / (m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473,
sec. 2.2.1; there relative to the busy time, (p - 1) / m).
"""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_seconds(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> float:
    """Seconds from the first forward to the last backward. `forward` and `backward` are [stage][micro-batch].

    Stage s runs up to `stages - 1 - s` forwards ahead, then one forward and one backward in turn, then the remaining
    backwards. Forwards alone (log-probabilities) are the case of zero backwards. Sending is part of the seconds given.
    """
    stages = len(forward)
    if stages == 0 or not forward[0]:
        raise ValueError("there is no stage or no micro-batch; a pipeline has at least one of each")
    count = len(forward[0])
    if len(backward) != stages or any(len(row) != count for row in (*forward, *backward)):
        raise ValueError(f"forward is {stages} x {count}; give every stage as many forwards as backwards")
    forward_end = [[0.0] * count for _ in range(stages)]
    backward_end = [[0.0] * count for _ in range(stages)]
    free = [0.0] * stages
    forwards, backwards = [0] * stages, [0] * stages
    # Each pass lets every stage do its next operation if the input exists; what is next depends on counts alone.
    while backwards[0] < count:
        for stage in range(stages):
            f, b = forwards[stage], backwards[stage]
            if f < count and f - b < stages - stage:
                if stage == 0 or forwards[stage - 1] > f:
                    start = max(free[stage], forward_end[stage - 1][f]) if stage else free[stage]
                    free[stage] = forward_end[stage][f] = start + forward[stage][f]
                    forwards[stage] = f + 1
            elif b < count and (stage == stages - 1 or backwards[stage + 1] > b):
                start = max(free[stage], backward_end[stage + 1][b]) if stage < stages - 1 else free[stage]
                free[stage] = backward_end[stage][b] = start + backward[stage][b]
                backwards[stage] = b + 1
    return max(free)
