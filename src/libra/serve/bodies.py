"""Request bodies and their size limits.

Invariant: a body never exceeds its listener's size limits, compressed or decompressed, and all bodies in flight
together stay within the memory limit. Decompression yields to other requests after each piece.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from libra.serve.answers import RefusedRequest
from libra.serve.connections import CONNECTIONS

_PIECE = 2**18  # bytes decompressed between two turns of the event loop
_FORMATS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def body_of(request: web.Request, most: int | None = None) -> bytes:
    """Read the whole body and decompress it. `most` is the maximum size in bytes, if less than the application's
    limit. Raises `RefusedRequest` if the body is too large, damaged, or arrives too slowly.
    """
    limits = request.app[CONNECTIONS].limits
    most = request.client_max_size if most is None else min(most, request.client_max_size)
    if request.content_length is not None and request.content_length > most:
        raise _too_large(most)
    try:
        if request.content.is_eof():  # the whole body has arrived
            raw = await _read(request, most)
        else:
            async with asyncio.timeout(limits.body_seconds):
                raw = await _read(request, most)
    except TimeoutError:
        raise RefusedRequest(f"the body did not arrive within {limits.body_seconds:g} s", 408) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RefusedRequest(f"the body cannot be read ({type(error).__name__}): send it whole", 400) from None
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    return raw if encoding == "identity" or not raw else await _expanded(request, raw, encoding, most)


async def _read(request: web.Request, most: int) -> bytes:
    body = bytearray()
    while piece := await request.content.readany():
        _hold(request, len(body), len(piece), most)
        body += piece
    return bytes(body)


async def _expanded(request: web.Request, raw: bytes, encoding: str, most: int) -> bytes:
    if encoding not in _FORMATS:
        raise RefusedRequest(
            f"the body's Content-Encoding is {encoding[:40]!r}: send gzip, deflate, or none",
            415,
            {"Accept-Encoding": "gzip, deflate"},
        )
    expanding, body = zlib.decompressobj(_FORMATS[encoding]), bytearray()
    try:
        while not expanding.eof:
            piece = expanding.decompress(raw, _PIECE)
            raw = expanding.unconsumed_tail
            if not piece and not raw and not expanding.eof:
                raise RefusedRequest("the body cannot be read (its compressed data ends early): send it whole", 400)
            _hold(request, len(body), len(piece), most)
            body += piece
            if raw:
                await asyncio.sleep(0)
    except zlib.error as error:
        raise RefusedRequest(f"the body cannot be read ({error}): send {encoding}", 400) from None
    if expanding.unused_data:
        raise RefusedRequest("the body cannot be read (data after its compressed end): send one member", 400)
    return bytes(body)


def _hold(request: web.Request, before: int, more: int, most: int) -> None:
    """Count `more` bytes of a body that had `before` bytes. Raises `RefusedRequest` if they exceed a limit."""
    connections = request.app[CONNECTIONS]
    limits = connections.limits
    if before + more > most:
        raise _too_large(most)
    counted = max(0, before + more - limits.free_bytes) - max(0, before - limits.free_bytes)
    if counted and not connections.hold(request.protocol, counted):
        raise RefusedRequest(
            f"the bodies in flight exceed {limits.bodies_bytes} bytes: try again later", 503, {"Retry-After": "1"}
        )


def _too_large(most: int) -> RefusedRequest:
    return RefusedRequest(f"the body has more than {most} bytes, the limit of this server", 413)
