"""The gateway's YAML file: its engines, their tokens, and the routing of turns.

Invariant: a file describes a gateway that can start, or causes a one-line error with the key and the remedy. No message
and no repr shows a token.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import unquote, urlsplit

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from libra.config.input_file import read_input
from libra.config.yaml_file import Section, read_section, refusal, valid
from libra.route.catalogue import is_path, policy_named
from libra.route.cmlfq import CMLFQ
from libra.serve.gateway.allowed_hosts import AllowedHosts

_EXAMPLE = "examples/gateway.yaml"
_Count = Annotated[int, Field(strict=True, ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class UpstreamSection(Section):
    """One engine: an OpenAI-compatible server, with at most one credential."""

    name: Annotated[str, Field(min_length=1)]
    url: str  # up to and including /v1
    bucket: Annotated[int, Field(strict=True, ge=0)] = 0
    max_model_len: _Count | None = None  # tokens of the longest context that it serves; None: as /v1/models reports
    api_key: SecretStr | None = None  # bearer token
    api_key_env: Annotated[str, Field(min_length=1)] | None = None  # environment variable with the token
    api_key_file: Path | None = None  # file with the token, relative to the YAML file
    basic_auth: SecretStr | None = None  # user:password, also accepted in `url`

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """Move user:password out of the URL, since the URL is shown."""
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        user, at, _ = given["url"].partition("://")[2].partition("/")[0].rpartition("@")
        if not at:
            return given
        if "basic_auth" in given:
            raise ValueError("url has a user, and basic_auth is given too: give one of them")
        return {**given, "url": given["url"].replace(f"{user}@", "", 1), "basic_auth": SecretStr(unquote(user))}

    @field_validator("url")
    @classmethod
    def _base(cls, url: str) -> str:
        """Normalise to `http://host:port/.../v1`."""
        wanted = "give an address such as http://127.0.0.1:8000/v1"
        if "@" in url:  # a password may precede it, so the message does not show the URL
            raise ValueError(f"has an @ in user or password; percent-encode it, and {wanted}")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{error} (got {url!r}); {wanted}") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"must begin with http:// or https:// (got {url!r})")
        if not host:
            raise ValueError(f"names no host (got {url!r}); {wanted}")
        if parts.query or parts.fragment:
            raise ValueError(f"is more than an address: leave out all after {parts.path or host}; {wanted}")
        path = parts.path.rstrip("/") or "/v1"
        if not path.endswith("/v1"):
            raise ValueError(f"ends with {path}; give the address up to and including /v1")
        return f"{parts.scheme}://{parts.netloc}{path}"

    @field_validator("api_key", "basic_auth")
    @classmethod
    def _sendable(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            _require_sendable(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in _CREDENTIALS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; one is enough")
        if self.basic_auth is not None and ":" not in self.basic_auth.get_secret_value():
            raise ValueError("basic_auth is not user:password; give a bearer token as api_key")
        return self

    @property
    def root(self) -> str:
        """The URL without /v1, for paths outside /v1."""
        return self.url.removesuffix("/v1")

    @property
    def health(self) -> str:
        """URL of vLLM's health endpoint."""
        return f"{self.root}/health"

    def authorization(self) -> str | None:
        """Value of the Authorization header; None: the client's own header is passed on."""
        if self.api_key is not None:
            return f"Bearer {self.api_key.get_secret_value()}"
        if self.basic_auth is not None:
            return f"Basic {b64encode(self.basic_auth.get_secret_value().encode()).decode()}"
        return None


_CREDENTIALS = ("api_key", "api_key_env", "api_key_file", "basic_auth")


def _require_sendable(secret: str) -> None:
    """Raise `ValueError`, without the value, if a header cannot contain it."""
    if not secret or not secret.isascii() or not secret.isprintable():
        raise ValueError("must be one line of printable ASCII characters, and not empty; its value is not shown")


class GatewayConfig(Section):
    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a secret

    engines: tuple[UpstreamSection, ...]
    limits: tuple[_Count, ...] | None = None  # largest final context of each bucket; None: one bucket
    route: str = CMLFQ.NAME
    sticky: Annotated[bool, Field(strict=True)] = True
    turn_tokens: _Count = 1024  # room for one turn in addition to its context
    priorities: Annotated[bool, Field(strict=True)] = (
        False  # send the policy's priorities, for engines that schedule by them
    )
    wait_seconds: _Seconds = 60.0  # longest wait of a turn for an engine with room
    idle_seconds: _Seconds = 3600.0  # time without turns after which a trajectory is given up
    engine_timeout_seconds: _Seconds = 20.0  # silence, also of /health, after which an engine loses its turns
    turn_timeout_seconds: _Seconds = 3600.0  # silence about one turn after which the turn ends
    max_attempts: _Count = 5  # engines that a turn is sent to before it is refused
    control: Annotated[bool, Field(strict=True)] = True  # pass control requests of trainers on to all engines
    shared: Annotated[bool, Field(strict=True)] = (
        False  # other clients use the same engines, so the gateway asks the engines for their queues
    )
    workers_from: tuple[str, ...] = ()  # hosts besides this machine whose engines may join: addresses, networks, names

    @field_validator("workers_from")
    @classmethod
    def _hosts(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        AllowedHosts.of(given)
        return given

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.engines and not self.workers_from:
            raise ValueError("engines: give 1 or more, or workers_from with the hosts whose engines may join")
        return self


def load_gateway(path: Path | str, policy: str | None = None, workers_from: Sequence[str] = ()) -> GatewayConfig:
    """Read a file such as `examples/gateway.yaml`. `policy` replaces the file's `route`, and `workers_from` the file's
    hosts whose engines may join. Raises `ConfigError`."""
    path = Path(path)
    given: dict[str, Any] = {} if policy is None else {"route": policy}
    if workers_from:
        given["workers_from"] = list(workers_from)
    file = read_section(path, GatewayConfig, _EXAMPLE, given)
    try:
        _require_sound(file)
        engines = tuple(_with_key(engine, index, path.parent) for index, engine in enumerate(file.engines))
    except ValueError as error:
        raise refusal(path, str(error)) from None
    return file.model_copy(update={"engines": engines})


def gateway_of(urls: Sequence[str], policy: str | None = None, workers_from: Sequence[str] = ()) -> GatewayConfig:
    """The configuration of a gateway for these engines, which report their longest contexts. Raises `ValueError`."""
    for number, url in enumerate(urls):
        if url in urls[:number]:  # the message does not show it, since it may contain a password
            raise ValueError(f"--engine number {number + 1} repeats an earlier one; name each engine once")
    engines = [{"name": f"engine-{number}", "url": url} for number, url in enumerate(urls)]
    config = valid(
        GatewayConfig, {"engines": engines, "workers_from": list(workers_from), "route": policy or CMLFQ.NAME}
    )
    _require_sound(config)
    return config


def _with_key(engine: UpstreamSection, index: int, folder: Path) -> UpstreamSection:
    """`engine` with the token from its environment variable or file. Raises `ValueError` if there is none."""
    if engine.api_key_env is not None:
        key, secret = "api_key_env", os.environ.get(engine.api_key_env)
    elif engine.api_key_file is not None:
        key, secret = "api_key_file", _content(folder / engine.api_key_file.expanduser())
    else:
        return engine
    # The message shows neither name: a user may have put the token itself there by mistake.
    if secret is None:
        unread = f"file cannot be read, or is not a regular file (from {folder.absolute()})"
        missing = "variable is not set" if key == "api_key_env" else unread
        raise ValueError(f"engines.{index}.{key}: the {missing}; it must have the token of engine {engine.name}")
    try:
        _require_sendable(secret)
    except ValueError as error:
        raise ValueError(f"engines.{index}.{key}: its token {error}") from None
    return engine.model_copy(update={"api_key": SecretStr(secret)})


def _content(path: Path) -> str | None:
    try:
        return read_input(path).decode(errors="replace").strip()
    except OSError:
        return None


def _require_sound(file: GatewayConfig) -> None:
    names = [engine.name for engine in file.engines]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"engines: {name} occurs twice; name each once")
    limits = file.limits or (1,)
    if any(longer <= shorter for shorter, longer in pairwise((0, *limits))):
        raise ValueError(f"limits is {list(limits)}; list rising numbers of tokens, shortest bucket first")
    for index, engine in enumerate(file.engines):
        if engine.bucket >= len(limits):
            raise ValueError(
                f"engines.{index}.bucket is {engine.bucket}, but limits names {len(limits)} buckets, from 0: add"
                " the bucket's limit, or move the engine"
            )
    if is_path(file.route):
        return  # the command that starts the gateway loads the policy from this path
    try:
        policy_named(file.route, sticky=file.sticky)
    except ValueError as error:
        raise ValueError(f"route: {error}") from None
