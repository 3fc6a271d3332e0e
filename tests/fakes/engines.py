"""Engines without processes or a model, from the most real to the least.

`MadeUpEngine` is the worker's end of a real handle: its next token is a function of the context alone. So whoever makes
a token, and however often its turn changed engines, it is the one that a single engine would have made; its log-prob
tells under which weights. The others are as much of an `EngineHandle` as the agent loop uses: `ScriptedEngine` answers
what a test wrote down, `QuickEngine` at random after a while, and a turn of `HeldEngine` ends when the test says so.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel, FromWorker
from libra.backends.transport.engine_messages import (
    Generate,
    Generated,
    Interrupt,
    Loaded,
    LoadWeights,
    LoanState,
    Piece,
)
from libra.backends.transport.messages import Acknowledged, Message, Stop
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.report import Report, Sampled
from libra.exec.protocols import WorkerLostError
from libra.live.pace import Pace
from libra.live.work import LiveWork

STOP = ord(";")
ALPHABET = [*map(ord, "abcdefg"), STOP]


def letters(text: str) -> list[int]:
    """One token per character, as an engine may sample them."""
    return [ord(character) for character in text]


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
        self._loan: LoanState | None = None
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
        return self._report.take(0.0, 0.0, self._loan)

    def say(self, message: FromWorker) -> None:
        if not self.gone:
            self._told.put_nowait(message)

    def tell(self, loan: LoanState | None = None) -> None:
        """Report all iterations so far."""
        self.say(self._report.take(0.0, 0.0, loan or self._loan))
        self._loan = loan or self._loan

    def die(self) -> None:
        """What was not told is lost with it."""
        self.gone = True
        self._told.put_nowait(None)


def connect_made_up(
    name: str,
    capacity: int,
    on_lost: Callable[[str, str], None],
    on_recall: Callable[[EngineHandle], None] | None = None,
) -> tuple[EngineHandle, MadeUpEngine]:
    engine = MadeUpEngine(capacity)
    link = WorkerLink(name, 4711, cast(ControllerChannel, engine), (0,), 0)
    return EngineHandle(link, on_lost, on_recall), engine


Part = list[Piece]
Take = Callable[[Piece], None]


def turn(tokens: Sequence[int], spans: Sequence[tuple[int, int]] = ((0, 0),)) -> Part:
    """What an engine makes of a turn: a piece for each (version, its first token). The log-prob of a token tells its
    place."""
    ends = [start for _, start in spans[1:]] + [len(tokens)]
    return [
        Piece("", version, list(tokens[start:end]), [-(1.0 + i) for i in range(start, end)])
        for (version, start), end in zip(spans, ends, strict=True)
    ]


class Script:
    """What the engines answer, in the order in which they are asked; what is called may also raise."""

    def __init__(self, *answers: Part | Callable[[Take], None]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, Generate]] = []  # engine and a copy of what it was sent

    def next(self, engine: str, request: Generate, take: Take) -> None:
        copy = msgspec.structs.replace(request, tokens=list(request.tokens))
        self.requests.append((engine, copy))
        answer = self._answers.pop(0)
        if callable(answer):
            answer(take)
            return
        for piece in answer:
            take(piece)


class OnItsOwnDevice:
    """What an engine says of a loan that there is none of."""

    lent, away, away_seconds, loan, recall_rate = False, "", 0.0, None, 0.0
    version = 0


class ScriptedEngine(OnItsOwnDevice):
    """As much of an `EngineHandle` as the agent loop uses."""

    def __init__(self, name: str, script: Script) -> None:
        self.name, self.work, self.version = name, LiveWork(Pace()), 0
        self.interrupted: list[str] = []
        self._script = script

    async def generate(self, request: Generate, take: Take) -> None:
        self._script.next(self.name, request, take)

    def interrupt(self, turn: str) -> None:
        self.interrupted.append(turn)


class QuickEngine(OnItsOwnDevice):
    """Answers after some turns of the event loop: sometimes right, sometimes wrong, so that groups give signal."""

    def __init__(self, chance: random.Random) -> None:
        self.name, self.link, self.version, self.work = "rollout-0", 1, 0, LiveWork(Pace())
        self.busy_seconds, self.iterations, self.generated_tokens = 0.0, 0, 0
        self.prefilled_tokens, self.finished_turns, self.running = 0, 0, 0
        self._chance = chance

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        for _ in range(self._chance.randrange(12)):
            await asyncio.sleep(0)
        called = ord("=") in request.tokens
        tokens = letters(f"A{self._chance.randrange(2)};" if called else ">e:1;")
        take(Piece(request.id, self.version, tokens, [-1.0] * len(tokens)))


class HeldEngine(OnItsOwnDevice):
    """As much of an `EngineHandle` as the agent loop uses; a turn waits until it is told to end."""

    def __init__(self, name: str, version: int) -> None:
        self.name, self.version, self.work = name, version, LiveWork(Pace())
        self.turns: dict[str, tuple[asyncio.Future[None], Generate, Callable[[Piece], None]]] = {}

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turns[request.id] = (future, request, take)
        held = self.work.begun(len(request.tokens))
        try:
            await future
        finally:
            del self.turns[request.id]
            self.work.ended(held)

    def end_turn(self, id: str) -> None:
        """A tool call first, then the answer."""
        future, request, take = self.turns[id]
        tokens = letters("A1;" if ord("=") in request.tokens else ">e:1;")
        take(Piece(id, self.version, tokens, [-1.0] * len(tokens)))
        future.set_result(None)

    def stop(self) -> None:
        for future, *_ in self.turns.values():
            if not future.done():
                future.set_exception(WorkerLostError(f"engine {self.name} was lost"))
