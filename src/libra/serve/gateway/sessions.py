"""Assigns each request to a trajectory, by the field `libra`, a header, the body's metadata, or the prompt.

Invariant: the field takes precedence over headers, and headers over metadata. A request that names no trajectory
continues the one with a matching history, or begins a new one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from libra.config.listeners import ID_LENGTH, UNNAMED_BYTES
from libra.serve.gateway.formats import TurnFormat
from libra.serve.gateway.history import PromptHistory, history_of
from libra.serve.gateway.libra_field import LibraField
from libra.serve.gateway.said import Said
from libra.serve.gateway.turn_bodies import TurnBody
from libra.serve.gateway.unnamed import UnnamedSessions

SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")  # of clients of vllm-router and SGLang


@dataclass(frozen=True, slots=True)
class TurnSession:
    """The trajectory of one request."""

    field: LibraField  # from the client, or made from the request's header, metadata or prompt
    lone: bool = False  # whether the trajectory has only this turn
    strict: bool = True  # a second concurrent turn is refused; if False, it becomes a trajectory of its own
    history: PromptHistory | None = None  # of a trajectory without a name; its next turn is found by it


class Sessions:
    """The sessions of a gateway. Call `of` with each request, then `ended` once its turn has ended."""

    def __init__(self) -> None:
        self.unnamed = UnnamedSessions()
        self._run = secrets.token_hex(4)  # keeps names unique among gateways with the same log
        self._numbers = count(1)

    def of(self, format: TurnFormat, headers: Mapping[str, str], body: TurnBody) -> TurnSession:
        """The session of a request. Raises `ValueError` for a malformed name, and for a named trajectory with several
        samples."""
        samples = body.samples()
        if (named := _named(headers, body)) is not None:
            if samples > 1:
                raise ValueError(
                    f"trajectory {named.trajectory}: the request asks for {samples} samples, but a turn of a trajectory"
                    " has one: send one request for each sample, with a trajectory of its own"
                )
            return TurnSession(named, strict=body.libra is not None)
        history = None
        if format.told_apart and samples == 1 and len(memoryview(body.history)) <= UNNAMED_BYTES:
            history = history_of(bytes(body.history), _seed(format, headers, body))
        if history is None:
            return self.lone()
        id = self.unnamed.claim(history) or f"unnamed {self._run} {next(self._numbers)}"
        return TurnSession(LibraField(id, tool=body.returned()), history=history)

    def lone(self) -> TurnSession:
        """A trajectory with only one turn."""
        return TurnSession(LibraField(f"turn {next(self._numbers)}"), lone=True)

    def ended(self, session: TurnSession, said: Said | None) -> list[str]:
        """Keep the history of a trajectory without a name. `said` is None if the turn got no answer. Returns the
        trajectories that were dropped to make room."""
        history = session.history
        if history is None:
            return []
        form = None if said is None or said.unread else history.kind.of(said)
        return self.unnamed.keep(session.field.trajectory, history, form, said is not None)


def _named(headers: Mapping[str, str], body: TurnBody) -> LibraField | None:
    """The request's `libra` field, or one made from a session header or `session_id`; None if nothing names the
    trajectory. If the field has no tool return, it is taken from the messages."""
    if (given := body.libra) is not None:
        if given.tool is None:
            given.tool = body.returned()
        return given
    for header in SESSION_HEADERS:
        if (name := headers.get(header)) is not None:
            if not name or len(name) > ID_LENGTH or not name.isprintable():
                raise ValueError(f"the header {header} must have 1 to {ID_LENGTH} printable characters")
            return LibraField(name, tool=body.returned())
    name = body.session_id
    return None if name is None else LibraField(name, tool=body.returned())


def _seed(format: TurnFormat, headers: Mapping[str, str], body: TurnBody) -> int:
    """Hash of everything except the prompt that a session's requests share. It includes the bearer token, so clients
    with different tokens never share a session."""
    own = headers.get("Authorization")
    return hash((format.path, bytes(body.model), bytes(body.preamble), own))
