"""Engine workers without processes and without a model: the next token is a function of the context alone.

So whoever makes a token, and however often its turn changed engines, it is the one that a single engine would have
made; and its log-prob tells under which weights.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from libra.backends.launch.handles import EngineHandle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.messages import (
    Acknowledged,
    FromWorker,
    Generate,
    Generated,
    Interrupt,
    Loaded,
    LoadWeights,
    Message,
    Stop,
)
from libra.backends.vllm.report import Report, Sampled

STOP = ord(";")
ALPHABET = [*map(ord, "abcdefg"), STOP]


def next_token(context: Sequence[int]) -> int:
    return ALPHABET[zlib.crc32(repr(list(context)).encode()) % len(ALPHABET)]


def logprob(context: Sequence[int], version: int) -> float:
    return -1.0 - zlib.crc32(repr((list(context), version)).encode()) / 2**32


@dataclass(slots=True)
class _Turn:
    context: list[int]
    left: int
    stop: int


class MadeUpEngine:
    """The worker's end, and the channel to it in one: it works when the test says so. One token a turn and iteration,
    for the first `seats` turns."""

    def __init__(self, capacity: int, seats: int = 2) -> None:
        self.version = 0
        self.gone = False
        self._capacity, self._seats = capacity, seats
        self._turns: dict[str, _Turn] = {}
        self._report = Report(0.0)
        self._told: asyncio.Queue[FromWorker | None] = asyncio.Queue()

    # What a handle does with its channel

    def send(self, message: Message) -> None:
        if self.gone:
            return
        match message:
            case Generate():
                assert len(message.tokens) + message.max_tokens <= self._capacity, "a turn would be cut"
                assert message.max_tokens > 0
                self._turns[message.id] = _Turn(list(message.tokens), message.max_tokens, message.stop_token)
            case Interrupt():
                if self._turns.pop(message.id, None) is not None:
                    self._report.interrupted(message.id)
            case LoadWeights():
                self.version = message.version
                self._told.put_nowait(Loaded(message.version, 0.0))
            case Stop():
                self.tell()
                self._told.put_nowait(Acknowledged())
                self._turns.clear()
            case _:
                raise AssertionError(f"{message} is not for an engine")

    async def receive(self) -> FromWorker:
        message = await self._told.get()
        if message is None:
            raise ConnectionResetError("the worker closed the connection")
        return message

    def close(self) -> None:
        pass

    # What the test does with the worker

    def step(self) -> None:
        """One iteration, of which nobody hears yet."""
        sampled = []
        for name, turn in list(self._turns.items())[: self._seats]:
            token = next_token(turn.context)
            chance = logprob(turn.context, self.version)
            turn.context.append(token)
            turn.left -= 1
            ended = token == turn.stop or turn.left == 0
            if ended:
                del self._turns[name]
            sampled.append(Sampled(name, [token], [chance], 0, ended))
        self._report.iteration(sampled, self.version)

    def report(self) -> Generated:
        return self._report.take(0.0, 0.0)

    def say(self, message: FromWorker) -> None:
        if not self.gone:
            self._told.put_nowait(message)

    def tell(self) -> None:
        """Report all iterations so far."""
        self.say(self.report())

    def die(self) -> None:
        """What was not told is lost with it."""
        self.gone = True
        self._told.put_nowait(None)


def connect_made_up(
    name: str, capacity: int, on_lost: Callable[[str, str], object]
) -> tuple[EngineHandle, MadeUpEngine]:
    engine = MadeUpEngine(capacity)
    return EngineHandle(WorkerLink(name, 4711, cast(ControllerChannel, engine), (0,), 0), on_lost), engine
