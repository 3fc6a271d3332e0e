"""Turns from the decoded text of a response, in which answers and tool returns alternate.

The tags `<tool_response>` and `<tool_call>` of the chat templates of Qwen3 and Hermes mark tool returns and tool calls.
The message markers around a return belong to the return.
"""

from __future__ import annotations

import json
import re

from libra.trajectory.logs.format import LogReading
from libra.trajectory.record import Turn

_OPEN, _CLOSE = "<tool_response>", "</tool_response>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_BEFORE = re.compile(r"(?:<\|im_end\|>\s*)?(?:<\|im_start\|>\s*)?(?:\b(?:user|tool)\b)?\s*\Z")
_AFTER = re.compile(r"\s*(?:<\|im_end\|>\s*)?(?:<\|im_start\|>\s*)?(?:assistant\b\s*)?")
_LONGEST_MARKER = 64  # characters


def turns_of_text(text: str, reading: LogReading) -> tuple[Turn, ...]:
    """The turns of a response. Outcomes and seconds of tools are unknown."""
    turns: list[Turn] = []
    rest = 0
    while (opens := text.find(_OPEN, rest)) >= 0:
        begins = _marker_before(text, rest, opens)
        ends = _returns_end(text, opens)
        answer = text[rest:begins]
        turns.append(Turn(reading.tokens_of(answer), _tool(answer), "unknown", reading.tokens_of(text[begins:ends])))
        rest = ends
    if text[rest:].strip() or not turns:
        turns.append(Turn(reading.tokens_of(text[rest:]), None, None, 0))
    return tuple(turns)


def _marker_before(text: str, rest: int, opens: int) -> int:
    """Start of the message marker before a return."""
    start = max(rest, opens - _LONGEST_MARKER)
    found = _BEFORE.search(text, start, opens)
    return opens if found is None else found.start()


def _returns_end(text: str, opens: int) -> int:
    """End of the returns of one turn. Parallel tools return one after another."""
    while True:
        close = text.find(_CLOSE, opens)
        if close < 0:
            return len(text)
        after = _AFTER.match(text, close + len(_CLOSE))
        ends = close + len(_CLOSE) if after is None else after.end()
        again = text.find(_OPEN, ends, ends + _LONGEST_MARKER)
        if again < 0 or _BEFORE.fullmatch(text, ends, again) is None:
            return ends
        opens = again


def _tool(answer: str) -> str:
    """Name of the tool in the last tool call of an answer."""
    start = answer.rfind(_CALL)
    end = answer.find(_CALLED, start)
    if start < 0 or end < 0:
        return "tool"
    try:
        called = json.loads(answer[start + len(_CALL) : end])
    except (ValueError, RecursionError):
        return "tool"
    name = called.get("name") if isinstance(called, dict) else None
    return name if isinstance(name, str) and name else "tool"
