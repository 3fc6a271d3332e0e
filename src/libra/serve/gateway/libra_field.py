"""The field `libra` of a request: its trajectory, and the tool return before the turn."""

from __future__ import annotations

from typing import Annotated

import msgspec

from libra.config.listeners import ID_LENGTH
from libra.live.trajectories import UNKNOWN_TOOL
from libra.trajectory import ToolStatus

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # sums of larger numbers exceed the range of floats and JSON

Name = Annotated[str, msgspec.Meta(max_length=ID_LENGTH)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_LENGTH)]


class ReportedReturn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool return at the end of a turn's prompt, as the client reports it."""

    name: Name = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: Tokens | None = None  # None: growth of the prompt since the last context


class LibraField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `libra` of a request's body."""

    trajectory: Id
    prompt: Name | None = None  # name that trajectories of one prompt share; None: no other trajectory shares it
    task: Name = ""
    tool: ReportedReturn | None = None
