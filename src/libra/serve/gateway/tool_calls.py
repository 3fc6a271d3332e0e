"""Names of tools in the messages of a chat. A message with role `tool` answers an earlier call, which has the name."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from libra.config.listeners import ID_LENGTH
from libra.live.trajectories import UNKNOWN_TOOL
from libra.serve.answers import decoded
from libra.serve.gateway.libra_field import ReportedReturn

_SEARCHED = 64  # last messages that are searched for the call of a tool return


class _Function(msgspec.Struct, frozen=True):
    name: str = UNKNOWN_TOOL


class _Call(msgspec.Struct, frozen=True):
    id: str = ""
    function: _Function = _Function()


class _Message(msgspec.Struct):
    role: str = ""
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None


_message = msgspec.json.Decoder(_Message)
_list = msgspec.json.Decoder(list[msgspec.Raw])


def tool_of(messages: bytes) -> ReportedReturn | None:
    """The tool return that ends a chat, with the tool's name from the call with the same id. None if the chat ends with
    another message, or is malformed, which the engine will report."""
    if b'"tool"' not in messages:
        return None
    try:
        listed = decoded(_list, messages)[-_SEARCHED:]
        last = decoded(_message, bytes(listed[-1]))
        if last.role != "tool":
            return None
        for call in _calls(listed):
            if call.id == last.tool_call_id:
                return ReportedReturn(call.function.name[:ID_LENGTH])
    except (ValueError, IndexError):
        return None
    return ReportedReturn((last.name or UNKNOWN_TOOL)[:ID_LENGTH])


def _calls(messages: list[msgspec.Raw]) -> Iterator[_Call]:
    """Tool calls of these messages, those of the latest message first."""
    for message in reversed(messages):
        yield from decoded(_message, bytes(message)).tool_calls or ()
