"""Estimates of the remaining time of a series of steps, from the pace of the latest steps."""

from __future__ import annotations

from collections import deque

_RECENT = 20  # steps in the mean pace: it follows a run that becomes slower, but not one slow step
_FALLS = 0.1  # share by which an estimated total may fall and still count as stable
_HOLDS = 0.1  # share of the total that is done while the total is stable


class RemainingTime:
    """Estimates the time until `total` steps are done. The caller gives moments in seconds.

    `estimated`: totals are estimates that start too high, so the time is unknown until a total has been stable for a
    while. `uneven`: durations of steps vary randomly, so the pace is the mean of all steps.
    """

    def __init__(self, *, estimated: bool = False, uneven: bool = False) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=None if uneven else _RECENT + 1)
        self._estimated = estimated
        self._most, self._fell = 0, 0  # highest total since the last fall, and steps done at that fall

    def observe(self, done: int, total: int, now: float) -> float | None:
        """Seconds for the remaining steps if `done` steps are done at `now`; None if unknown, as before the second
        call.
        """
        if self._seen and done < self._seen[-1][0]:
            self._seen.clear()  # another series begins
        if not self._seen or done > self._seen[-1][0]:
            self._seen.append((done, now))
        if total < (1 - _FALLS) * self._most:
            self._most, self._fell = total, done
        self._most = max(self._most, total)
        first, began = self._seen[0]
        if done == first or (self._estimated and done - self._fell < _HOLDS * total):
            return None
        return (now - began) / (done - first) * max(0, total - done)
