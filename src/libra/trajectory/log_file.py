"""Files of trajectories: Libra's JSON lines, and the logs of other tools.

Invariant: one trajectory is in memory at a time. Notes on data that a log lacks come after its last trajectory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from libra.config.input_file import open_input
from libra.trajectory.logs.catalogue import first_entry, foreign_trajectories, format_of, notes_of, require_own
from libra.trajectory.logs.format import LogFormat, LogReading
from libra.trajectory.record import Trajectory, TrajectoryFormatError, parse_trajectory, truncate

Tell = Callable[[str], None]


class LogNote(UserWarning):
    """Warning about data that another framework's log lacks, used if the caller passed no `tell`."""


def warn(note: str) -> None:
    warnings.warn(note, LogNote, stacklevel=3)


def read_trajectories(
    path: Path | str, tell: Tell = warn, *, log_format: LogFormat | None = None, reading: LogReading | None = None
) -> Iterator[Trajectory]:
    """Read a log, with one trajectory in memory at a time.

    The log is Libra's JSON lines or another format, which `log_format` names or its first entry identifies. `tell` is
    called with a line on the data that a foreign log lacks. `reading` counts the tokens of texts. Raises
    `TrajectoryFormatError` with file, line and field, also for a blank line.
    """
    of = log_format
    if of is None and (first := first_entry(path)) is not None:
        of = format_of(first)
        if of is None:
            require_own(first)
    if of is None:
        yield from _own(path)
        return
    reading = LogReading() if reading is None else reading
    yield from foreign_trajectories(path, of, reading)
    for note in notes_of(path, of, reading):
        tell(note)


def _own(path: Path | str) -> Iterator[Trajectory]:
    with open_input(path) as lines:
        for number, line in enumerate(lines, start=1):
            yield parse_trajectory(line, f"{path}:{number}")


def read_workload(
    path: Path | str, max_context: int, truncate_context: bool = False, tell: Tell = warn
) -> Iterator[Trajectory]:
    """Read a log as evidence for the future work of a model with `max_context` tokens. With `truncate_context`, longer
    trajectories are cut. Raises `TrajectoryFormatError` for a longer trajectory otherwise, and at the end if no
    trajectory was finished.
    """
    finished = unfinished = 0
    for number, trajectory in enumerate(read_trajectories(path, tell), start=1):
        if trajectory.peak_context > max_context and not truncate_context:
            raise TrajectoryFormatError(
                f"{path}:{number}: a context of {trajectory.peak_context} tokens, more than the {max_context} that the"
                " model and the request allow: give --truncate-context to cut it there"
            )
        kept = truncate(trajectory, max_context)
        finished += kept.finished
        unfinished += not kept.finished
        yield kept
    if not finished:
        found = f"all {unfinished} trajectories are unfinished" if unfinished else "there is no trajectory"
        raise TrajectoryFormatError(f"{path}: {found}; give a log with at least one finished trajectory")
