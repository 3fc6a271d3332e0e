"""Requests and responses of OpenAI's /v1/responses and Anthropic's /v1/messages, text only.

Invariant: as in chats, each message follows its role in the prompt, so that a later prompt shares the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from libra.serve.answers import decoded
from libra.serve.emulate.openai import Answer, Body, Count, GenerationRequest, dialogue_within, text_of


class _Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part]


_Messages = Annotated[list[_Message], msgspec.Meta(min_length=1)]


class _Response(Body, kw_only=True):
    input: str | _Messages
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: None = None
    tools: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=0)] | None = None


class _MessageRequest(Body, kw_only=True):
    messages: _Messages
    max_tokens: Count
    system: str | list[_Part] | None = None
    tools: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=0)] | None = None


_responses, _messages = msgspec.json.Decoder(_Response), msgspec.json.Decoder(_MessageRequest)


def parse_response(body: bytes, longest: int) -> GenerationRequest:
    """Parse a request to /v1/responses. Raises `ValueError` like `openai.parse`."""
    asked = decoded(_responses, body)
    said = [_Message("user", asked.input)] if isinstance(asked.input, str) else asked.input
    return GenerationRequest(True, asked, _prompt(asked.instructions, said, longest), asked.max_output_tokens)


def parse_message(body: bytes, longest: int) -> GenerationRequest:
    """Parse a request to /v1/messages. Raises `ValueError` like `openai.parse`."""
    asked = decoded(_messages, body)
    return GenerationRequest(True, asked, _prompt(asked.system, asked.messages, longest), asked.max_tokens)


def _prompt(system: str | list[_Part] | None, messages: Sequence[_Message], longest: int) -> tuple[int, ...]:
    before = [] if system is None else [("system", _text(system))]
    return dialogue_within([*before, *((it.role, _text(it.content)) for it in messages)], longest)


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(it.text for it in content)


def _typed(type: str, **more: Any) -> bytes:
    """A server-sent event of this type."""
    return b"event: %s\ndata: %s\n\n" % (type.encode(), msgspec.json.encode({"type": type, **more}))


class ResponseAnswer(Answer):
    """A response of /v1/responses: one message with one text."""

    def whole(self, cached_tokens: int) -> bytes:
        return msgspec.json.encode(self._response("completed", [self._item(text_of(self.tokens))], cached_tokens))

    def piece(self, tokens: Sequence[int], last: bool) -> bytes:
        head = b""
        if len(self.tokens) == len(tokens):
            begun = self._response("in_progress", [])
            head = self._event("response.created", response=begun)
            head += self._event("response.in_progress", response=begun)
            head += self._event("response.output_item.added", output_index=0, item=self._item(None))
            head += self._event("response.content_part.added", **self._place(), part=_output(""))
        return head + self._event("response.output_text.delta", **self._place(), delta=text_of(tokens), logprobs=[])

    def last(self, cached_tokens: int) -> bytes:
        text = text_of(self.tokens)
        item = self._item(text)
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=_output(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response.completed", response=self._response("completed", [item], cached_tokens)),
            )
        )

    def _event(self, type: str, **more: Any) -> bytes:
        self.events += 1
        return _typed(type, sequence_number=self.events - 1, **more)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.number}", "output_index": 0, "content_index": 0}

    def _item(self, text: str | None) -> dict[str, Any]:
        """The message item; a `text` of None means that it has just begun."""
        status, content = ("in_progress", []) if text is None else ("completed", [_output(text)])
        about = {"type": "message", "id": f"msg_{self.number}", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def _response(self, status: str, output: list[Any], cached_tokens: int | None = None) -> dict[str, Any]:
        """The response object; `cached_tokens` is None while the response is in progress."""
        usage = None
        cut = cached_tokens is not None and self.reason == "length"
        if cached_tokens is not None:
            prompt, made = len(self.asked.prompt), len(self.tokens)
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached_tokens},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + made,
            }
        return {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "status": "incomplete" if cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.asked.body.model,
            "output": output,
            "usage": usage,
        }


def _output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


class MessageAnswer(Answer):
    """A response of /v1/messages: one block of text."""

    def whole(self, cached_tokens: int) -> bytes:
        block = {"type": "text", "text": text_of(self.tokens)}
        return msgspec.json.encode(self._message([block], self._reason(), cached_tokens))

    def piece(self, tokens: Sequence[int], last: bool) -> bytes:
        head = b""
        if len(self.tokens) == len(tokens):
            head = _typed("message_start", message=self._message([], None, 0))
            head += _typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": text_of(tokens)}
        return head + _typed("content_block_delta", index=0, delta=delta)

    def last(self, cached_tokens: int) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        return b"".join(
            (
                _typed("content_block_stop", index=0),
                _typed("message_delta", delta=delta, usage=self._usage_of(len(self.tokens), cached_tokens)),
                _typed("message_stop"),
            )
        )

    def _reason(self) -> str:
        return "max_tokens" if self.reason == "length" else "end_turn"

    def _usage_of(self, made: int, cached_tokens: int) -> dict[str, int]:
        fresh = len(self.asked.prompt) - cached_tokens
        return {"input_tokens": fresh, "cache_read_input_tokens": cached_tokens, "output_tokens": made}

    def _message(self, content: list[Any], reason: str | None, cached_tokens: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self.number}",
            "type": "message",
            "role": "assistant",
            "model": self.asked.body.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": self._usage_of(0 if reason is None else len(self.tokens), cached_tokens),
        }
