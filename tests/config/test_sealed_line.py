"""A changed byte of a sealed line is found, and a line without a checksum is as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config.sealed_line import opened, sealed, unsealed

objects = st.dictionaries(st.text(), st.integers() | st.text(), min_size=1)


@given(objects)
def test_a_sealed_line_is_the_same_object_and_its_checksum(content: dict[str, int | str]) -> None:
    line = json.dumps(content).encode()
    assert json.loads(sealed(line)) == {"crc": json.loads(sealed(line))["crc"], **content}
    assert unsealed(sealed(line)) == opened(sealed(line)) == opened(sealed(line).decode() + "\n") == line


@given(objects, st.data())
def test_a_changed_byte_is_found(content: dict[str, int | str], data: st.DataObject) -> None:
    line = bytearray(sealed(json.dumps(content).encode()))
    line[data.draw(st.integers(len('{"crc":"'), len(line) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="does not match its checksum; remove the line, or `crc` from it"):
        opened(bytes(line))


@pytest.mark.parametrize("line", [b'{"id": "a"}\n', '{"id": "a", "crc": "00000000"}', b"", b"\xff", "\ud800"])
def test_a_line_without_a_checksum_is_as_it_is(line: str | bytes) -> None:
    assert opened(line) == line
