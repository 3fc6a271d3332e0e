"""Requests and responses of OpenAI's API, as in vLLM.

Invariants: a parameter that would change the response is emulated or refused. Sampling parameters (temperature,
penalties) are accepted and ignored, as there is no model. Text has four characters a token, so a response has the same
tokens when it returns as part of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal
from zlib import crc32

import msgspec
import numpy as np

from libra.serve.answers import decoded

_CHARACTERS = 4  # per token
_VOCABULARY = range(1000)  # generated tokens: a space and three digits each
_TEXTS = [f" {token:03d}" for token in _VOCABULARY]
_ALL_TOKENS = 151_936  # size of Qwen3's vocabulary, so that clients' models accept all ids
_DRAWN = np.dtype(np.uint32)  # type of a random number; modulo the vocabulary it is a token
Count = Annotated[int, msgspec.Meta(ge=1)]
TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """Fields that all endpoints share. Unknown fields are accepted and ignored."""

    model: str = "emulated"
    max_tokens: Count | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False


class _Completion(Body, kw_only=True):
    prompt: str | TokenIds
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: None = None


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Chat(Body, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False


_completions, _chats = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Chat)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request."""

    chat: bool
    body: Body
    prompt: tuple[int, ...]  # tokens
    max_tokens: int | None
    logprobs: bool = False


def parse(body: bytes, chat: bool, longest: int) -> GenerationRequest:
    """Parse a request to one of OpenAI's two endpoints. Raises `ValueError` in one line that names the field, also for
    a prompt that leaves no room to generate within `longest` tokens. This check precedes tokenising, since tokenising a
    very long prompt would stall all engines."""
    return _chat(decoded(_chats, body), longest) if chat else _completion(decoded(_completions, body), longest)


def _completion(body: _Completion, longest: int) -> GenerationRequest:
    if body.echo:
        raise ValueError("echo: true is not supported, since answers have generated text only; leave it out")
    return GenerationRequest(
        False, body, prompt_within(body.prompt, longest), body.max_tokens, body.logprobs is not None
    )


def _chat(body: _Chat, longest: int) -> GenerationRequest:
    contents = ((it.role, it.content or "") for it in body.messages)
    said = [(role, it if isinstance(it, str) else "".join(part.text for part in it)) for role, it in contents]
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return GenerationRequest(True, body, dialogue_within(said, longest), most, body.logprobs)


def dialogue_within(messages: Sequence[tuple[str, str]], longest: int) -> tuple[int, ...]:
    """Tokens of messages, each a role and a text. Raises `ValueError` if they leave no room within `longest` tokens."""
    texts = [text for role, said in messages for text in (f"<{role}>", said)]
    texts.append("<assistant>")  # a later prompt repeats this role before the response, and so shares the prefix
    _require_room(sum(map(_count, texts)), longest)
    return tuple(token for text in texts for token in tokens_of(text))


def prompt_within(prompt: str | TokenIds, longest: int) -> tuple[int, ...]:
    """Tokens of a prompt. Raises `ValueError` if it leaves no room within `longest` tokens."""
    _require_room(_count(prompt) if isinstance(prompt, str) else len(prompt), longest)
    return tokens_of(prompt) if isinstance(prompt, str) else prompt


def _count(text: str) -> int:
    """Number of tokens of a text."""
    return -(-len(text) // _CHARACTERS)


def _require_room(tokens: int, longest: int) -> None:
    if tokens >= longest:
        raise ValueError(f"a prompt of {tokens} tokens leaves no room to generate within max_model_len {longest}")


def tokens_of(text: str) -> tuple[int, ...]:
    """Convert text to tokens of four characters each. The text of a generated token becomes this token. Any other text
    becomes tokens that are never generated; equal characters become equal tokens."""
    pieces = (text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS))
    return tuple(_token(piece) for piece in pieces)


def _token(piece: str) -> int:
    if len(piece) == _CHARACTERS and piece[0] == " " and piece[1:].isascii() and piece[1:].isdigit():
        return int(piece)
    return len(_VOCABULARY) + crc32(piece.encode("utf-32-le")) % (_ALL_TOKENS - len(_VOCABULARY))


def text_of(tokens: Sequence[int]) -> str:
    return "".join([_TEXTS[token] for token in tokens])


class Answer:
    """The response to one request: tokens drawn at random, each with logprob 0."""

    def __init__(
        self, asked: GenerationRequest, number: int, seed: int, finish_reason: Literal["length", "stop"]
    ) -> None:
        self.asked, self.number, self.reason = asked, number, finish_reason
        self.tokens: list[int] = []
        self.events = 0  # number of events of its stream, for endpoints that number them
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{number}"
        self.created = int(time.time())
        self._random = Random(f"{seed} {number}")

    def extend(self, count: int) -> list[int]:
        """Generate tokens until there are `count`, and return the new ones."""
        drawn = np.frombuffer(self._random.randbytes(_DRAWN.itemsize * (count - len(self.tokens))), _DRAWN)
        more: list[int] = (drawn % len(_VOCABULARY)).tolist()
        self.tokens += more
        return more

    def whole(self, cached_tokens: int) -> bytes:
        asked, text = self.asked, text_of(self.tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason, "logprobs": self._logprobs(self.tokens)}
        choice |= {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
        head = self._head("chat.completion" if asked.chat else "text_completion", [choice])
        if asked.body.return_token_ids:
            choice["token_ids"] = self.tokens
            self._prompt_holder(head, choice)["prompt_token_ids"] = list(asked.prompt)
        return msgspec.json.encode(head | self._usage(cached_tokens))

    def piece(self, tokens: Sequence[int], last: bool) -> bytes:
        """A stream event with these new tokens."""
        asked, text = self.asked, text_of(tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason if last else None}
        choice |= {"logprobs": self._logprobs(tokens)}
        first = len(self.tokens) == len(tokens)
        if asked.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        head = self._head("chat.completion.chunk" if asked.chat else "text_completion", [choice])
        if asked.body.return_token_ids:
            choice["token_ids"] = list(tokens)
            if first:
                self._prompt_holder(head, choice)["prompt_token_ids"] = list(asked.prompt)
        return event(head)

    def last(self, cached_tokens: int) -> bytes:
        """The last bytes of a stream: token counts if requested, and the end mark."""
        end, options = b"data: [DONE]\n\n", self.asked.body.stream_options
        if options is None or not options.include_usage:
            return end
        object_name = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return event(self._head(object_name, []) | self._usage(cached_tokens)) + end

    def _head(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": object_name, "created": self.created, "model": self.asked.body.model}
        return head | {"choices": choices}

    def _prompt_holder(self, head: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        """The object that gets the prompt's ids: the response of a chat, the choice of a completion."""
        return head if self.asked.chat else choice

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        prompt, made = len(self.asked.prompt), len(self.tokens)
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return {"usage": usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}}

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = [text_of([token]) for token in tokens]
        if self.asked.chat:
            return {"content": [{"token": it, "logprob": 0.0, "bytes": None, "top_logprobs": []} for it in texts]}
        start = len(self.tokens) - len(tokens)
        offsets = [_CHARACTERS * (start + index) for index in range(len(tokens))]
        return {"tokens": texts, "token_logprobs": [0.0] * len(texts), "top_logprobs": None, "text_offset": offsets}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
