"""The turns that pass, and the trajectories that they make.

Invariant: what the policy learns of a trajectory is what happened to it. A turn counts once it has been answered, and a
tool return is reported once, with the first turn placed after it. A prompt of token ids is counted without decoding it;
bodies are forwarded unchanged but for added fields. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from libra.config.listeners import FIELD_BYTES, ID_LENGTH, TRAJECTORIES
from libra.route.policy import ToolReturn, TurnRequest
from libra.serve.answers import decoded
from libra.trajectory import ToolStatus, Trajectory, Turn

UNKNOWN_TOOL = "unknown"
_CHARACTERS = 4  # per token of text: a guess until the engine has counted
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # beyond that, sums of them leave the range of floats and JSON

Name = Annotated[str, msgspec.Meta(max_length=ID_LENGTH)]


class ReportedReturn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool return at the end of a turn's prompt, as the client describes it."""

    name: Name = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: Tokens | None = None  # None: the growth of the prompt over the last context


class LibraField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `libra` of a body."""

    trajectory: Annotated[str, msgspec.Meta(min_length=1, max_length=ID_LENGTH)]
    prompt: Name | None = None  # name shared by trajectories of one prompt; None: the trajectory's own
    task: Name = ""
    tool: ReportedReturn | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class TurnBody(msgspec.Struct):
    """A request. Raw fields are for the engine to validate, and no objects are made of them."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    stream: bool = False
    stream_options: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()
    libra: LibraField | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the client wants a usage event. Raises ValueError where stream_options are malformed."""
        if len(memoryview(self.stream_options)) > FIELD_BYTES:
            raise ValueError(f"stream_options: more than {FIELD_BYTES} bytes")
        if bytes(self.stream_options) in _ABSENT:
            return False
        try:
            return bool(decoded(_stream_options, bytes(self.stream_options)).include_usage)
        except ValueError as error:
            raise ValueError(f"stream_options: {error}") from None

    @property
    def with_usage(self) -> bytes:
        """Its stream_options with `include_usage`, as JSON."""
        options = bytes(self.stream_options)
        return _USAGE if options in _ABSENT or not options[1:-1].strip() else options[:-1] + b"," + _USAGE[1:]

    @property
    def has_priority(self) -> bool:
        return bytes(memoryview(self.priority)[:5]) not in _ABSENT

    def needs(self, longest: int, usual: int) -> tuple[int, int]:
        """Tokens of its context, and of the room beyond: `usual` where the body gives no limit. Raises ValueError for
        a turn that no engine of `longest` tokens can ever hold."""
        limits = (_count(self.max_completion_tokens), _count(self.max_tokens))
        most = next((it for it in limits if it is not None), None)
        context, counted = self.prompt_tokens()
        if (context if counted else 1) + (most or 1) > longest:
            prompt = f"a prompt of {context} tokens" if counted else "a prompt"
            raise ValueError(
                f"{prompt} with max_tokens {most or 1} is more than any engine holds: the longest context is {longest}"
            )
        context = min(context, longest - (most or 1))  # a guess must not refuse: the engine counts
        return context, most or max(1, min(usual, longest - context))

    def prompt_tokens(self) -> tuple[int, bool]:
        """Tokens, and whether that is exact: it is for a prompt of token ids; text is guessed by its length."""
        prompt = bytes(self.prompt).strip().removeprefix(b"null")
        if prompt.startswith(b"[") and b'"' not in prompt:  # without a copy: it may have megabytes
            tokens = 0 if _EMPTY_LIST.fullmatch(prompt) else prompt.count(b",") + 1
            return tokens, prompt.count(b"[") == 1
        return -(-len(prompt or bytes(self.messages)) // _CHARACTERS), False


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """Outcome of a trajectory, as its client reports it."""

    reward: float | None = None
    policy_version: Tokens = 0


_ABSENT = (b"", b"null")
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_USAGE = b'{"include_usage":true}'
_LONGEST_COUNT = 20  # digits
_turn, _stream_options = msgspec.json.Decoder(TurnBody), msgspec.json.Decoder(_StreamOptions)
_finish = msgspec.json.Decoder(Finish)


def read_turn(body: bytes) -> TurnBody:
    """Raises ValueError in one line that names the field."""
    return decoded(_turn, body)


def read_finish(body: bytes) -> Finish:
    """Raises ValueError in one line that names the field."""
    return decoded(_finish, body or b"{}")


def _count(value: msgspec.Raw) -> int | None:
    """A whole number above 0. None: the field is absent, or is not one, which the engine refuses."""
    digits = bytes(memoryview(value)[: _LONGEST_COUNT + 1])
    return int(digits) or None if digits.isdigit() and len(digits) <= _LONGEST_COUNT else None


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """A non-empty JSON object with a field, `value` as JSON, appended: parsers take the last of two fields with one
    name."""
    return b"".join((body.rstrip()[:-1], b',"%s":' % name.encode(), value, b"}"))


@dataclass(slots=True)
class _Live:
    prompt_id: str
    task: str
    prompt_tokens: int
    began: float
    touched: float
    turns: list[Turn] = field(default_factory=list)
    context: int = 0  # after the last answered turn
    generated: int | None = None  # by that turn, until the next one says what followed it
    in_flight: TurnRequest | None = None
    placed: bool = False  # the policy has seen the tool return before that one


class Trajectories:
    """Call `begin` for each turn, `placed` once the policy has been asked, then `answered` or `failed`; after the last
    turn `whole` and `forget`."""

    def __init__(self, most: int = TRAJECTORIES) -> None:
        self._live: dict[str, _Live] = {}  # least recently touched first
        self._most = most

    def __len__(self) -> int:
        return len(self._live)

    def has_room(self, id: str) -> bool:
        """Whether a turn of this trajectory keeps within the limit of trajectories."""
        return len(self._live) < self._most or id in self._live

    def begin(
        self, id: str, prompt_id: str, task: str, context: int, returned: ReportedReturn | None, now: float
    ) -> tuple[TurnRequest, ToolReturn | None]:
        """The turn and the tool return before it, for the policy. Raises ValueError while another turn of the
        trajectory is in flight."""
        live = self._live.pop(id, None)
        if live is None:
            live = _Live(prompt_id, task, context, now, now)
        self._live[id] = live
        if live.in_flight is not None:
            raise ValueError(f"trajectory {id}: a turn is in flight: wait for its answer, or name another trajectory")
        if live.generated is not None:
            what = returned or ReportedReturn()
            tokens = max(0, context - live.context) if what.returned_tokens is None else what.returned_tokens
            live.turns.append(Turn(live.generated, what.name, what.status, tokens, now - live.touched))
            live.generated, live.placed = None, False
        turn = TurnRequest(id, live.prompt_id, live.prompt_tokens, context, live.task)
        live.in_flight, live.touched = turn, now
        if not live.turns or live.placed:
            return turn, None
        last = live.turns[-1]
        assert last.tool is not None and last.status is not None
        return turn, ToolReturn(last.tool, last.status, last.returned_tokens)

    def placed(self, turn: TurnRequest) -> None:
        """Note that the policy has been asked."""
        if (live := self._of(turn)) is not None:
            live.placed = True

    def answered(self, turn: TurnRequest, context: int, generated: int, now: float) -> None:
        """The engine counted `context` prompt tokens and generated `generated`."""
        if (live := self._of(turn)) is None:
            return
        self._live[turn.trajectory_id] = self._live.pop(turn.trajectory_id)
        if not live.turns:
            live.prompt_tokens = context
        live.context, live.generated, live.in_flight, live.touched = context + generated, generated, None, now

    def failed(self, turn: TurnRequest) -> None:
        """Note that the turn was not answered: the next turn is this one again."""
        if (live := self._of(turn)) is not None:
            live.in_flight = None

    def _of(self, turn: TurnRequest) -> _Live | None:
        """The turn's trajectory; None: it has been forgotten, even if another one of the same name has begun."""
        live = self._live.get(turn.trajectory_id)
        return live if live is not None and live.in_flight is turn else None

    def whole(self, id: str, reward: float | None, policy_version: int) -> Trajectory:
        """The whole trajectory; `forget` it once it is kept elsewhere. Raises KeyError for an unknown one, ValueError
        where the last turn has no answer."""
        live = self._live[id]
        if live.generated is None:
            raise ValueError(f"trajectory {id}: its last turn has no answer; forget it, or wait for the answer")
        return Trajectory(
            id=id,
            prompt_id=live.prompt_id,
            task=live.task,
            prompt_tokens=live.prompt_tokens,
            turns=(*live.turns, Turn(live.generated, None, None, 0)),
            reward=reward,
            policy_version=policy_version,
            finished=True,
            started_at=live.began,
        )

    def forget(self, id: str) -> bool:
        """Forget a trajectory. False: it is unknown."""
        return self._live.pop(id, None) is not None

    def idle_since(self, moment: float) -> Iterator[str]:
        """Trajectories untouched since `moment` and without a turn in flight, the longest idle first."""
        for id, live in list(self._live.items()):
            if live.touched > moment:
                return
            if live.in_flight is None:
                yield id
