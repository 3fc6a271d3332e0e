"""Statistics of trajectories' lengths, tracked as they drift.

Invariant: every answer uses the same weighted evidence. A running trajectory is evidence of its work so far, in tokens
and tools, never of its final length.
"""

from libra.lengths.classes import TAIL_SHARE, TrajectoryClass
from libra.lengths.evidence import FALSE_ALARM_RATE, Drift
from libra.lengths.forecast import LengthForecast
from libra.lengths.tracker import LengthTracker

__all__ = ["FALSE_ALARM_RATE", "TAIL_SHARE", "Drift", "LengthForecast", "LengthTracker", "TrajectoryClass"]
