"""What the gateway reads of the bodies that pass.

Invariant: bodies pass as they are. Only what routing needs is decoded, and prompts of tokens are counted, not parsed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from libra.serve.gateway.trajectories import UNKNOWN_TOOL, Returned
from libra.trajectory import ToolStatus

_CHARACTERS = 4  # of a token of text: assumed, until the engine has counted


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """The tool whose return is in the prompt."""

    name: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Told(msgspec.Struct, forbid_unknown_fields=True):
    """The field `libra` of a body."""

    trajectory: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: str | None = None  # which trajectories share; not given: the trajectory's own
    task: str = ""
    tool: Tool | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Body(msgspec.Struct):
    """Of a request. Other fields are not looked at."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    stream: bool = False
    stream_options: _StreamOptions | None = None
    priority: int | None = None
    libra: Told | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """How a trajectory ended."""

    reward: float | None = None
    policy_version: Annotated[int, msgspec.Meta(ge=0)] = 0


_body = msgspec.json.Decoder(Body)
_answer = msgspec.json.Decoder(_Answer)
_finish = msgspec.json.Decoder(Finish)


def read_body(body: bytes) -> Body:
    """Raises ValueError in one line that names the field."""
    return _body.decode(body)


def read_finish(body: bytes) -> Finish:
    """Raises ValueError in one line that names the field."""
    return _finish.decode(body) if body else Finish()


def usage_of(answer: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt and generated, where an answer, or a piece of one, says so."""
    try:
        usage = _answer.decode(answer).usage
    except msgspec.MsgspecError:
        return None
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)


def returned_of(told: Told | None) -> Returned | None:
    if told is None or told.tool is None:
        return None
    return Returned(told.tool.name, told.tool.status, told.tool.returned_tokens)


def prompt_tokens(body: Body) -> int:
    """Exact for a prompt of token ids; of text a guess by its length."""
    prompt = bytes(body.prompt).strip().removeprefix(b"null")
    if prompt.startswith(b"[") and b'"' not in prompt:
        return prompt.count(b",") + 1 if prompt[1:-1].strip() else 0
    return -(-len(prompt or bytes(body.messages)) // _CHARACTERS)


def with_field(body: bytes, field: bytes) -> bytes:
    """A JSON object, which has fields, with one more."""
    return b"{" + field + b"," + body.lstrip()[1:]
