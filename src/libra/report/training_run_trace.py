"""A simulated post-training run as a trace: the steps of its trainer, and the use of lent devices."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from libra.config.rooms import offered
from libra.records.trace import MAX_EVENTS, TraceFile
from libra.sim.training_run.outcome import SimulatedRun

_STEPS, _LOANS = 1, 2  # groups
_WAITS, _TRAINS = 1, 2  # lanes of the first


def write_training_trace(outcome: SimulatedRun, path: Path | str, max_events: int = MAX_EVENTS) -> None:
    """Write the events, unordered, since viewers sort them."""
    with closing(TraceFile(path, max_events)) as trace:
        trace.name_group(_STEPS, "training", _STEPS)
        for lane, name in ((_WAITS, "waits"), (_TRAINS, "steps")):
            trace.name_lane(_STEPS, lane, name, lane)
        for step in outcome.steps[: trace.room // 4]:
            about = {"trajectories": step.trajectories, "staleness": round(step.staleness, 3)}
            _slice(trace, _TRAINS, f"step {step.version}", step.ended - step.training, step.ended, about)
            if step.waited:
                _slice(trace, _WAITS, "waits", step.started - step.waited, step.started, {})
        for draw in offered("training run trace"):
            draw(trace, _LOANS, outcome)


def _slice(trace: TraceFile, lane: int, name: str, start: float, end: float, about: dict[str, float]) -> None:
    start, end = round(1e6 * start), round(1e6 * end)
    trace.slice(_STEPS, lane, name, start, end - start, about)
