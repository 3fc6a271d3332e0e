"""Chats of a model with Hermes' tool calls, as text and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.chats import write_chat_model

from libra.backends.chat_format import ChatFormat

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    write_chat_model(tmp_path, template=TEMPLATE)
    return ChatFormat(tmp_path)


def test_a_call_is_read_as_it_was_written_and_written_as_it_was_read(chat: ChatFormat) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]}]
    before = chat.render(asked, None)
    assert before == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    message = chat.parse(CALL, before, None)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"].startswith("call_")
    assert message["content"] is None
    returned = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    after = chat.render([*asked, message, returned], None)
    assert after.startswith(before + "<tool_call>") and '"arguments": {"a": 1}' in after and after.count("2<|im_end|>")


def test_text_without_calls_and_calls_that_cannot_be_read_are_content(chat: ChatFormat) -> None:
    before = chat.render([{"role": "user", "content": "1"}], None)
    assert chat.parse(" 1 ", before, None) == {"role": "assistant", "content": " 1 "}
    broken = "<tool_call>\n{add}\n</tool_call>"
    assert chat.parse(broken, before, None) == {"role": "assistant", "content": broken}


def test_messages_that_a_template_refuses_are_an_error_in_one_line(tmp_path: Path) -> None:
    write_chat_model(tmp_path, template="{{ raise_exception('no system') }}")
    with pytest.raises(ValueError, match="the chat template of the model refuses these messages: no system"):
        ChatFormat(tmp_path).render([{"role": "system", "content": ""}], None)
