"""Handles on the publisher and the follower, for the processes that own them.

Invariant: each process ends with its owner, or when its owner closes it. The last line of its log is the reason for its
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from pathlib import Path
from typing import Self

import msgspec

from libra.backends.transport.engine_messages import LoadWeights, WeightsPlace
from libra.backends.weights.grid import Grid
from libra.lend.weights.follower import FollowerPlace, FollowerWord, FollowWeights
from libra.lend.weights.node import Address
from libra.lend.weights.publisher import PublishWeights
from libra.records.files import writing


class WeightsProcessError(RuntimeError):
    """A process that published or followed weights has ended. The message is one line."""


class _Owned:
    """A child process that exchanges JSON lines with its owner."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    @classmethod
    async def _start(cls, module: str, order: FollowWeights | PublishWeights, log: Path) -> Self:
        with writing(log), open(log, "wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"libra.lend.weights.{module}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                pass_fds=(order.descriptor,),
                start_new_session=True,  # Ctrl-C is for the owner
            )
        owned = cls(process, log)
        owned._say(msgspec.json.encode(order))
        return owned

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    async def _read(self) -> bytes:
        """Read the next line of the process. Raises `WeightsProcessError` if the process has ended."""
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            return line
        await self._process.wait()
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise WeightsProcessError(said[-1] if said else f"{self._log.stem} ended")

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    async def close(self) -> None:
        """End the process. A second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class WeightsPublisher(_Owned):
    """The publisher of a trainer's node. `place` is the address for followers, with the token."""

    place: WeightsPlace

    @classmethod
    async def open(cls, grid: Grid, descriptor: int, host: str, port: int, log: Path) -> WeightsPublisher:
        """Start a publisher of the versions that `tell` reports. `descriptor` is the memory with the weights. Port 0:
        any free port. Raises `WeightsProcessError`."""
        token = secrets.token_hex(16)
        publisher = await cls._start("publisher", PublishWeights(grid, descriptor, host, token, port=port), log)
        try:
            place = msgspec.json.decode(await publisher._read(), type=FollowerPlace)
        except BaseException:
            await publisher.close()
            raise
        publisher.place = WeightsPlace(host, place.port, token)
        return publisher

    def tell(self, order: LoadWeights) -> None:
        """Report a published version. The publisher skips the version if a newer version is reported first."""
        self._say(msgspec.json.encode(order))


class WeightsFollower(_Owned):
    """The follower of an engines' node, whose memory has the given descriptor."""

    @classmethod
    async def open(cls, grid: Grid, descriptor: int, place: WeightsPlace, log: Path) -> WeightsFollower:
        source = Address(place.host, place.port)
        order = FollowWeights(grid, descriptor, "127.0.0.1", place.token, [[source]])
        return await cls._start("follower", order, log)

    async def next(self) -> LoadWeights:
        """Wait for the next whole version; the owner answers with `loaded`. Raises `WeightsProcessError`."""
        while True:
            word = msgspec.json.decode(await self._read(), type=FollowerWord)
            if isinstance(word, LoadWeights):
                return word

    def loaded(self) -> None:
        """Report that engines have loaded the version that `next` returned, or that there are no engines."""
        self._say(b"loaded")
