"""Limits of every port on which Libra listens.

Invariant: a listener takes its limits from this module only. It answers a request that exceeds a limit with a response
that names the limit. It closes a connection that exceeds a limit before any request.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

MEBIBYTE = 2**20
FIELD_BYTES = 4096  # bytes of a body's field, other than prompt and messages, that the listener reads
ID_LENGTH = 512  # characters of a name that a client gives and the listener keeps
TRAJECTORIES = 100_000  # trajectories in progress at a gateway
METADATA_BYTES = 65_536  # bytes of a body's field `metadata`; OpenAI allows 16 pairs of 64 and 512 characters
SMALL_BODY_BYTES = MEBIBYTE  # bytes of a body without a prompt
ENGINES = 1024  # engines of a gateway, including engines that join
UNNAMED_SESSIONS = 16_384  # unnamed sessions that a gateway distinguishes
UNNAMED_BYTES = 4 * MEBIBYTE  # bytes of a prompt that identify an unnamed session; a longer prompt is its own session


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP listener. JSON may nest 1,000 levels at most, which is msgspec's limit."""

    connections: int  # number open at a time; fewer if the limit of open files is lower
    descriptors: int = 1  # descriptors of each connection, with the connections opened to answer it
    idle_seconds: float = 75.0  # seconds that a connection may last without a complete request
    stalled_seconds: float = 60.0  # seconds for which a client may read nothing of its response
    body_seconds: float = 60.0  # seconds for a request body to arrive
    body_bytes: int = 64 * MEBIBYTE  # most bytes of one body, both as sent and decompressed, for any context
    body_base: int = MEBIBYTE  # bytes of one body, plus `body_per_token` for each token of the longest context
    body_per_token: int = 64
    bodies_bytes: int = 1024 * MEBIBYTE  # bytes of all bodies in flight, without the first `free_bytes` of each
    free_bytes: int = 2**16  # size up to which a body is always accepted

    def body_most(self, longest: int) -> int:
        """Limit on the bytes of one body, if the longest context has `longest` tokens: a longer body holds no prompt
        that fits.
        """
        return min(self.body_bytes, self.body_base + self.body_per_token * longest)


@dataclass(frozen=True, slots=True)
class WeightsLimits:
    """Limits of a port that sends weights, for connections that have not sent the token yet."""

    strangers: int = 64  # connections; one more closes the connection that has waited longest
    hello_seconds: float = 10.0  # seconds until the whole first frame has arrived
    hello_bytes: int = 4096  # bytes of the first frame, plus `hello_chunk_bytes` for each chunk of the weights
    hello_chunk_bytes: int = 28  # two entries of a run-length list, at their longest
    frame_bytes: int = 64 * MEBIBYTE  # bytes of each later frame


GATEWAY = HttpLimits(connections=32_768, descriptors=2, body_base=16 * MEBIBYTE)  # prompts may hold images
EMULATOR = HttpLimits(connections=65_536)
EPISODES = HttpLimits(connections=16_384, idle_seconds=600.0)  # an environment may compute for minutes between turns
METRICS = HttpLimits(connections=16, idle_seconds=10.0)  # this listener reads no body
WEIGHTS = WeightsLimits()


def is_local(host: str) -> bool:
    """Whether only this machine can reach a port on this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
