"""The text of a chat, as a model in Hugging Face layout reads and writes it.

Invariant: the model's own chat template turns messages into text, and its own response template turns text into a
message. Without a response template, tool calls are read in the form of Hermes and Qwen if the chat template has it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from libra.config.run import ConfigError

Message = dict[str, Any]  # in OpenAI's shape

_HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\Z", "content": "text", "content_args": {"strip": False}},
    },
}


class ChatFormat:
    """Conversion between text, tokens and messages for one model. `stop_token` ends each of its turns."""

    def __init__(self, directory: Path) -> None:
        """Read the format of a model. Raises `ConfigError` if the model has no chat template or stop token."""
        from transformers import PreTrainedTokenizerFast  # here, since it takes most of a second

        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError(f"model.directory: {directory} has no readable tokenizer ({why})") from None
        lacking = [name for name in ("chat_template", "eos_token_id") if getattr(self._tokenizer, name, None) is None]
        if lacking:
            raise ConfigError(
                f"model.directory: the tokenizer of {directory} has no {' and no '.join(lacking)}: this environment"
                " chats, so give a chat model with its tokenizer_config.json"
            )
        self.stop_token = int(self._tokenizer.eos_token_id)
        self._response = getattr(self._tokenizer, "response_template", None)
        if self._response is None and "<tool_call>" in str(self._tokenizer.chat_template):
            self._response = _HERMES

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """The text of a chat up to the next turn of the assistant. Raises `ValueError` if the template refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(
                [_told(message) for message in messages],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template of the model refuses these messages: {error}") from None
        return str(text)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def parse(self, text: str, before: str, tools: Sequence[Message] | None) -> Message:
        """The message of a turn without its stop token; `before` is the text that precedes it. Text without readable
        tool calls becomes content."""
        plain = {"role": "assistant", "content": text}
        if self._response is None:
            return plain
        try:
            parsed = self._tokenizer.parse_response(text, self._response, prefix=before, tools=tools or None)
            calls = [_call(call["function"]) for call in parsed.get("tool_calls") or ()]
        except (ValueError, TypeError, KeyError):
            return plain
        content = parsed.get("content") or ""
        message = {"role": "assistant", "content": content.strip() or None if calls else content}
        if thinking := parsed.get("thinking") or parsed.get("reasoning_content"):
            message["reasoning_content"] = thinking
        return {**message, "tool_calls": calls} if calls else message


def _call(function: Mapping[str, Any]) -> Message:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": written},
    }


def _told(message: Message) -> Message:
    """A message in the form that templates expect: text instead of parts, arguments of calls as an object."""
    told = dict(message)
    content = told.get("content")
    if isinstance(content, list):
        told["content"] = "".join(part["text"] for part in content)
    elif content is None:
        told["content"] = ""
    if calls := told.get("tool_calls"):
        told["tool_calls"] = [{**call, "function": _read(call["function"])} for call in calls]
    return told


def _read(function: Message) -> Message:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, TypeError):
        return function
