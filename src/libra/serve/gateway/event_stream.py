"""Server-sent events as they pass (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).

Invariant: the events' bytes, joined, are the stream's bytes. That is why this is no library: parsers give the fields of
an event without its bytes, and a stream that is passed on must not be rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LARGEST = 64 * 2**20  # bytes of one event
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?:\r\n|\r|\n)")  # the end of a line, and an empty line


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    raw: bytes  # with the empty line that ends it

    @property
    def data(self) -> bytes:
        """The values of its `data` fields, each a line."""
        values = []
        for line in _LINE_END.split(self.raw.removeprefix(_BOM)):
            field, _, value = line.partition(b":")
            if field == b"data":
                values.append(value.removeprefix(b" "))
        return b"\n".join(values)


class EventStream:
    """Call `feed` with each chunk, and `rest` at the end of the stream."""

    def __init__(self) -> None:
        self._held = bytearray()  # the unfinished event
        self._after_cr = False  # a line feed that follows belongs to the carriage return before it

    def feed(self, chunk: bytes) -> Iterator[StreamedEvent]:
        """Finished events, and comment lines at once: they are keep-alives. Raises ValueError for an event that grows
        without end."""
        held = self._held
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                yield StreamedEvent(b"\n")
                chunk = chunk[1:]
        searched = max(0, len(held) - 2)
        held += chunk
        begin = 0
        for end in _EVENT_END.finditer(held, searched):
            yield self._passed(begin, end.end())
            begin = end.end()
        while held.startswith(b":", begin) and (line := _LINE_END.search(held, begin)) is not None:
            yield self._passed(begin, line.end())
            begin = line.end()
        del held[:begin]
        if len(held) > _LARGEST:
            raise ValueError(f"a server-sent event of more than {_LARGEST} bytes")

    def rest(self) -> StreamedEvent:
        """The event that the stream left unfinished."""
        event = StreamedEvent(bytes(self._held))
        self._held.clear()
        return event

    def _passed(self, begin: int, end: int) -> StreamedEvent:
        self._after_cr = end == len(self._held) and self._held[end - 1] == ord("\r")
        return StreamedEvent(bytes(self._held[begin:end]))
