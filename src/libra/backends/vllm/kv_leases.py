"""Which frames of the shared memory are whose.

Invariant: a frame is in one parcel at a time. It is free again when the engine that takes it has done so, and not
before the engine that fills it has, or is gone: nobody writes into a frame that is somebody else's by then.
"""

from __future__ import annotations

from pathlib import Path

from libra.backends.transport.messages import Parcel


class KVLeases:
    def __init__(self, frames: int) -> None:
        self._free = list(range(frames))
        self._written_by: list[tuple[int, Parcel]] = []  # by a process that may not have heard that it shall not
        self._parcels = 0

    @property
    def free(self) -> int:
        """Frames that nobody has."""
        self._reclaim()
        return len(self._free)

    def lease(self, blocks: int) -> Parcel | None:
        """A parcel of so many frames, the ones that were last in use first; None: there are not so many."""
        if blocks > self.free:
            return None
        self._parcels += 1
        return Parcel(self._parcels, [self._free.pop() for _ in range(blocks)])

    def release(self, parcel: Parcel) -> None:
        """Its frames may be given to others."""
        self._free += reversed(parcel.frames)

    def release_after(self, process: int, parcel: Parcel) -> None:
        """Its frames may be given to others once the process that was to fill them is gone."""
        self._written_by.append((process, parcel))

    def _reclaim(self) -> None:
        writing = []
        for process, parcel in self._written_by:
            if Path(f"/proc/{process}").exists():
                writing.append((process, parcel))
            else:
                self.release(parcel)
        self._written_by = writing
