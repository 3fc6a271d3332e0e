"""Routing policies of the user's own, loaded from path.py:Class.

Only a path that the user typed, or wrote into a request, is imported, never one that a plan or a log names.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from libra.route.catalogue import is_path, policy_named
from libra.route.policy import Policy

_METHODS = ("place", "tool_returned", "bucket_overrun", "finished", "forget", "instance_gone")


def load_policy(name: str, *, seed: int = 0) -> Policy:
    """A new policy of the catalogue, or of `path.py:Class`, made without arguments.

    `seed` is for policies of the catalogue that draw at random. A class that ignores buckets says so with
    `BUCKETS = False`. Raises ValueError with the reason.
    """
    if not is_path(name):
        return policy_named(name, seed=seed)
    path, _, kind = name.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"router is {name!r}: there is no file {path}; give path.py:Class")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        policy = getattr(module, kind)()
    except Exception as error:  # noqa: BLE001 - the file is the user's own code: any failure is bad input
        raise ValueError(f"router is {name!r}: {type(error).__name__}: {error}") from None
    lacking = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if lacking:
        raise ValueError(
            f"router is {name!r}, which has no {', '.join(lacking)}; it needs the methods of libra.route.policy.Policy"
        )
    found: Policy = policy
    return found


def looks_at_buckets(policy: Policy) -> bool:
    """Whether the policy uses buckets, and so can use engines of several sizes."""
    return getattr(policy, "BUCKETS", True) is not False
