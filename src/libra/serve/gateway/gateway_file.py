"""Engines to route between, as a YAML file lists them.

Invariant: a file gives a gateway that can start, or is refused in one line that names the key and what would be right.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from libra.config.yaml_file import Section, read_section, refusal
from libra.route import cmlfq
from libra.route.catalogue import policy_named

_EXAMPLE = "examples/gateway.yaml"
_Count = Annotated[int, Field(strict=True, ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class EngineSection(Section):
    """An OpenAI-compatible server."""

    name: Annotated[str, Field(min_length=1)]
    url: str  # up to and with /v1
    bucket: Annotated[int, Field(strict=True, ge=0)] = 0
    max_model_len: _Count  # tokens of the longest context that it serves

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https:// (got {url!r})")
        return url.rstrip("/")

    @property
    def health(self) -> str:
        """Where vLLM says that it is well: beside /v1."""
        return self.url.removesuffix("/v1") + "/health"


class GatewayFile(Section):
    engines: tuple[EngineSection, ...] = Field(min_length=1)
    limits: tuple[_Count, ...] | None = None  # largest final context of each bucket; None: all engines are one bucket
    route: str = cmlfq.NAME
    sticky: Annotated[bool, Field(strict=True)] = True
    turn_tokens: _Count = 1024  # room that one turn needs beyond its context
    priorities: Annotated[bool, Field(strict=True)] = False  # tell engines the policy's order: they schedule by it
    wait_seconds: _Seconds = 60.0  # that a turn waits for an engine which can take it
    idle_seconds: _Seconds = 3600.0  # after which a trajectory without a turn is forgotten
    engine_timeout_seconds: _Seconds = 20.0  # without a byte of health or turns, after which an engine's turns are cut
    turn_timeout_seconds: _Seconds = 3600.0  # without a byte of one turn, after which it is cut
    max_attempts: _Count = 5  # engines that a turn is tried on, each having failed it, before it is refused

    @property
    def bucket_limits(self) -> tuple[int, ...]:
        return self.limits or (max(engine.max_model_len for engine in self.engines),)


def load_gateway(path: Path | str) -> GatewayFile:
    """Read a file such as `examples/gateway.yaml`. Raises `ConfigError`."""
    path = Path(path)
    file = read_section(path, GatewayFile, _EXAMPLE)
    try:
        _require_sound(file)
    except ValueError as error:
        raise refusal(path, str(error)) from None
    return file


def _require_sound(file: GatewayFile) -> None:
    names = [engine.name for engine in file.engines]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"engines: {name} is there twice; name each once")
    limits = file.bucket_limits
    if any(longer <= shorter for shorter, longer in pairwise((0, *limits))):
        raise ValueError(f"limits is {list(limits)}; list numbers of tokens that rise, shortest bucket first")
    for index, engine in enumerate(file.engines):
        if engine.bucket >= len(limits):
            raise ValueError(
                f"engines.{index}.bucket is {engine.bucket}, but limits name {len(limits)}, counted from 0: add the"
                " bucket's limit, or move the engine"
            )
    try:
        policy_named(file.route, sticky=file.sticky)
    except ValueError as error:
        raise ValueError(f"route: {error}") from None
