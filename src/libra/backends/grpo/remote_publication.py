"""The publication of a core on another node, through the relay beside it.

Invariant: as for a core of the same node, what is read is whole or refused. Once the relay was silent, unclear or gone
this end is closed for good.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator, Sequence

from libra.backends.grpo.gradient_ring import Update
from libra.backends.grpo.publication import OverrunError, Shape, State, UnreachableError, overwritten
from libra.backends.grpo.state_stream import SILENT_SECONDS, Request, StateStream, Verdict
from libra.backends.transport.messages import RelayPlace
from libra.backends.transport.shared_vectors import LayoutError, Vector

_STARTING_SECONDS = 30.0  # the relay's socket is there before its process has started


class RemotePublication:
    """See `Publication`."""

    def __init__(self, place: RelayPlace, shape: Shape) -> None:
        """Raises `LayoutError`, and `OSError` when the relay is not there or does not take the token."""
        self._stream = StateStream(socket.create_connection((place.host, place.port), SILENT_SECONDS))
        weakref.finalize(self, self._stream.close)
        self._stream.greet(place.token, shape)
        if self._stream.verdict(_STARTING_SECONDS) is not Verdict.YES:
            raise LayoutError("the core publishes another model or precision: all replicas must train the same")

    def at_rest(self) -> bool:
        with self._reaching():
            self._stream.ask(Request.AT_REST)
            return self._stream.verdict() is Verdict.YES

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        with self._reaching():
            self._stream.ask(Request.COPY_STATE)
            if self._stream.verdict() is not Verdict.YES:
                return None
            state = self._stream.state()
            return state if self._stream.fill(into) else None

    def has_update(self, number: int) -> bool:
        with self._reaching():
            self._stream.ask(Request.HAS_UPDATE, number)
            verdict = self._stream.verdict()
        if verdict is Verdict.OVERRUN:
            raise OverrunError(f"the update to state {number} is gone")
        return verdict is Verdict.YES

    def copy_update(self, number: int, into: Vector) -> Update:
        with self._reaching():
            self._stream.ask(Request.COPY_UPDATE, number)
            update = self._stream.update()
            whole = self._stream.fill([into])
        if not whole:
            raise overwritten(number)
        return update

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._stream.close()
            raise UnreachableError(f"the core cannot be reached any more: {error}") from error
