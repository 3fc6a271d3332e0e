"""Endpoints of turns: their paths on engines, and the readers of their bodies and answers. A new endpoint is an entry
of `FORMATS`; new shapes of bodies and answers need a `TurnBody` and an `AnswerReader`."""

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
    """One endpoint."""

    path: str  # of a request, at the gateway and at the root of an engine
    decoder: msgspec.json.Decoder[Any]  # of a kind of `TurnBody`
    reader: Callable[[TurnBody], AnswerReader]
    asks_usage: bool = False  # whether a stream reports tokens only if `stream_options` ask for them
    told_apart: bool = False  # whether sessions without a name are found by their prompts and answers

    def read(self, body: bytes) -> TurnBody:
        """Raises ValueError in one line that names the field."""
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
