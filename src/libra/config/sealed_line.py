"""Lines of JSON that carry their own checksum.

Invariant: `crc`, the first key of a sealed line, is the CRC-32 of the line without it, in eight hexadecimal digits. A
changed byte is found, and any reader of JSON lines still reads sealed ones. In a chain the checksum continues that of
the line before, seal included, so a line that is missing, moved or repeated is found. A chain that is cut off after one
of its lines still counts as whole.
"""

from __future__ import annotations

import zlib

_SEAL = b'{"crc":"%08x",'
_SEAL_BYTES = len(_SEAL % 0)
_HEAD = b'{"crc":"'


def sealed(line: bytes, after: bytes = b"") -> bytes:
    """A line of JSON, an object with at least one key, with its checksum; in a chain it follows the sealed line
    `after`."""
    return _SEAL % zlib.crc32(line, zlib.crc32(after)) + line[1:]


def unsealed(line: bytes, after: bytes = b"") -> bytes:
    """The line without its checksum. Raises `ValueError` if it has none, or a wrong one."""
    plain = b"{" + line[_SEAL_BYTES:]
    if sealed(plain, after) != line:
        follows = ", or does not follow the line before" if after else ""
        raise ValueError(f"the line does not match its checksum{follows}")
    return plain


def opened(line: str | bytes) -> str | bytes:
    """The line without its checksum and newline; unchanged without a checksum, as in logs of other systems. Raises
    `ValueError` if the checksum is wrong."""
    text = line.encode(errors="surrogatepass") if isinstance(line, str) else line
    if not text.startswith(_HEAD):
        return line
    try:
        return unsealed(text.rstrip(b"\r\n"))
    except ValueError as error:
        raise ValueError(f"{error}; remove the line, or `crc` from it if it was changed on purpose") from None
