"""Readers that take the token counts from an answer while the gateway forwards it. Each format of answers has its own
reader.

Invariant: a reader changes no byte of an answer. An event that cannot be parsed is passed on and not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import msgspec

from libra.serve.answers import decoded
from libra.serve.gateway.event_stream import data_of
from libra.serve.gateway.libra_field import Tokens
from libra.serve.gateway.said import Said

Usage = tuple[int, int]  # prompt tokens, generated tokens

_REPORTS = b'"usage"'
_DONE = b"[DONE]"
_ERRORS = (b"event: error\n", b'data: {"error"')  # error events in vLLM's streams
T = TypeVar("T")


class AnswerReader(ABC):
    """Reads one answer: call `whole` with its body, or `event` with each event of its stream."""

    usage: Usage | None = None  # None: not reported yet
    said: Said | None = None  # contents of the answer; None: not collected

    @abstractmethod
    def whole(self, answer: bytes) -> None:
        """Read an answer that is not streamed."""

    @abstractmethod
    def event(self, event: bytes) -> bool:
        """Read an event. Returns False if the client must not get it."""

    def ended(self, last: bytes) -> bool:
        """Whether a stream with the last events `last` is complete. An engine's error event also completes it."""
        return self._complete(last) or any(mark in last for mark in _ERRORS)

    def _complete(self, last: bytes) -> bool:
        return self.usage is not None or _DONE in last


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _OpenAIAnswer(msgspec.Struct):
    usage: _OpenAIUsage | None = None
    choices: list[msgspec.Raw] = []


_openai = msgspec.json.Decoder(_OpenAIAnswer)


class OpenAIReader(AnswerReader):
    """Reader of completions and chats. The gateway always requests a stream's usage event; `wants_usage` tells whether
    the client gets it."""

    def __init__(self, wants_usage: bool) -> None:
        self._wants_usage = wants_usage

    def whole(self, answer: bytes) -> None:
        self._read(answer)

    def event(self, event: bytes) -> bool:
        return _REPORTS not in event or self._read(data_of(event)) or self._wants_usage

    def _read(self, answer: bytes) -> bool:
        """Take the usage if the answer has it. Returns whether the answer has other content."""
        read = _parsed(_openai, answer)
        if read is None or read.usage is None:
            return True
        self.usage = read.usage.prompt_tokens, read.usage.completion_tokens
        return bool(read.choices)


class _TokenChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class _TokenAnswer(msgspec.Struct):
    choices: list[_TokenChoice] = []
    usage: _OpenAIUsage | None = None


_tokens = msgspec.json.Decoder(_TokenAnswer)


class _WholeReader(AnswerReader):
    """Reader of answers and events with the same shape; the client gets every event."""

    def whole(self, answer: bytes) -> None:
        self._read(answer)

    def event(self, event: bytes) -> bool:
        self._read(data_of(event))
        return True

    @abstractmethod
    def _read(self, answer: bytes) -> None: ...


class TokenReader(_WholeReader):
    """Reader of vLLM's /inference/v1/generate, whose answers have token ids, and optionally usage. `prompt_tokens` is
    the number in the request."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def _read(self, answer: bytes) -> None:
        read = _parsed(_tokens, answer)
        if read is None:
            return
        if read.usage is not None:
            self.usage = read.usage.prompt_tokens, read.usage.completion_tokens
        elif read.choices:
            before = 0 if self.usage is None else self.usage[1]
            more = sum(len(choice.token_ids or ()) for choice in read.choices)
            self.usage = self._prompt_tokens, before + more

    def _complete(self, last: bytes) -> bool:
        return _DONE in last


class _SGLangMeta(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _SGLangAnswer(msgspec.Struct):
    meta_info: _SGLangMeta
    index: int = 0


_sglang = msgspec.json.Decoder(_SGLangAnswer | list[_SGLangAnswer])


class SGLangReader(_WholeReader):
    """Reader of SGLang's /generate, where each event reports all tokens of its sample up to this event."""

    def __init__(self) -> None:
        self._by_sample: dict[int, Usage] = {}

    def _read(self, answer: bytes) -> None:
        read = _parsed(_sglang, answer)
        if read is None:
            return
        for number, sample in enumerate(read if isinstance(read, list) else [read]):
            meta = sample.meta_info
            self._by_sample[sample.index or number] = meta.prompt_tokens, meta.completion_tokens
        prompts, generated = zip(*self._by_sample.values(), strict=True)
        self.usage = sum(prompts), sum(generated)

    def _complete(self, last: bytes) -> bool:
        return _DONE in last


class _InputUsage(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None


class _Holder(msgspec.Struct):
    usage: _InputUsage | None = None


class _InputAnswer(msgspec.Struct):
    usage: _InputUsage | None = None
    response: _Holder | None = None  # in events of /v1/responses
    message: _Holder | None = None  # in the first event of /v1/messages


_input = msgspec.json.Decoder(_InputAnswer)


class InputReader(AnswerReader):
    """Reader of /v1/responses and Anthropic's /v1/messages. `ends` are the types of events that end a stream."""

    def __init__(self, *ends: bytes) -> None:
        self._ends = ends
        self._prompt: int | None = None

    def whole(self, answer: bytes) -> None:
        self._read(answer)

    def event(self, event: bytes) -> bool:
        if _REPORTS in event:
            self._read(data_of(event))
        return True

    def _read(self, answer: bytes) -> None:
        read = _parsed(_input, answer)
        if read is None:
            return
        for holder in (read, read.response, read.message):
            if holder is not None and holder.usage is not None:
                self._take(holder.usage)

    def _take(self, usage: _InputUsage) -> None:
        """Count the whole prompt, since Anthropic's `input_tokens` exclude cached tokens."""
        if usage.input_tokens is not None:
            cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            self._prompt = max(self._prompt or 0, usage.input_tokens + cached)
        if self._prompt is not None and usage.output_tokens is not None:
            self.usage = self._prompt, usage.output_tokens

    def _complete(self, last: bytes) -> bool:
        return any(end in last for end in self._ends)


class SaidReader(AnswerReader):
    """Passes everything on to `reader`, and collects the contents of the answer."""

    def __init__(self, reader: AnswerReader) -> None:
        self.said: Said = Said()
        self._reader = reader

    def whole(self, answer: bytes) -> None:
        self.said.add(answer)
        self._reader.whole(answer)
        self.usage = self._reader.usage

    def event(self, event: bytes) -> bool:
        self.said.add(data_of(event))
        passed = self._reader.event(event)
        self.usage = self._reader.usage
        return passed

    def ended(self, last: bytes) -> bool:
        return self._reader.ended(last)


def _parsed(decoder: msgspec.json.Decoder[T], answer: bytes) -> T | None:
    try:
        return decoded(decoder, answer)
    except ValueError:
        return None
