"""Requests and responses with token ids: vLLM's /inference/v1/generate and SGLang's /generate.

Invariant: as for OpenAI's endpoints, parameters that would change a response are emulated or refused, and sampling
parameters are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from libra.serve.answers import decoded
from libra.serve.emulate.openai import Answer, Body, Count, GenerationRequest, TokenIds, event, prompt_within, text_of


class _Sampling(msgspec.Struct):
    max_tokens: Count | None = None
    n: Literal[1] = 1


class _Generate(Body, kw_only=True):
    token_ids: Annotated[TokenIds, msgspec.Meta(min_length=1)]
    sampling_params: _Sampling


class _SGLangSampling(msgspec.Struct):
    max_new_tokens: Count | None = None
    n: Literal[1] = 1


class _SGLangGenerate(Body, kw_only=True):
    text: str | None = None
    input_ids: Annotated[TokenIds, msgspec.Meta(min_length=1)] | None = None
    sampling_params: _SGLangSampling = msgspec.field(default_factory=_SGLangSampling)


_generate, _sglang = msgspec.json.Decoder(_Generate), msgspec.json.Decoder(_SGLangGenerate)


def parse_generate(body: bytes, longest: int) -> GenerationRequest:
    """Parse a request to vLLM's endpoint. Raises `ValueError` like `openai.parse`."""
    asked = decoded(_generate, body)
    return GenerationRequest(False, asked, prompt_within(asked.token_ids, longest), asked.sampling_params.max_tokens)


def parse_sglang(body: bytes, longest: int) -> GenerationRequest:
    """Parse a request to SGLang's endpoint. Raises `ValueError` like `openai.parse`."""
    asked = decoded(_sglang, body)
    given = asked.text if asked.input_ids is None else asked.input_ids
    if given is None or (asked.text is not None and asked.input_ids is not None):
        raise ValueError("give either text or input_ids, for one prompt")
    return GenerationRequest(False, asked, prompt_within(given, longest), asked.sampling_params.max_new_tokens)


class TokenAnswer(Answer):
    """vLLM's response: token ids, without text and usage."""

    def whole(self, cached_tokens: int) -> bytes:
        return msgspec.json.encode(self._said(self.tokens, last=True))

    def piece(self, tokens: Sequence[int], last: bool) -> bytes:
        return event(self._said(tokens, last))

    def last(self, cached_tokens: int) -> bytes:
        return b"data: [DONE]\n\n"

    def _said(self, tokens: Sequence[int], last: bool) -> dict[str, Any]:
        reason = self.reason if last else None
        choice = {"index": 0, "token_ids": list(tokens), "finish_reason": reason, "logprobs": None}
        return {"request_id": f"generate-tokens-{self.number}", "choices": [choice], "prompt_logprobs": None}


class SGLangAnswer(Answer):
    """SGLang's response: each event of a stream has all tokens generated so far."""

    def whole(self, cached_tokens: int) -> bytes:
        said = self._said(last=True)
        said["meta_info"]["cached_tokens"] = cached_tokens
        return msgspec.json.encode(said)

    def piece(self, tokens: Sequence[int], last: bool) -> bytes:
        return event(self._said(last))

    def last(self, cached_tokens: int) -> bytes:
        return b"data: [DONE]\n\n"

    def _said(self, last: bool) -> dict[str, Any]:
        ended = {"type": "length", "length": len(self.tokens)} if self.reason == "length" else {"type": "stop"}
        meta = {
            "id": f"generate-{self.number}",
            "finish_reason": ended if last else None,
            "prompt_tokens": len(self.asked.prompt),
            "completion_tokens": len(self.tokens),
        }
        return {"text": text_of(self.tokens), "output_ids": self.tokens, "meta_info": meta}
