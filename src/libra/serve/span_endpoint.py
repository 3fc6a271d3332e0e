"""The address of the trace collector: an option's value, or one of the standard variables `OTEL_...`."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

_PATH = "/v1/traces"  # at a collector
_BASE, _TRACES, _OFF = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"


def span_endpoint(given: str | None, variables: Mapping[str, str], name: str = "--otel") -> str | None:
    """The address that receives traces; None if no spans are to be sent. `name` is the option with the value `given`.
    Raises `ValueError` for a malformed address.

    >>> span_endpoint("http://127.0.0.1:4318", {})
    'http://127.0.0.1:4318/v1/traces'
    >>> span_endpoint(None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/own/path"})
    'http://collector:4318/own/path'
    """
    if given is None:
        if variables.get(_OFF, "").strip().lower() == "true":
            return None
        if traces := variables.get(_TRACES, "").strip():
            return _address(_TRACES, traces)
        if not (base := variables.get(_BASE, "").strip()):
            return None
        return _address(_BASE, base).rstrip("/") + _PATH
    address = _address(name, given).rstrip("/")
    return address if address.endswith(_PATH) else address + _PATH


def _address(name: str, value: str) -> str:
    """Check the value of the option or variable `name`. Errors do not show the value, which may contain a password."""
    try:
        parts = urlsplit(value)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"{name}: not the address of a collector; give one such as http://127.0.0.1:4318")
    return value
