"""The weights of the training side, written by a core replica."""

from __future__ import annotations

from pathlib import Path

from libra.backends.grpo.trainers import Trainers
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.trainer_messages import SaveCheckpoint
from libra.exec.protocols import WorkerFailedError
from libra.records.disk import DiskError


async def save_weights(trainers: Trainers, directory: Path, optimiser: bool) -> None:
    """What a core replica holds, in Hugging Face layout. Raises `DiskError`, and leaves no part of a file then."""
    try:
        await trainers.ask_core(SaveCheckpoint(str(directory.absolute()), optimiser), Acknowledged)
    except WorkerFailedError as error:  # it was alive, and could not do it
        for part in directory.glob("*.part"):
            part.unlink(missing_ok=True)  # it takes space that somebody may need now
        raise DiskError(directory, OSError(0, str(error))) from None
