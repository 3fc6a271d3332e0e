"""Server-sent events, cut out of a stream without changing it.

Invariant: the events' bytes, joined, are the stream's bytes. No library is used for this, since parsers give the fields
of an event without its bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).
"""

from __future__ import annotations

import re

EVENT_STREAM = "text/event-stream"
_LARGEST_EVENT = 64 * 2**20  # bytes of one event
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?:\r\n|\r|\n)")  # the end of a line, and an empty line


def data_of(event: bytes) -> bytes:
    """The values of an event's `data` fields, one a line."""
    values = []
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        if field == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values)


class EventStream:
    """Call `feed` with each chunk, and `rest` at the end of the stream."""

    def __init__(self) -> None:
        self._held = bytearray()  # the unfinished event
        self._after_cr = False  # a line feed that follows belongs to the carriage return before it

    @property
    def unfinished(self) -> bool:
        """Whether the next chunk continues an event, or the line end of the last one."""
        return bool(self._held) or self._after_cr

    def feed(self, chunk: bytes) -> list[bytes]:
        """Finished events, each with the empty line at its end, and comment lines at once: they are keep-alives. Raises
        ValueError for an event above the size limit."""
        held = self._held
        if not self.unfinished and b"\r" not in chunk:
            *events, rest = chunk.split(b"\n\n")
            if not rest:  # as engines send them
                return [chunk] if len(events) == 1 else [event + b"\n\n" for event in events]
        events = []
        if self._after_cr and chunk.startswith(b"\n"):
            events.append(b"\n")
            chunk = chunk[1:]
        searched = max(0, len(held) - 2)
        held += chunk
        begin = 0
        for end in _EVENT_END.finditer(held, searched):
            events.append(bytes(held[begin : end.end()]))
            begin = end.end()
        while held.startswith(b":", begin) and (line := _LINE_END.search(held, begin)) is not None:
            events.append(bytes(held[begin : line.end()]))
            begin = line.end()
        self._after_cr = 0 < begin == len(held) and held[-1] == ord("\r")
        del held[:begin]
        if len(held) > _LARGEST_EVENT:
            raise ValueError(f"a server-sent event of more than {_LARGEST_EVENT} bytes")
        return events

    def rest(self) -> bytes:
        """The event that the stream left unfinished."""
        rest = bytes(self._held)
        self._held.clear()
        return rest
