"""Event streams against the standard's parser, written line by line, however they are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.serve.gateway import event_stream
from libra.serve.gateway.event_stream import EventStream, data_of

_pieces = st.sampled_from([b"\r", b"\n", b"\r\n", b"data: a", b"data:b", b"data", b": c", b"event: d", b"x", b"\n\n"])
_streams = st.lists(_pieces, max_size=25).map(b"".join)


def by_the_standard(stream: bytes) -> list[bytes]:
    """The data of each event, in a stream of which nothing is missing."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data = [], []
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif line.partition(b":")[0] == b"data":
            value = line.partition(b":")[2]
            data.append(value[1:] if value.startswith(b" ") else value)
    return events


@given(_streams, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_any_cut_gives_the_standards_events_and_the_same_bytes(stream: bytes, cuts: list[int], bom: bool) -> None:
    stream = b"\xef\xbb\xbf" * bom + stream
    parser, events = EventStream(), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
        events += parser.feed(stream[begin:end])
    assert b"".join(events) + parser.rest() == stream
    assert [data_of(event) for event in events if data_of(event)] == [data for data in by_the_standard(stream) if data]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_pass_as_soon_as_they_end(end: bytes) -> None:
    parser = EventStream()
    assert [data_of(event) for event in parser.feed(b"data: 1" + end)] == [b"1"]
    assert [data_of(event) for event in parser.feed(b"data: 2" + end + b"data: 3")] == [b"2"]
    assert [data_of(event) for event in parser.feed(b"\ndata:4\n: and\n\n")] == [b"3\n4"]


def test_comments_pass_without_an_event() -> None:
    parser = EventStream()
    assert parser.feed(b": still here\n: and here") == [b": still here\n"]
    assert parser.feed(b"\ndata: 1\n") == [b": and here\n"]
    assert data_of(parser.rest()) == b"1"


def test_an_event_without_an_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_LARGEST", 100)
    parser = EventStream()
    assert parser.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(ValueError, match="a server-sent event of more than 100 bytes"):
        parser.feed(b"x" * 10)
