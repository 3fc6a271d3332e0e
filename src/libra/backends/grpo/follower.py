"""A joiner on its way to a core's state, beside the core and at its own pace.

Invariant: the replica holds exactly state `number` of the core it follows, or knows that it holds none. It takes one
snapshot and then the updates that came since, each once and in order; what it missed it makes up by a new snapshot, a
bounded number of times.
"""

from __future__ import annotations

import time

from libra.backends.grpo.publication import OverrunError, Publication
from libra.backends.grpo.train_state import TrainState

SNAPSHOTS = 3  # in a row without catching up; then the core is faster than this replica and has to stand still for it
SILENT_SECONDS = 30.0  # in the middle of one change; an optimiser step takes seconds at most


class BehindError(RuntimeError):
    """The core's state changes faster than this replica can take it over."""


class SilentError(RuntimeError):
    """The core has been in the middle of a change for too long: it hangs, or is gone."""


class Follower:
    def __init__(self, publication: Publication, state: TrainState) -> None:
        self._publication, self._state = publication, state
        self._snapshots = 0  # since the last time there was nothing left to do
        self._changing_since: float | None = None  # when the core was first seen in the change that it is in
        self.number: int | None = None  # of the core's state that is held

    def advance(self) -> None:
        """Go on until nothing more is published, or the core is in the middle of a change that has to end first. Raises
        `BehindError`, `SilentError`, `UnreachableError`."""
        while self.number is None or self._more(self.number + 1):
            if self.number is None:
                if not self._at_rest():
                    return
                self._take_snapshot()
            else:
                self._take_update(self.number + 1)
        self._snapshots = 0

    def _more(self, number: int) -> bool:
        try:
            return self._publication.has_update(number)
        except OverrunError:
            self.number = None
            return True

    def _at_rest(self) -> bool:
        """Whether there is a state to copy now. That there is none yet is no copy that was overtaken."""
        if self._publication.at_rest():
            self._changing_since = None
            return True
        now = time.monotonic()
        if self._changing_since is None:
            self._changing_since = now
        if now - self._changing_since >= SILENT_SECONDS:
            raise SilentError("the core replica does not get done with a change of its state")
        return False

    def _take_snapshot(self) -> None:
        if self._snapshots == SNAPSHOTS:
            raise BehindError(
                f"{SNAPSHOTS} copies of the core's state in a row were overtaken by its steps: each was torn, or more"
                " steps followed than the ring of gradients keeps"
            )
        self._snapshots += 1
        self.number = self._state.take_state(self._publication)

    def _take_update(self, number: int) -> None:
        try:
            self._state.take_update(self._publication, number)
        except OverrunError:
            self.number = None
        else:
            self.number = number
