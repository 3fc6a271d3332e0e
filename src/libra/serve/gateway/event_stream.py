"""Splits a stream into server-sent events without changing its bytes.

Invariant: the events' bytes, joined, are the stream's bytes. Parser libraries do not help, since they return the fields
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
    """The values of an event's `data` fields, joined by line ends."""
    values = []
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        if field == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values)


class EventStream:
    """Splitter of one stream. Call `feed` with each chunk, and `rest` at the end of the stream."""

    def __init__(self) -> None:
        self._held = bytearray()  # the unfinished event
        self._after_cr = False  # whether the last chunk ended with a carriage return, to which a line feed may belong

    @property
    def unfinished(self) -> bool:
        """Whether the next chunk continues an event, or the line end of the last one."""
        return bool(self._held) or self._after_cr

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes, each with the empty line at its end. Comment lines are returned at
        once, since they are keep-alives. Raises `ValueError` for an event above the size limit."""
        held = self._held
        if not self.unfinished and b"\r" not in chunk:
            *events, rest = chunk.split(b"\n\n")
            if not rest:  # the usual case: an engine sends whole events
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
        """The bytes of an event that the stream did not complete."""
        rest = bytes(self._held)
        self._held.clear()
        return rest
