"""A task, engines and a policy that do what a test wrote down."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from fakes.engines import ScriptedEngine

from libra.backends.vllm.engine_handle import EngineHandle
from libra.environments.protocol import Prompt, Span, Tool, ToolCall
from libra.exec.pool import Worker
from libra.exec.protocols import MoveOutcome
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.turn_maker import TurnReport
from libra.plan.allocation import Allocation, Bucket
from libra.route.policy import Placement, ToolReturn, TurnRequest, View
from libra.trajectory.record import Trajectory

MERGED = 1000  # the one token that is two characters


class MergingCodec:
    """A character is a token, but `ab` is one token: text that was generated as `a`, `b` encodes differently."""

    def encode(self, text: str) -> list[int]:
        tokens = [ord(character) for character in text.replace("ab", "\0")]
        return [token or MERGED for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("ab" if token == MERGED else chr(token) for token in tokens)


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


class Told:
    """What a run tells of its workers."""

    def __init__(self) -> None:
        self.moves: list[MoveOutcome] = []
        self.losses: list[tuple[str, str]] = []
        self.loads: list[tuple[str, int, float]] = []
        self.back_again: list[str] = []
        self.joins: list[str] = []
        self.recalls: list[tuple[str, str]] = []

    def role(self, worker: Worker) -> None:
        pass

    def moved(self, moved: MoveOutcome) -> None:
        self.moves.append(moved)

    def lost(self, worker: str, why: str, retired: bool) -> None:
        self.losses.append((worker, why))

    def node_back(self, worker: str) -> None:
        self.back_again.append(worker)

    def load(self, worker: str) -> None:
        pass

    def recalled(self, worker: str, why: str) -> None:
        self.recalls.append((worker, why))

    def joined(self, worker: str, seconds: float, held_seconds: float) -> None:
        self.joins.append(worker)

    def weights(self, worker: str, version: int, seconds: float) -> None:
        self.loads.append((worker, version, seconds))


def instance(engine: ScriptedEngine, shape: str = "short", capacity: int = 1000) -> ServingEngine:
    return ServingEngine(cast(EngineHandle, engine), shape, capacity)


class FirstInstance:
    """Everything goes to the first instance there is; writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ToolReturn | None]] = []
        self.requests: list[TurnRequest] = []
        self.views: list[View] = []
        self.done: list[Trajectory] = []
        self.gone: list[str] = []

    def place(self, request: TurnRequest, view: View) -> Placement | None:
        self.asked.append(("place", None))
        self.requests.append(request)
        self.views.append(view)
        return self._first(view)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, view: View) -> Placement | None:
        self.asked.append(("tool_returned", returned))
        self.requests.append(request)
        self.views.append(view)
        return self._first(view)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, view: View) -> Placement | None:
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


def make_fleet(policy: FirstInstance, *engines: ScriptedEngine) -> ServingFleet:
    """A fleet of one bucket with these engines."""
    fleet = ServingFleet(policy, Allocation(1, (Bucket("short", 1, 0, 100),)))
    for engine in engines:
        fleet.add(instance(engine))
    return fleet
