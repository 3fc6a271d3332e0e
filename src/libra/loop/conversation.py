"""The requests of one served episode, as contexts that grow turn by turn.

Invariant: a request whose text begins with a whole context continues this context, with the sampled tokens. Any other
request begins a new context. So libra never encodes a sampled token again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libra.backends.chat_format import ChatFormat, Message
from libra.live.trajectories import UNKNOWN_TOOL
from libra.loop.episode import Episode
from libra.loop.running_turn import Draft
from libra.loop.turn_maker import TurnMaker
from libra.route.policy import ToolReturn
from libra.trajectory import Turn


class TooLongError(ValueError):
    """A request longer than any engine's context."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for a completion."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None
    most_tokens: int | None


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    prompt_tokens: int
    generated_tokens: int
    ending: str  # "stop", "length" or "tool_calls"


@dataclass(slots=True)
class _Context:
    draft: Draft
    text: str = ""
    turn: int = 0  # tokens of the last turn; 0: no turn yet
    ended: float = 0.0  # time at which the last turn ended
    busy: bool = False


@dataclass(eq=False)
class Conversation:
    """One episode. `begin(number)` makes the draft of the context with this number."""

    begin: Callable[[int], Draft]
    chat: ChatFormat
    turns: TurnMaker
    turn_tokens: int
    longest_context: int
    outgrown: bool = False  # a request was refused because it was longer than any engine's context
    broken: Exception | None = None  # error of the run in a turn, not of the environment
    _contexts: list[_Context] = field(default_factory=list)
    _under_way: set[asyncio.Task[Reply]] = field(default_factory=set)

    async def reply(self, asked: ChatRequest) -> Reply:
        """Generate the next turn. Raises `ValueError` for messages that the model's chat template cannot render, and
        `TooLongError`. The turn continues if the caller is cancelled, since its tokens belong to the episode."""
        task = asyncio.create_task(self._reply(asked))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def finish(self, reward: float) -> Episode | None:
        """Wait for turns in progress and return the episode; None if it had no turn. Raises the exception of a failed
        turn."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self.broken is not None:
            raise self.broken
        made = []
        for context in self._contexts:
            if context.turn:
                context.draft.turns.append(Turn(context.turn, None, None, 0))
                self.turns.observer.tools(context.draft.engine, -1)
                made.append(context.draft)
        if not made:
            return None
        branches = tuple(self.turns.finish(draft, reward) for draft in made[1:])
        return self.turns.finish(made[0], reward, branches)

    async def abandon(self) -> None:
        """Cancel all turns, and have the policy forget them."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for context in self._contexts:
            if context.turn and not context.busy:
                self.turns.observer.tools(context.draft.engine, -1)
            self.turns.fleet.policy.forget(context.draft.asked.id)
        self._contexts.clear()

    async def _reply(self, asked: ChatRequest) -> Reply:
        text = self.chat.render(asked.messages, asked.tools)
        context = self._context(text)
        draft, given = context.draft, self.chat.encode(text[len(context.text) :])
        room = self.longest_context - len(draft.tokens) - len(given)
        if room < 1:
            self.outgrown = True
            raise TooLongError(
                f"this request has {len(draft.tokens) + len(given)} tokens, and the longest context of the run is"
                f" {self.longest_context} tokens"
            )
        if context not in self._contexts:
            self._contexts.append(context)
        returned = self._returned(context, asked.messages, len(given))
        draft.given(given)
        prompt = len(draft.tokens)
        context.busy = True
        try:
            sampled = await self.turns.make(draft, min(room, self.turn_tokens, asked.most_tokens or room), returned)
        except Exception as error:
            self.broken = error
            raise
        context.busy, context.turn, context.ended = False, len(sampled), time.monotonic()
        context.text = text + self.chat.decode(sampled)
        self.turns.observer.tools(draft.engine, 1)
        stopped = sampled[-1] == self.chat.stop_token
        message = self.chat.parse(self.chat.decode(sampled[:-1] if stopped else sampled), text, asked.tools)
        ending = "length" if not stopped else "tool_calls" if message.get("tool_calls") else "stop"
        return Reply(message, prompt, len(sampled), ending)

    def _context(self, text: str) -> _Context:
        """The longest context that `text` continues, or a new context."""
        found = [each for each in self._contexts if each.turn and not each.busy and text.startswith(each.text)]
        return max(found, key=lambda each: len(each.text), default=None) or _Context(self.begin(len(self._contexts)))

    def _returned(self, context: _Context, messages: Sequence[Message], given: int) -> ToolReturn | None:
        """The return of a tool or another participant that follows the context's last turn; it has `given` tokens."""
        draft = context.draft
        if not context.turn:
            draft.prompt_tokens = given
            return None
        self.turns.observer.tools(draft.engine, -1)
        returned = ToolReturn(_tool(messages), "unknown", given)
        draft.turns.append(Turn(context.turn, returned.tool, returned.status, given, time.monotonic() - context.ended))
        return returned


def _tool(messages: Sequence[Message]) -> str:
    """Name of the tool whose return is the last message."""
    last = messages[-1]
    if last.get("role") != "tool":
        return UNKNOWN_TOOL
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if call.get("id") == last.get("tool_call_id"):
                return str(call["function"]["name"])
    return str(last.get("name") or UNKNOWN_TOOL)
