"""One agent episode as token counts and tool outcomes, its files, and statistics of logs."""

from libra.trajectory.log_file import read_trajectories, read_workload
from libra.trajectory.record import (
    ToolStatus,
    Trajectory,
    TrajectoryFormatError,
    Turn,
    dump_trajectory,
    parse_trajectory,
    truncate,
    write_trajectories,
)

__all__ = [
    "ToolStatus",
    "Trajectory",
    "TrajectoryFormatError",
    "Turn",
    "dump_trajectory",
    "parse_trajectory",
    "read_trajectories",
    "read_workload",
    "truncate",
    "write_trajectories",
]
