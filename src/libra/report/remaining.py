"""Estimates of the time that a series of steps still needs, from the pace of its latest ones."""

from __future__ import annotations

from collections import deque

_RECENT = 20  # steps that the pace is the mean of: a run that becomes slower is followed, one slow step is not


class RemainingTime:
    """Estimates when `total` steps are done. It has no clock: moments are seconds that the caller gives."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_RECENT + 1)

    def observe(self, done: int, total: int, now: float) -> float | None:
        """Seconds that the remaining steps need when `done` are done at `now`; None before two moments are known."""
        if self._seen and done < self._seen[-1][0]:
            self._seen.clear()  # another series begins
        if not self._seen or done > self._seen[-1][0]:
            self._seen.append((done, now))
        first, began = self._seen[0]
        if done == first:
            return None
        return (now - began) / (done - first) * max(0, total - done)
