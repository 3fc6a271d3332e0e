"""Endpoints of turns: their paths, and the readers of their bodies and answers. To add an endpoint, add an entry to
`FORMATS`; new shapes of bodies and answers need a `TurnBody` and an `AnswerReader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from libra.serve.answers import decoded
from libra.serve.gateway.turn_bodies import (
    ChatBody,
    CompletionBody,
    MessageBody,
    ResponseBody,
    SGLangBody,
    TokenBody,
    TurnBody,
)
from libra.serve.gateway.usage import AnswerReader, InputReader, OpenAIReader, SGLangReader, TokenReader


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """One endpoint for turns."""

    path: str  # at the gateway, and at the root of an engine
    decoder: msgspec.json.Decoder[Any]  # returns a `TurnBody`
    reader: Callable[[TurnBody], AnswerReader]
    asks_usage: bool = False  # whether a stream reports tokens only if the request has `stream_options`
    told_apart: bool = False  # whether prompts and answers identify sessions without a name

    def read(self, body: bytes) -> TurnBody:
        """Parse a body. Raises `ValueError` in one line that names the field."""
        read: TurnBody = decoded(self.decoder, body)
        return read


FORMATS: tuple[TurnFormat, ...] = (
    TurnFormat(
        "/v1/completions",
        msgspec.json.Decoder(CompletionBody),
        lambda body: OpenAIReader(body.wants_usage),
        asks_usage=True,
        told_apart=True,
    ),
    TurnFormat(
        "/v1/chat/completions",
        msgspec.json.Decoder(ChatBody),
        lambda body: OpenAIReader(body.wants_usage),
        asks_usage=True,
        told_apart=True,
    ),
    TurnFormat(
        "/inference/v1/generate",
        msgspec.json.Decoder(TokenBody),
        lambda body: TokenReader(body.prompt_tokens()[0]),
        told_apart=True,
    ),
    TurnFormat("/generate", msgspec.json.Decoder(SGLangBody), lambda _: SGLangReader(), told_apart=True),
    TurnFormat(
        "/v1/responses",
        msgspec.json.Decoder(ResponseBody),
        lambda _: InputReader(b"response.completed", b"response.incomplete", b"response.failed"),
    ),
    TurnFormat(
        "/v1/messages",
        msgspec.json.Decoder(MessageBody),
        lambda _: InputReader(b"message_stop"),
        told_apart=True,
    ),
)
