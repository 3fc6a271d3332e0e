"""Statistics of how long trajectories become, tracked as it drifts.

Invariant: every answer is taken from the same weighted evidence, and what is still running is evidence too: it shows
how much work it has had, tokens and tools, never that this was all.
"""

from libra.lengths.classes import TAIL_SHARE, TrajectoryClass
from libra.lengths.evidence import FALSE_ALARM_RATE, Drift
from libra.lengths.forecast import LengthForecast
from libra.lengths.tracker import LengthTracker

__all__ = ["FALSE_ALARM_RATE", "TAIL_SHARE", "Drift", "LengthForecast", "LengthTracker", "TrajectoryClass"]
