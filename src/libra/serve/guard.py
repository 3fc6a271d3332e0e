"""Access control of an HTTP listener.

Invariants: a web page in a browser on this machine cannot use a listener, even through a name that resolves to the
listener's address. The `Host` of a request must name this machine, and its `Origin` must be the listener's own. A body
must be declared as JSON, which browsers send to another origin only if it allows that. A listener that other machines
can reach requires a bearer token.
"""

from __future__ import annotations

import hmac
import os
from base64 import b64decode
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from libra.config.input_file import open_input
from libra.config.listeners import is_local
from libra.serve.answers import RefusedRequest

_OPEN_PATH = "/health"  # needs no token: it tells only that the listener is running
_HOSTS = 64  # `Host` values whose check is cached
_JSON = "application/json"
_READS = (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
_LONGEST_TOKEN = 4096  # characters: a header line has at most 8 KiB


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks requests to a listener on `host`. With a `token`, each request must have it as bearer token. Raises
    `ValueError` if other machines can reach the listener and `token` is None.
    """

    host: str
    token: str | None = field(default=None, repr=False)
    _local: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_local", is_local(self.host))
        if self.token is None and not self._local:
            raise ValueError(
                f"other machines can reach a port on {self.host}: require a bearer token (--token-file, or"
                " metrics.token_file of a run), or listen on 127.0.0.1"
            )

    def check(self, request: web.Request) -> None:
        """Raise `RefusedRequest` if the request is not allowed."""
        if self.token is not None and request.path != _OPEN_PATH:
            self._require_token(request, self.token)
        if self._local:
            self._require_host(request)
        if request.method not in _READS:
            self._require_own_origin(request)
            if (
                request.headers.get(hdrs.CONTENT_TYPE) != _JSON
                and request.body_exists
                and request.content_type != _JSON
            ):
                raise RefusedRequest(f"the body's Content-Type must be {_JSON}", 415)

    def _require_token(self, request: web.Request, token: str) -> None:
        shown = _shown_token(request.headers.get(hdrs.AUTHORIZATION, ""))
        if not hmac.compare_digest(shown, token.encode()):
            asked = 'Basic realm="the token is the password"' if _is_browser(request) else "Bearer"
            raise RefusedRequest("send the bearer token of this listener", 401, {"WWW-Authenticate": asked})

    def _require_host(self, request: web.Request) -> None:
        if (given := request.headers.get(hdrs.HOST)) is not None and not _names_this_machine(given):
            raise RefusedRequest("the header Host does not name this machine: use 127.0.0.1 or localhost", 403)

    def _require_own_origin(self, request: web.Request) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        own = request.headers.get(hdrs.HOST, "")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") or (
            origin is not None and origin.partition("://")[2] != own
        ):
            raise RefusedRequest("pages of another origin may not use this listener", 403)


def read_token(path: Path) -> str:
    """Read a bearer token from a file that only its owner can read. Raises `ValueError` for any other file."""
    try:
        with open_input(path) as file:
            token, its = file.read().decode().strip(), os.fstat(file.fileno())
    except (OSError, UnicodeError):
        raise ValueError(
            f"{path}: the token cannot be read; give a regular file with one line of printable ASCII"
        ) from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{path}: the content is not a token: write one line of printable ASCII without spaces "
            f"(the content is not shown here)"
        )
    if len(token) > _LONGEST_TOKEN:
        raise ValueError(
            f"{path}: a token of {len(token)} characters does not fit a header; give at most {_LONGEST_TOKEN}"
        )
    if its.st_mode & 0o077:
        raise ValueError(f"{path}: other users may read the token; chmod 600 {path}")
    if its.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{path}: the file belongs to user {its.st_uid}, who can read the token; give a file that belongs to you"
        )
    return token


def _is_browser(request: web.Request) -> bool:
    """Whether the sender accepts HTML, as browsers do. A browser gets a Basic challenge, so it asks its user for the
    token."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")


def _shown_token(authorization: str) -> bytes:
    """The token in the header: a bearer token, or the password that a browser sends; empty without a token."""
    kind, _, shown = authorization.partition(" ")
    if kind.lower() == "bearer":
        return shown.strip().encode(errors="surrogateescape")
    if kind.lower() == "basic":
        try:
            return b64decode(shown.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


@lru_cache(_HOSTS)
def _names_this_machine(host: str) -> bool:
    """Whether a `Host` header, with or without a port, names this machine."""
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
