"""Which frames of the shared memory are whose.

Invariant: a frame is in one transfer at a time. It is free again when the engine that takes it has done so, and not
before the engine that fills it has, or is gone: nobody writes into a frame that is somebody else's by then.
"""

from __future__ import annotations

from pathlib import Path

from libra.backends.transport.messages import KVTransfer


class KVLeases:
    def __init__(self, frames: int) -> None:
        self._free = list(range(frames))
        self._written_by: list[tuple[int, KVTransfer]] = []  # by a process that may not have heard that it shall not
        self._transfers = 0

    @property
    def free(self) -> int:
        """Frames that nobody has."""
        self._reclaim()
        return len(self._free)

    def lease(self, blocks: int) -> KVTransfer | None:
        """A transfer of so many frames, the ones that were last in use first; None: there are not so many."""
        if blocks > self.free:
            return None
        self._transfers += 1
        return KVTransfer(self._transfers, [self._free.pop() for _ in range(blocks)])

    def release(self, transfer: KVTransfer) -> None:
        """Its frames may be given to others."""
        self._free += reversed(transfer.frames)

    def release_after(self, process: int, transfer: KVTransfer) -> None:
        """Its frames may be given to others once the process that was to fill them is gone."""
        self._written_by.append((process, transfer))

    def _reclaim(self) -> None:
        writing = []
        for process, transfer in self._written_by:
            if Path(f"/proc/{process}").exists():
                writing.append((process, transfer))
            else:
                self.release(transfer)
        self._written_by = writing
