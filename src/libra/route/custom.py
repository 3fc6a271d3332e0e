"""Routing policies of the user's own, loaded from path.py:Class.

Only a path that the user typed, or wrote into a request, is imported, never one that a plan or a log names.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from libra.route.catalogue import is_path, policy_named, policy_restored
from libra.route.policy import Policy

_METHODS = ("place", "tool_returned", "bucket_overrun", "finished", "forget", "instance_gone")


def load_policy(name: str, *, sticky: bool = True, seed: int = 0) -> Policy:
    """A new policy of the catalogue, or of `path.py:Class`, made without arguments.

    `sticky` and `seed` are for policies of the catalogue: see `policy_named`. A class that ignores buckets says so with
    `BUCKETS = False`. Raises ValueError with the reason.
    """
    if not is_path(name):
        return policy_named(name, sticky=sticky, seed=seed)
    if not sticky:
        raise ValueError(f"{name} follows prefixes as its own rule says: leave sticky true")
    path = name.rpartition(":")[0]
    if not Path(path).is_file():
        raise ValueError(f"policy is {name!r}: there is no file {path}; give path.py:Class")
    try:
        policy = _class_named(name)()
    except Exception as error:  # noqa: BLE001 - the class is the user's own code: any failure is bad input
        raise ValueError(f"policy is {name!r}: {type(error).__name__}: {error}") from None
    lacking = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if lacking:
        raise ValueError(
            f"policy is {name!r}, which has no {', '.join(lacking)}; it needs the methods of libra.route.policy.Policy"
        )
    found: Policy = policy
    return found


@lru_cache
def _class_named(name: str) -> Any:
    """Run the file once, however many policies are made."""
    path, _, kind = name.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # of a file named .py
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)


def looks_at_buckets(policy: Policy) -> bool:
    """Whether the policy uses buckets, and so can use engines of several sizes."""
    return getattr(policy, "BUCKETS", True) is not False


def restore_policy(name: str, snapshot: dict[str, Any]) -> Policy:
    """The policy `name` as it was when it gave `snapshot`. Raises ValueError as `load_policy`, and if the snapshot is
    of another policy or format."""
    if not is_path(name):
        return policy_restored(name, snapshot)
    kind = type(load_policy(name))
    try:
        return kind.restore(snapshot)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"policy is {name!r}, which cannot be restored: {type(error).__name__}: {error}") from None
