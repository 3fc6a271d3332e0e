"""Contents of an engine's answer: token ids, text, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from libra.serve.answers import decoded


class _Part(msgspec.Struct):
    """A part of a message; a part of Anthropic's messages may be a tool call."""

    type: str = "text"
    text: str = ""
    id: str | None = None


class _Call(msgspec.Struct):
    id: str | None = None


class SaidMessage(msgspec.Struct):
    """A message of a chat."""

    role: str = "assistant"
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def call_ids(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else ()
        own = [part.id for part in parts if part.type == "tool_use" and part.id]
        return own + [call.id for call in self.tool_calls or () if call.id]


class _Choice(msgspec.Struct):
    message: SaidMessage | None = None
    delta: SaidMessage | None = None
    text: str | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    content: list[_Part] | None = None  # Anthropic's, as are the next two fields, which only events have
    content_block: _Part | None = None
    delta: _Part | None = None
    text: str | None = None  # SGLang's, as is the next field: the whole sample so far
    output_ids: list[int] | None = None


_answer = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Said:
    """Contents of one answer, as received so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # ids of the tool calls
    unread: bool = False  # whether a part of it could not be read

    def add(self, answer: bytes) -> None:
        """Add a whole answer, or the data of one event."""
        if answer in (b"", b"[DONE]"):
            return
        try:
            read = decoded(_answer, answer)
        except ValueError:
            self.unread = True
            return
        for choice in read.choices:
            self.tokens += choice.token_ids or ()
            if choice.text is not None:
                self.texts.append(choice.text)
            for message in (choice.message, choice.delta):
                if message is not None:
                    self.texts.append(message.text)
                    self.calls += message.call_ids
        parts = [*(read.content or ()), *(part for part in (read.content_block, read.delta) if part is not None)]
        if parts:
            message = SaidMessage(content=parts)
            self.texts.append(message.text)
            self.calls += message.call_ids
        if read.text is not None:
            self.texts = [read.text]
        if read.output_ids is not None:
            self.tokens = read.output_ids
