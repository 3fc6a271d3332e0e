"""A task, engines and a policy that do what a test wrote down."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import msgspec

from libra.backends.launch.handles import EngineHandle
from libra.backends.transport.messages import Generate, Piece
from libra.environments.protocol import Prompt, Span, Tool, ToolCall
from libra.loop.fleet import EngineFleet, ServingEngine
from libra.loop.rollout import TurnReport
from libra.plan.problem import Allocation, Bucket
from libra.route.policy import Placement, Request, ToolReturn, View
from libra.trajectory import Trajectory

MERGED = 1000  # the one token that is two characters


class MergingCodec:
    """A character is a token, but `ab` is one token: text that was generated as `a`, `b` encodes differently."""

    def encode(self, text: str) -> list[int]:
        tokens = [ord(character) for character in text.replace("ab", "\0")]
        return [token or MERGED for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("ab" if token == MERGED else chr(token) for token in tokens)


def letters(text: str) -> list[int]:
    """One token per character, as an engine may sample them."""
    return [ord(character) for character in text]


class AskTool:
    """`>tool:argument;` calls a tool, everything else is the answer and worth a point if it is right."""

    name = "ask"
    alphabet = "unused"
    stop = ";"
    deadline = 0.01
    timeout_text = "=T;"
    error_text = "=?;"
    turn_tokens = 8
    max_turns = 4

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        raise NotImplementedError

    def parse(self, text: str) -> ToolCall | None:
        return ToolCall(*text[1:-1].split(":")) if text.startswith(">") else None

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text == prompt.answer)

    def demonstration(self, rng: random.Random) -> list[Span]:
        raise NotImplementedError


async def echo(argument: str) -> str:
    return f"={argument};"


class Unwatched:
    """Nobody is told of turns and tools."""

    def turn(self, report: TurnReport) -> None: ...
    def turns(self, worker: str, change: int) -> None: ...
    def tools(self, worker: str, change: int) -> None: ...


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


class ScriptedEngine:
    """As much of an `EngineHandle` as the agent loop uses."""

    def __init__(self, name: str, script: Script) -> None:
        self.name, self.load_tokens = name, 0
        self.interrupted: list[str] = []
        self._script = script

    async def generate(self, request: Generate, take: Take) -> None:
        self._script.next(self.name, request, take)

    def interrupt(self, turn: str) -> None:
        self.interrupted.append(turn)


def instance(engine: ScriptedEngine, shape: str = "short", capacity: int = 1000) -> ServingEngine:
    return ServingEngine(cast(EngineHandle, engine), shape, capacity)


class FirstInstance:
    """Everything goes to the first instance there is; writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ToolReturn | None]] = []
        self.requests: list[Request] = []
        self.views: list[View] = []
        self.done: list[Trajectory] = []
        self.gone: list[str] = []

    def place(self, request: Request, view: View) -> Placement | None:
        self.asked.append(("place", None))
        self.requests.append(request)
        self.views.append(view)
        return self._first(view)

    def tool_returned(self, request: Request, returned: ToolReturn, view: View) -> Placement | None:
        self.asked.append(("tool_returned", returned))
        self.requests.append(request)
        self.views.append(view)
        return self._first(view)

    def bucket_overrun(self, request: Request, generated_tokens: int, view: View) -> Placement | None:
        raise NotImplementedError

    def finished(self, trajectory: Trajectory) -> None:
        self.done.append(trajectory)

    def forget(self, trajectory_id: str) -> None:
        raise NotImplementedError

    def instance_gone(self, instance: str) -> None:
        self.gone.append(instance)

    def snapshot(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        raise NotImplementedError

    def _first(self, view: View) -> Placement | None:
        if len(self.asked) > 100:
            raise AssertionError("the same turn is placed again and again")
        for found in view.instances:
            return Placement(found.id, found.bucket, False, "the first", priority=5)
        return None


def make_fleet(policy: FirstInstance, *engines: ScriptedEngine) -> EngineFleet:
    """A fleet of one bucket with these engines."""
    fleet = EngineFleet(policy, Allocation(1, (Bucket("short", 1, 0, 100),)))
    for engine in engines:
        fleet.add(instance(engine))
    return fleet
