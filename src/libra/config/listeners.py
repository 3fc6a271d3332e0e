"""Limits of every port on which Libra listens.

Invariant: a listener takes its limits from this module only. Within them it answers; beyond them it refuses with a
response that names the limit, or closes a connection that has sent no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

MEBIBYTE = 2**20
FIELD_BYTES = 4096  # of a field of a body, other than prompt and messages, that the listener reads
ID_LENGTH = 512  # characters of a name that a client gives and the listener keeps
TRAJECTORIES = 100_000  # in progress at a gateway
METADATA_BYTES = 65_536  # of the field `metadata` of a body; OpenAI allows 16 pairs of 64 and 512 characters
SMALL_BODY_BYTES = MEBIBYTE  # of a body that holds no prompt
ENGINES = 1024  # of a gateway, with those that join
UNNAMED_SESSIONS = 16_384  # sessions without a name that a gateway tells apart
UNNAMED_BYTES = 4 * MEBIBYTE  # of a prompt by which it does; a longer one is a session of its own


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP listener. Its JSON nests 1,000 levels at most, which is msgspec's limit."""

    connections: int  # open at a time; fewer where the limit of open files is lower
    descriptors: int = 1  # of each connection, including those opened to answer it
    idle_seconds: float = 75.0  # without a complete request
    stalled_seconds: float = 60.0  # in which the client reads nothing of its response
    body_seconds: float = 60.0  # for a request body to arrive
    body_bytes: int = 64 * MEBIBYTE  # of one body, as sent and decompressed, whatever the context
    body_base: int = MEBIBYTE  # of one body, and `body_per_token` for each token of the longest context
    body_per_token: int = 64
    bodies_bytes: int = 1024 * MEBIBYTE  # of all bodies in flight; `free_bytes` of each are not counted
    free_bytes: int = 2**16  # of a body that is always accepted

    def body_most(self, longest: int) -> int:
        """Bytes of one body if the longest context has `longest` tokens: a longer body holds no prompt that fits."""
        return min(self.body_bytes, self.body_base + self.body_per_token * longest)


@dataclass(frozen=True, slots=True)
class WeightsLimits:
    """Limits of a port that sends weights, for connections that have not sent the token yet."""

    strangers: int = 64  # connections; beyond it the one that has waited longest is closed
    hello_seconds: float = 10.0  # until the whole first frame has arrived
    hello_bytes: int = 4096  # of the first frame, and `hello_chunk_bytes` for each chunk of the weights
    hello_chunk_bytes: int = 28  # two entries of a run-length list, at their longest
    frame_bytes: int = 64 * MEBIBYTE  # of each frame after that


GATEWAY = HttpLimits(connections=32_768, descriptors=2, body_base=16 * MEBIBYTE)  # prompts may hold images
EMULATOR = HttpLimits(connections=65_536)
EPISODES = HttpLimits(connections=16_384, idle_seconds=600.0)  # an environment thinks between its turns
METRICS = HttpLimits(connections=16, idle_seconds=10.0)  # it reads no body
WEIGHTS = WeightsLimits()


def is_local(host: str) -> bool:
    """Whether only this machine can reach a port on this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
