"""The agent loop: generate a turn, call the tool it asks for, route the next turn by what came back.

Invariant: tokens in, tokens out. What an engine generated enters the sample as the ids that it sampled, with their
log-probs and weight versions; nothing is decoded and encoded again. An episode survives the loss of its engine: it goes
on elsewhere from its last completed turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libra.environments.protocol import Environment, Prompt, ToolCall, ToolError
from libra.exec.fleet import Fleet
from libra.exec.handles import WorkerLostError
from libra.exec.messages import Generate
from libra.exec.messages import Turn as Generation
from libra.route.policy import Placement, Request, ToolReturn
from libra.trajectory import ToolStatus, Trajectory, Turn


class Codec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished trajectory and the tokens it is made of. The four lists have one entry per token."""

    trajectory: Trajectory
    tokens: list[int]
    generated: list[bool]
    logprobs: list[float]
    versions: list[int]  # -1 where not generated
    reward: float
    turn_buckets: tuple[int, ...]  # bucket that served each turn


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One served turn, for the timeline and the routing log."""

    trajectory: str
    worker: str
    tokens: int
    seconds: float  # in the engine, its queue included
    placement: Placement


@dataclass(slots=True)
class _Draft:
    """An episode under way."""

    id: str
    prompt: Prompt
    order: int
    temperature: float
    fresh: bool
    started_at: float
    prompt_tokens: int
    tokens: list[int]
    generated: list[bool]
    logprobs: list[float]
    versions: list[int]
    turns: list[Turn] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)


class Rollout:
    """Runs episodes of one environment on a fleet."""

    def __init__(
        self,
        environment: Environment,
        tools: Sequence[str],
        codec: Codec,
        fleet: Fleet,
        longest_context: int,
        on_turn: Callable[[TurnReport], None],
        now: Callable[[], float],
    ) -> None:
        self._environment = environment
        self._tools = {name: environment.tools[name] for name in tools}
        self._codec = codec
        self._fleet = fleet
        self._longest_context = longest_context
        self._on_turn, self._now = on_turn, now
        stop = codec.encode(environment.stop)
        if len(stop) != 1:
            raise ValueError(f"the stop text {environment.stop!r} must be one token of the model, not {len(stop)}")
        self._stop_token = stop[0]
        self._requests = 0
        self.generated_tokens = 0

    async def episode(self, id: str, prompt: Prompt, order: int, temperature: float, fresh: bool = False) -> Episode:
        """One episode. `order` ranks it inside an engine (smaller first); `fresh` keeps its KV apart from everything
        generated before."""
        tokens = self._codec.encode(prompt.text)
        draft = _Draft(
            id=id,
            prompt=prompt,
            order=order,
            temperature=temperature,
            fresh=fresh,
            started_at=self._now(),
            prompt_tokens=len(tokens),
            tokens=tokens,
            generated=[False] * len(tokens),
            logprobs=[0.0] * len(tokens),
            versions=[-1] * len(tokens),
        )
        returned: ToolReturn | None = None
        while True:
            generation, bucket = await self._generate(draft, returned)
            draft.tokens += generation.tokens
            draft.generated += [True] * len(generation.tokens)
            draft.logprobs += generation.logprobs
            draft.versions += _versions(generation)
            draft.buckets.append(bucket)
            text = self._codec.decode(generation.tokens)
            call = self._environment.parse(text)
            last_chance = len(draft.turns) + 1 >= self._environment.max_turns
            if call is None or last_chance:
                return self._finish(draft, generation, text)
            began = time.monotonic()
            status, reply = await self._call(call)
            seconds = time.monotonic() - began
            back = self._codec.encode(reply)
            if len(draft.tokens) + len(back) + self._environment.turn_tokens > self._longest_context:
                return self._finish(draft, generation, text)
            draft.tokens += back
            draft.generated += [False] * len(back)
            draft.logprobs += [0.0] * len(back)
            draft.versions += [-1] * len(back)
            draft.turns.append(Turn(len(generation.tokens), call.tool, status, len(back), seconds))
            returned = ToolReturn(call.tool, status, len(back))

    async def _generate(self, draft: _Draft, returned: ToolReturn | None) -> tuple[Generation, int]:
        """The next turn, on whatever engine the policy chooses and as often as engines are lost under it."""
        policy = self._fleet.policy
        told = returned is None
        while True:
            request = Request(draft.id, draft.prompt.id, draft.prompt_tokens, len(draft.tokens), self._environment.name)
            view = self._fleet.view()
            if told or returned is None:
                placement = policy.place(request, view)
            else:
                placement = policy.tool_returned(request, returned, view)
                told = True
            if placement is None:
                await self._fleet.changed()
                continue
            self._requests += 1
            try:
                generation = await self._fleet.handle(placement.instance).generate(
                    Generate(
                        id=f"{draft.id}/{len(draft.turns)}#{self._requests}",
                        tokens=draft.tokens,
                        max_tokens=self._environment.turn_tokens,
                        temperature=draft.temperature,
                        stop_token=self._stop_token,
                        priority=draft.order,
                        salt=draft.id if draft.fresh else None,
                    )
                )
            except WorkerLostError:
                continue
            self.generated_tokens += len(generation.tokens)
            self._on_turn(
                TurnReport(draft.id, placement.instance, len(generation.tokens), generation.seconds, placement)
            )
            return generation, placement.bucket

    async def _call(self, call: ToolCall) -> tuple[ToolStatus, str]:
        """What the tool returned, classified by how it ended, never by its text."""
        environment = self._environment
        tool = self._tools.get(call.tool)
        if tool is None:
            return "error", environment.error_text
        try:
            reply = await asyncio.wait_for(tool(call.argument), environment.deadline)
        except TimeoutError:
            return "timeout", environment.timeout_text
        except ToolError as error:
            return "error", str(error)
        except Exception:  # noqa: BLE001 - a tool is somebody else's code: the agent sees that it broke, the run goes on
            return "error", environment.error_text
        return ("ok", reply) if isinstance(reply, str) else ("error", environment.error_text)

    def _finish(self, draft: _Draft, generation: Generation, text: str) -> Episode:
        draft.turns.append(Turn(len(generation.tokens), None, None, 0))
        reward = self._environment.reward(draft.prompt, text)
        versions = [version for version in draft.versions if version >= 0]
        trajectory = Trajectory(
            id=draft.id,
            prompt_id=draft.prompt.id,
            task=self._environment.name,
            prompt_tokens=draft.prompt_tokens,
            turns=tuple(draft.turns),
            reward=reward,
            policy_version=min(versions),
            finished=True,
            started_at=draft.started_at,
        )
        self._fleet.policy.finished(trajectory)
        return Episode(
            trajectory, draft.tokens, draft.generated, draft.logprobs, draft.versions, reward, tuple(draft.buckets)
        )


def _versions(generation: Generation) -> list[int]:
    """The weight version of every generated token."""
    starts = [start for _, start in generation.spans] + [len(generation.tokens)]
    versions: list[int] = []
    for (version, start), end in zip(generation.spans, starts[1:], strict=True):
        versions += [version] * (end - start)
    return versions
