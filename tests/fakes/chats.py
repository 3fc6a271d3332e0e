"""A tiny model that chats: a character is a token, and `;` ends every message."""

from __future__ import annotations

import string
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig

TEMPLATE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}>{{ call.function.arguments.argument }};{% endfor %}"
    "{{ m.content }}{% if m.content and m.content[-1] != ';' %};{% endif %}{% endfor %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ";",
    "fields": {
        "tool_calls": {
            "open": ">",
            "close_pattern": r"\Z",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"argument": "{content}"}},
            },
        },
        "content": {"close_pattern": r"\Z", "content": "text"},
    },
}


def write_chat_model(directory: Path, template: str | None = TEMPLATE, calls: bool = False) -> None:
    """Its configuration and tokenizer. With `calls`, text after `>` is a call of the calculator."""
    alphabet = string.ascii_letters + string.digits + ">=+-*;_ "
    write_tiny_model(directory, ModelConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16), alphabet, 192)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=";", pad_token="<pad>", chat_template=template
    )
    if calls:
        tokenizer.response_template = RESPONSE
    tokenizer.save_pretrained(directory)
