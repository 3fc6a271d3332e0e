"""Bodies of requests that generate; each shape that clients send has a class.

Invariant: only the fields that routing needs are decoded. Prompts stay raw JSON; token ids are counted without decoding
them. Bodies are forwarded unchanged except for added fields. Lengths are in tokens.
"""

from __future__ import annotations

import re
from abc import abstractmethod

import msgspec

from libra.config.listeners import FIELD_BYTES, METADATA_BYTES
from libra.serve.answers import decoded
from libra.serve.gateway.libra_field import Id, LibraField, ReportedReturn
from libra.serve.gateway.tool_calls import tool_of

_CHARACTERS = 4  # per token of text; an estimate until the engine reports the number


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Metadata(msgspec.Struct):
    session_id: Id | None = None


class TurnBody(msgspec.Struct, kw_only=True):
    """A request to generate. Raw fields are not decoded here: the engine validates them."""

    model: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    libra: LibraField | None = None

    @property
    @abstractmethod
    def history(self) -> msgspec.Raw:
        """The prompt, as JSON: text, token ids, or messages."""

    @property
    def preamble(self) -> msgspec.Raw:
        """Instructions that precede the history, as JSON."""
        return msgspec.Raw()

    @property
    @abstractmethod
    def limits(self) -> tuple[msgspec.Raw, ...]:
        """Fields that limit the generated tokens, in order of precedence."""

    @property
    def choices(self) -> msgspec.Raw:
        """The field with the number of samples of each prompt."""
        return msgspec.Raw()

    def returned(self) -> ReportedReturn | None:
        """The tool return that ends the history, if this kind of body names it."""
        return None

    @property
    def session_id(self) -> str | None:
        """The session that `metadata` names; None without one. Raises `ValueError` if `metadata` is malformed."""
        metadata = bytes(self.metadata)
        if metadata in _ABSENT:
            return None
        if len(metadata) > METADATA_BYTES:
            raise ValueError(f"metadata: more than {METADATA_BYTES} bytes")
        try:
            return decoded(_metadata, metadata).session_id
        except ValueError as error:
            raise ValueError(f"metadata: {error}") from None

    @property
    def wants_usage(self) -> bool:
        """Whether the client wants a usage event. Raises `ValueError` if `stream_options` is malformed."""
        if len(memoryview(self.stream_options)) > FIELD_BYTES:
            raise ValueError(f"stream_options: more than {FIELD_BYTES} bytes")
        if bytes(self.stream_options) in _ABSENT:
            return False
        try:
            return bool(decoded(_stream_options, bytes(self.stream_options)).include_usage)
        except ValueError as error:
            raise ValueError(f"stream_options: {error}") from None

    @property
    def with_usage(self) -> bytes:
        """The `stream_options` of the request with `include_usage` added, as JSON."""
        options = bytes(self.stream_options)
        return _USAGE if options in _ABSENT or not options[1:-1].strip() else options[:-1] + b"," + _USAGE[1:]

    @property
    def has_priority(self) -> bool:
        return bytes(memoryview(self.priority)[:5]) not in _ABSENT

    def needs(self, longest: int, usual: int) -> tuple[int, int]:
        """Tokens of the turn's context, and of the room beyond it, which is at most `usual` if the body has no limit.
        Raises `ValueError` for a turn that exceeds `longest`, the longest context of any engine."""
        most = next((it for it in map(_count, self.limits) if it is not None), None)
        context, counted = self.prompt_tokens()
        if (context if counted else 1) + (most or 1) > longest:
            prompt = f"a prompt of {context} tokens" if counted else "a prompt"
            raise ValueError(
                f"{prompt} with max_tokens {most or 1} exceeds the longest context of any engine, {longest} tokens"
            )
        context = min(context, longest - (most or 1))  # an estimate must not refuse a turn: the engine counts exactly
        return context, most or max(1, min(usual, longest - context))

    def prompt_tokens(self) -> tuple[int, bool]:
        """Tokens of the prompt, and whether they are exact. Token ids are counted; text is estimated by its length."""
        prompt = bytes(self.history).strip()
        if prompt.startswith(b"[") and b'"' not in prompt:  # no decoding: it may have megabytes
            tokens = 0 if _EMPTY_LIST.fullmatch(prompt) else prompt.count(b",") + 1
            return tokens, prompt.rfind(b"[") == 0
        return -(-(len(prompt) + len(memoryview(self.preamble))) // _CHARACTERS), False

    def samples(self) -> int:
        """Number of requested sequences: the number of prompts times `choices`."""
        return self.prompts() * (_count(self.choices) or 1)

    def prompts(self) -> int:
        return 1


class CompletionBody(TurnBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()

    @property
    def history(self) -> msgspec.Raw:
        return self.prompt

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return (self.max_tokens,)

    @property
    def choices(self) -> msgspec.Raw:
        return self.n

    def prompts(self) -> int:
        return _listed(self.prompt)


class ChatBody(TurnBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()

    @property
    def history(self) -> msgspec.Raw:
        return self.messages

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return (self.max_completion_tokens, self.max_tokens)

    @property
    def choices(self) -> msgspec.Raw:
        return self.n

    def returned(self) -> ReportedReturn | None:
        return tool_of(bytes(self.messages))


class _TokenSampling(msgspec.Struct):
    max_tokens: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


class TokenBody(TurnBody, kw_only=True):
    """Body of vLLM's /inference/v1/generate."""

    token_ids: msgspec.Raw = msgspec.Raw()
    sampling_params: _TokenSampling | None = None

    @property
    def history(self) -> msgspec.Raw:
        return self.token_ids

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return () if self.sampling_params is None else (self.sampling_params.max_tokens,)

    @property
    def choices(self) -> msgspec.Raw:
        return msgspec.Raw() if self.sampling_params is None else self.sampling_params.n


class _SGLangSampling(msgspec.Struct):
    max_new_tokens: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


class SGLangBody(TurnBody, kw_only=True):
    """Body of SGLang's /generate. A batch with separate sampling parameters for each prompt is refused."""

    input_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    sampling_params: _SGLangSampling | None = None

    @property
    def history(self) -> msgspec.Raw:
        return self.text if bytes(memoryview(self.input_ids)[:5]) in _ABSENT else self.input_ids

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return () if self.sampling_params is None else (self.sampling_params.max_new_tokens,)

    @property
    def choices(self) -> msgspec.Raw:
        return msgspec.Raw() if self.sampling_params is None else self.sampling_params.n

    def prompts(self) -> int:
        return _listed(self.history)


class ResponseBody(TurnBody, kw_only=True):
    """Body of /v1/responses."""

    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()

    @property
    def history(self) -> msgspec.Raw:
        return self.input

    @property
    def preamble(self) -> msgspec.Raw:
        return self.instructions

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return (self.max_output_tokens,)


class MessageBody(TurnBody, kw_only=True):
    """Body of Anthropic's /v1/messages."""

    messages: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()

    @property
    def history(self) -> msgspec.Raw:
        return self.messages

    @property
    def preamble(self) -> msgspec.Raw:
        return self.system

    @property
    def limits(self) -> tuple[msgspec.Raw, ...]:
        return (self.max_tokens,)


_ABSENT = (b"", b"null")
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_SEVERAL = re.compile(rb"\s*\[\s*[\[\"]")  # a list of lists, or of texts
_USAGE = b'{"include_usage":true}'
_LONGEST_COUNT = 20  # digits
_stream_options, _metadata = msgspec.json.Decoder(_StreamOptions), msgspec.json.Decoder(_Metadata)


def _count(value: msgspec.Raw) -> int | None:
    """A whole number above 0. None if the field is absent or is something else, which the engine will refuse."""
    digits = bytes(memoryview(value)[: _LONGEST_COUNT + 1])
    return int(digits) or None if digits.isdigit() and len(digits) <= _LONGEST_COUNT else None


def _listed(prompt: msgspec.Raw) -> int:
    """Number of prompts in a field with one prompt or a list of prompts, as texts or as lists of token ids."""
    if _SEVERAL.match(memoryview(prompt)) is None:  # a view, since a copy may take megabytes
        return 1
    listed = bytes(prompt)  # counted without decoding, since there may be millions of prompts
    if b'"' not in listed:
        return listed.count(b"[") - 1
    return listed.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') // 2


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a non-empty JSON object, with a field appended; `value` is JSON. Of two fields with the same name,
    parsers use the last."""
    return b"".join((body.rstrip()[:-1], b',"%s":' % name.encode(), value, b"}"))
