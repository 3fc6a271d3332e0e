"""Extras: the optional dependencies of Libra, and the command that installs one.

Invariant: the command works where it is printed. It names the source of this installation: the checkout, the direct URL
that pip recorded (PEP 610), or the distribution on the index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

_NAME = "libra-rl"
_CHECKOUT = Path(__file__).resolve().parents[3]  # above src/libra/config, unless Libra lies among installed packages
_PAGES = ("altair", "jinja2", "markupsafe", "vl_convert")
_HTTP = ("aiohttp", "msgspec", "prometheus_client")
_ENGINES = ("accelerate", "filelock", "psutil", "safetensors", "tokenizers", "torch", "transformers", "vllm")

# Modules that each extra of pyproject.toml installs.
LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "report": _PAGES,
        "http": _HTTP,
        "aic": ("aiconfigurator_core",),
        "ilp": ("pulp",),
        "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        "ray": ("ray",),
        "cpu": (*_HTTP, *_PAGES, *_ENGINES),
        "gpu": (*_HTTP, *_PAGES, *_ENGINES),
    }
)


def missing_library(extra: str) -> str | None:
    """The first library of the extra that is not installed; None if all are installed."""
    return next((name for name in LIBRARIES[extra] if not _is_installed(name)), None)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False


def install_command(extra: str) -> str:
    """The shell command that adds the extra to this installation."""
    try:
        recorded = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # the sources are on PYTHONPATH
        recorded = None
    return command(extra, _CHECKOUT, None if recorded is None else json.loads(recorded))


def command(extra: str, checkout: Path, direct_url: Mapping[str, Any] | None) -> str:
    """The shell command for an installation with this `direct_url.json`. `checkout` counts only if it holds Libra's
    `pyproject.toml`.
    """
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    if direct_url is None:
        return f"pip install {quote(f'{_NAME}[{extra}]')}"
    url = str(direct_url["url"])
    if "vcs_info" in direct_url:
        url = f"{direct_url['vcs_info']['vcs']}+{url}@{direct_url['vcs_info']['commit_id']}"
    if urlsplit(url).scheme == "file" and not Path(unquote(urlsplit(url).path)).exists():
        return f"pip install {quote(f'.[{extra}]')} in a checkout of Libra"
    return f"pip install {quote(f'{_NAME}[{extra}] @ {url}')}"
