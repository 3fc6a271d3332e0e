"""Lines of JSON that carry their own checksum.

Invariant: a sealed line's first key, `crc`, is the CRC-32 of the line without this key, in eight hexadecimal digits.
The checksum reveals a changed byte. Any reader of JSON lines can read a sealed line. In a chain, each checksum
continues the checksum of the previous sealed line, which reveals a missing, moved or repeated line. A chain that ends
early, after a complete line, still counts as whole.
"""

from __future__ import annotations

import zlib

_SEAL = b'{"crc":"%08x",'
_SEAL_BYTES = len(_SEAL % 0)
_HEAD = b'{"crc":"'


def sealed(line: bytes, after: bytes = b"") -> bytes:
    """Add the checksum to a line of JSON, an object with at least one key. In a chain, `after` is the previous sealed
    line.
    """
    return _SEAL % zlib.crc32(line, zlib.crc32(after)) + line[1:]


def unsealed(line: bytes, after: bytes = b"") -> bytes:
    """The line without its checksum. Raises `ValueError` if the checksum is missing or wrong."""
    plain = b"{" + line[_SEAL_BYTES:]
    if sealed(plain, after) != line:
        follows = ", or does not follow the line before" if after else ""
        raise ValueError(f"the line does not match its checksum{follows}")
    return plain


def opened(line: str | bytes) -> str | bytes:
    """The line without its newline and its checksum, if it has one: logs of other systems have none. Raises
    `ValueError` if the checksum is wrong."""
    text = line.encode(errors="surrogatepass") if isinstance(line, str) else line
    if not text.startswith(_HEAD):
        return line
    try:
        return unsealed(text.rstrip(b"\r\n"))
    except ValueError as error:
        raise ValueError(f"{error}; remove the line, or `crc` from it if it was changed on purpose") from None
