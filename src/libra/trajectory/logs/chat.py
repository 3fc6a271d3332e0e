"""Turns from the messages of a chat, in the formats of OpenAI's and Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra.trajectory.logs.calls import LoggedReturn, as_one
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogReading, same_prompt
from libra.trajectory.record import ToolStatus, Turn

_ASSISTANT = ("assistant", "ai", "model")
_SPOKEN = ("text", "thinking", "reasoning", "refusal")  # fields with the text of a message's part


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as turns, with the tokens of its texts. Every turn except the last calls a tool."""

    prompt_tokens: int
    turns: tuple[Turn, ...]
    prompt_id: str


def chat(messages: Sequence[LogEntry], reading: LogReading, already: Iterable[LogEntry] = ()) -> Chat:
    """Divide `messages` into turns. `already` are earlier messages, which are part of the prompt. Messages between two
    answers of the assistant form one return, and consecutive answers form one turn.
    """
    prompt = [*already]
    rest = [*messages]
    while rest and not _answers(rest[0]):
        prompt.append(rest.pop(0))
    for message in (*prompt, *rest):
        if wordless := [part for part in _parts(message) if _is_wordless(part)]:
            reading.remarks["parts of messages without text (images, audio) whose tokens are left out"] += len(wordless)
    texts = [text_of(message) for message in prompt]
    turns, calls = [], dict[str, str]()
    for answers, returns in _exchanges(rest):
        for answer in answers:
            calls |= _tool_names(answer)
        generated = sum(reading.tokens_of(text_of(answer)) for answer in answers)
        if not returns:
            turns.append(Turn(generated, None, None, 0))
            continue
        back = as_one([tool_return(message, calls) for message in returns], reading)
        returned = sum(reading.tokens_of(text_of(message)) for message in returns)
        turns.append(Turn(generated, back.tool, back.status, returned, back.seconds))
    prompt_tokens = sum(map(reading.tokens_of, texts))
    return Chat(prompt_tokens, tuple(turns), same_prompt("\n".join(texts)))


def _answers(message: LogEntry) -> bool:
    return message.text("role") in _ASSISTANT


def _exchanges(messages: Iterable[LogEntry]) -> Iterator[tuple[list[LogEntry], list[LogEntry]]]:
    answers: list[LogEntry] = []
    returns: list[LogEntry] = []
    for message in messages:
        if _answers(message):
            if returns:
                yield answers, returns
                answers, returns = [], []
            answers.append(message)
        else:
            returns.append(message)
    if answers:
        yield answers, returns


def text_of(message: LogEntry) -> str:
    """All text of a message that the model reads or writes: text, reasoning, and tool calls as JSON."""
    content = message.fields.get("content")
    if isinstance(content, list):
        text = "".join(
            it if isinstance(it, str) else _part(message.within(f"content[{at}]", it)) for at, it in enumerate(content)
        )
    else:
        text = message.text_or("content", "")
    text += message.text_or("reasoning_content", "")
    return text + "".join(f"{name}{arguments}" for _, name, arguments in _tool_calls(message))


def _part(part: LogEntry) -> str:
    match part.text_or("type", "text"):
        case "tool_use":
            return part.text_or("name", "") + json.dumps(part.fields.get("input") or {})
        case "tool_result":
            return text_of(part)
        case _:
            return "".join(part.text(name) for name in _SPOKEN if name in part)


def _tool_calls(message: LogEntry) -> Iterator[tuple[str | None, str, str]]:
    """Id, name and arguments of each call in an answer. Some logs store a call as JSON text."""
    if "tool_calls" not in message:
        return
    for at, call in enumerate(message.values("tool_calls")):
        place = f"tool_calls[{at}]"
        if isinstance(call, str):
            try:
                call = json.loads(call)
            except (ValueError, RecursionError):
                raise message.refusal(place, "a text that is not JSON") from None
        entry = message.within(place, call)
        if isinstance(entry.fields.get("function"), dict):
            called = entry.entry("function")
            name, arguments = called.text_or("name", "tool"), called.fields.get("arguments")
        else:
            name = entry.text_or("function", entry.text_or("name", "tool"))
            arguments = entry.fields.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
        yield entry.text_or("id", "") or None, name, written


def _tool_names(answer: LogEntry) -> dict[str, str]:
    """Names of the tools that an answer calls, by the ids of the calls."""
    names = {id: name for id, name, _ in _tool_calls(answer) if id is not None}
    used = (part for part in _parts(answer) if part.get("type") == "tool_use")
    return names | {str(it.get("id")): str(it.get("name") or "tool") for it in used}


def _parts(message: LogEntry) -> list[dict[str, Any]]:
    """The objects in a message's content, if the content is a list."""
    content = message.fields.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _is_wordless(part: Mapping[str, Any]) -> bool:
    return part.get("type") not in ("tool_use", "tool_result") and not any(name in part for name in _SPOKEN)


def tool_return(message: LogEntry, calls: Mapping[str, str]) -> LoggedReturn:
    """Tool and outcome of a returned message. A message of a user is a return of the tool `user`."""
    results = [part for part in _parts(message) if part.get("type") == "tool_result"]
    if results:
        name = calls.get(str(results[0].get("tool_use_id")), "tool")
        return LoggedReturn(name, "error" if any(part.get("is_error") for part in results) else "ok")
    role = message.text("role")
    if role not in ("tool", "function", "ipython"):
        return LoggedReturn(role)
    id = message.text_or("tool_call_id", "")
    name = calls.get(id) or message.text_or("name", "") or message.text_or("function", "") or "tool"
    return LoggedReturn(name, _status(message))


def _status(message: LogEntry) -> ToolStatus:
    """Outcome of a tool. Inspect stores a tool's error in its message; other chat logs store no outcome."""
    if "error" not in message:
        return "unknown"
    error = message.fields["error"]
    kind = error.get("type") if isinstance(error, dict) else error
    return "timeout" if kind == "timeout" else "error"
