"""Prompts and answers of a session, in a form that makes its requests comparable.

Invariant: a later prompt continues an earlier turn if it begins with the earlier prompt's bytes, followed by the
beginning of the engine's answer. Both have one comparable form per kind of prompt: token ids, text, or messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from functools import cached_property

import msgspec

from libra.serve.answers import decoded
from libra.serve.gateway.said import Said, SaidMessage

BLOCK = 512  # bytes between two marks of a prompt's history
_END = b"\0"  # ends the answer in a chat, so that a message is never a prefix of a longer one

_message = msgspec.json.Decoder(SaidMessage)
_ids, _string = msgspec.json.Decoder(list[int]), msgspec.json.Decoder(str)
_list = msgspec.json.Decoder(list[msgspec.Raw])


class PromptKind(ABC):
    """A kind of prompt, with its comparable form."""

    @abstractmethod
    def following(self, rest: bytes) -> bytes | None:
        """Comparable form of the bytes after an earlier prompt; None if the earlier prompt is not a prefix. Raises
        `ValueError` if the bytes are malformed."""

    @abstractmethod
    def of(self, said: Said) -> bytes | None:
        """Comparable form of an answer; None if the answer is empty."""


class _TokenIds(PromptKind):
    def following(self, rest: bytes) -> bytes | None:
        ids = _after_comma(rest)
        return None if ids is None else array("q", decoded(_ids, b"[%s]" % ids)).tobytes()

    def of(self, said: Said) -> bytes | None:
        return array("q", said.tokens).tobytes() or None


class _Text(PromptKind):
    def following(self, rest: bytes) -> bytes | None:
        return decoded(_string, b'"%s"' % rest).encode()

    def of(self, said: Said) -> bytes | None:
        return "".join(said.texts).encode() or None


class _Messages(PromptKind):
    def following(self, rest: bytes) -> bytes | None:
        messages = _after_comma(rest)
        if messages is None:
            return None
        first = decoded(_message, bytes(decoded(_list, b"[%s]" % messages)[0]))
        return _signature(first.text, first.call_ids) if first.role == "assistant" else None

    def of(self, said: Said) -> bytes | None:
        return _signature("".join(said.texts), said.calls) if said.texts or said.calls else None


TOKEN_IDS, TEXT, MESSAGES = _TokenIds(), _Text(), _Messages()


def _after_comma(rest: bytes) -> bytes | None:
    rest = rest.lstrip()
    return rest[1:] if rest.startswith(b",") else None


def _signature(text: str, calls: list[str]) -> bytes:
    """Comparable form of a message: the unique ids of its tool calls, or without calls, its text without surrounding
    white space, which clients may strip."""
    return ("\1".join(calls) if calls else text.strip()).encode() + _END


@dataclass(eq=False)
class PromptHistory:
    """The comparable parts of a prompt. `open` is the prompt's JSON without its last bracket or quote. `seed` is a hash
    of all other fields of the request that must be equal."""

    open: bytes
    kind: PromptKind
    seed: int

    @cached_property
    def marks(self) -> list[int]:
        """Hash of the seed and the first n blocks, for each n."""
        state, content = self.seed, self.open
        marks = [state]
        for start in range(0, len(content) - BLOCK + 1, BLOCK):
            state = hash((state, content[start : start + BLOCK]))
            marks.append(state)
        return marks

    @cached_property
    def end(self) -> tuple[int, int, int]:
        """Hash of the prompt's full blocks, and the length and hash of the bytes after them."""
        tail = self.open[BLOCK * (len(self.marks) - 1) :]
        return self.marks[-1], len(tail), hash(tail)


def history_of(prompt: bytes, seed: int) -> PromptHistory | None:
    """The history of a prompt given as JSON; None if it is not a prompt of one sequence."""
    prompt = prompt.strip()
    if prompt.startswith(b'"') and len(prompt) > 1:
        return PromptHistory(prompt[:-1], TEXT, seed)
    if not prompt.startswith(b"["):
        return None
    content = prompt[:-1].rstrip()
    if b'"' in content:
        return PromptHistory(content, MESSAGES, seed) if content[1:].lstrip().startswith(b"{") else None
    return PromptHistory(content, TOKEN_IDS, seed) if content.count(b"[") == 1 and len(content) > 1 else None
