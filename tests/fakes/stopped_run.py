"""A resumed run that stops where it has read what an interrupted one left."""

from __future__ import annotations

from libra.config.run import RunConfig

STOPPED = "stopped before it started"


async def read_and_stop(config: RunConfig, environment: object, display: object, resume: bool, planned: str) -> None:
    """Stands in for `libra.loop.run.run`: reads all that a resumed session reads, and stops."""
    from libra.loop.checkpoint import missing_trajectories, read_interrupted
    from libra.plan.problem import InfeasiblePlanError

    if resume:
        missing_trajectories(config.run_directory, read_interrupted(config.run_directory).history.finished)
    raise InfeasiblePlanError(STOPPED)
