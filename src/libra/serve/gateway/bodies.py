"""The fields of requests and answers that routing needs.

Invariant: bodies are forwarded unchanged but for added fields. A prompt of token ids is counted without decoding it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from libra.serve.gateway.trajectories import UNKNOWN_TOOL, ReportedReturn
from libra.serve.openai_errors import decoded
from libra.trajectory import ToolStatus

_CHARACTERS = 4  # per token of text: a guess until the engine has counted
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # beyond that, sums of them leave the range of floats and JSON


class ToolField(msgspec.Struct, forbid_unknown_fields=True):
    """The tool return at the end of the prompt."""

    name: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: _Tokens | None = None


class LibraField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `libra` of a body."""

    trajectory: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: str | None = None  # name shared by trajectories of one prompt; None: the trajectory's own
    task: str = ""
    tool: ToolField | None = None


class TurnBody(msgspec.Struct):
    """A request. Fields typed Any are for the engine to validate."""

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
        """Limit on generated tokens; None: the body gives none."""
        for value in (self.max_completion_tokens, self.max_tokens):
            if type(value) is int and value >= 1:
                return value
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def prompt_tokens(self) -> tuple[int, bool]:
        """Tokens, and whether that is exact: it is for a prompt of token ids; text is guessed by its length."""
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
    """(prompt, generated) tokens if an answer or an event reports them, and whether it holds anything else."""
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
    """A non-empty JSON object with a field appended: parsers take the last of two fields with one name."""
    return body.rstrip()[:-1] + b',"%s":' % name.encode() + msgspec.json.encode(value) + b"}"
