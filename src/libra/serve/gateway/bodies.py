"""What the gateway reads of the bodies that pass.

Invariant: bodies pass as they are. Only what routing needs is decoded, and prompts of tokens are counted, not parsed.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from libra.serve.gateway.trajectories import UNKNOWN_TOOL, ReportedReturn
from libra.serve.openai_errors import decoded
from libra.trajectory import ToolStatus

_CHARACTERS = 4  # of a token of text: assumed, until the engine has counted
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # as many as anything can be computed of


class ToolField(msgspec.Struct, forbid_unknown_fields=True):
    """The tool whose return is in the prompt."""

    name: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: _Tokens | None = None


class LibraField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `libra` of a body."""

    trajectory: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: str | None = None  # which trajectories share; not given: the trajectory's own
    task: str = ""
    tool: ToolField | None = None


class TurnBody(msgspec.Struct):
    """Of a request. Other fields are not looked at; of these an engine refuses what makes no sense to it."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    priority: Any = None
    libra: LibraField | None = None

    @property
    def most_tokens(self) -> int | None:
        """That may be generated; None: the body does not say."""
        for value in (self.max_completion_tokens, self.max_tokens):
            if type(value) is int and value >= 1:
                return value
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def prompt_tokens(self) -> tuple[int, bool]:
        """True: they are so many, as it is a prompt of token ids; False: a guess by the length of the text."""
        prompt = bytes(self.prompt).strip().removeprefix(b"null")
        if prompt.startswith(b"[") and b'"' not in prompt:
            tokens = prompt.count(b",") + 1 if prompt[1:-1].strip() else 0
            return tokens, prompt.count(b"[") == 1
        return -(-len(prompt or bytes(self.messages)) // _CHARACTERS), False


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens
    completion_tokens: _Tokens


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """How a trajectory ended."""

    reward: float | None = None
    policy_version: _Tokens = 0


_turn = msgspec.json.Decoder(TurnBody)
_answer = msgspec.json.Decoder(_Answer)
_finish = msgspec.json.Decoder(Finish)


def read_turn(body: bytes) -> TurnBody:
    """Raises ValueError in one line that names the field."""
    return decoded(_turn, body)


def read_finish(body: bytes) -> Finish:
    """Raises ValueError in one line that names the field."""
    return decoded(_finish, body) if body else Finish()


def usage_of(answer: bytes) -> tuple[tuple[int, int] | None, bool]:
    """Tokens of the prompt and generated, where an answer or a piece of one says so, and whether it says more."""
    try:
        read = decoded(_answer, answer)
    except ValueError:
        return None, True
    usage = None if read.usage is None else (read.usage.prompt_tokens, read.usage.completion_tokens)
    return usage, usage is None or bool(read.choices)


def reported_return(libra: LibraField | None) -> ReportedReturn | None:
    if libra is None or libra.tool is None:
        return None
    return ReportedReturn(libra.tool.name, libra.tool.status, libra.tool.returned_tokens)


def with_field(body: bytes, name: str, value: Any) -> bytes:
    """A JSON object, which has fields, with one more at its end: of two with one name the last one counts."""
    return body.rstrip()[:-1] + b',"%s":' % name.encode() + msgspec.json.encode(value) + b"}"
