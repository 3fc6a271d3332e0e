"""A user's own routing policies, loaded from path.py:Class.

Only a path from the command line or from a request is imported, never a path from a plan or a log.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from libra.route.catalogue import is_path, policy_named, policy_restored
from libra.route.policy import Fleet, Placement, Policy, ToolReturn, TurnRequest
from libra.trajectory import Trajectory

_METHODS = ("place", "tool_returned", "bucket_overrun", "finished", "forget", "instance_gone")


class PolicyError(ValueError):
    """A user's own policy failed. The message names the policy, the method and the error."""


class OwnPolicy:
    """Wraps a user's own policy. Errors name the policy, and an answer must be a placement or None. Other attributes,
    such as `snapshot`, are passed through.
    """

    def __init__(self, name: str, policy: Any) -> None:
        self._name, self._policy = name, policy

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._placement("place", request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._placement("tool_returned", request, returned, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return self._placement("bucket_overrun", request, generated_tokens, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        self._answer("finished", trajectory)

    def forget(self, trajectory_id: str) -> None:
        self._answer("forget", trajectory_id)

    def instance_gone(self, instance: str) -> None:
        self._answer("instance_gone", instance)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # a copy that is being made has no policy yet
            raise AttributeError(attribute)
        return getattr(self._policy, attribute)

    def _placement(self, method: str, *given: object) -> Placement | None:
        found = self._answer(method, *given)
        if found is None or isinstance(found, Placement):
            return found
        raise PolicyError(f"policy {self._name}: {method} returned {found!r:.80}; return a Placement, or None")

    def _answer(self, method: str, *given: object) -> Any:
        try:
            return getattr(self._policy, method)(*given)
        except Exception as error:
            words = " ".join(str(error).split())
            raise PolicyError(f"policy {self._name}: {method} raised {type(error).__name__}: {words}") from error


def load_policy(name: str, *, sticky: bool = True, seed: int = 0) -> Policy:
    """Make a new policy from the catalogue, or from `path.py:Class`, whose class is called without arguments.

    `sticky` and `seed` apply to policies of the catalogue; see `policy_named`. A class that ignores buckets sets
    `BUCKETS = False`. Raises `ValueError` with the reason.
    """
    if not is_path(name):
        return policy_named(name, sticky=sticky, seed=seed)
    if not sticky:
        raise ValueError(f"{name} follows prefixes by its own rule: leave sticky true")
    path = name.rpartition(":")[0]
    if not Path(path).is_file():
        raise ValueError(f"policy is {name!r}: there is no file {path}; give path.py:Class")
    try:
        policy = _class_named(name)()
    except Exception as error:  # noqa: BLE001 - the class is the user's code: any failure is bad input
        raise ValueError(f"policy is {name!r}: {type(error).__name__}: {error}") from None
    lacking = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if lacking:
        raise ValueError(
            f"policy is {name!r}, which has no {', '.join(lacking)}; add the methods of libra.route.policy.Policy"
        )
    return cast(Policy, OwnPolicy(name, policy))


@lru_cache
def _class_named(name: str) -> Any:
    """The class of this name. Its file is run only once."""
    path, _, kind = name.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # true for any name that ends with .py
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)


def looks_at_buckets(policy: Policy) -> bool:
    """Whether the policy uses buckets, so that it can use engines of several sizes."""
    return getattr(policy, "BUCKETS", True) is not False


def restore_policy(name: str, snapshot: dict[str, Any]) -> Policy:
    """Make the policy `name` in the state of `snapshot`. Raises `ValueError` like `load_policy`, and for a snapshot of
    another policy or format.
    """
    if not is_path(name):
        return policy_restored(name, snapshot)
    load_policy(name)
    try:
        return cast(Policy, OwnPolicy(name, _class_named(name).restore(snapshot)))
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"policy is {name!r}, which cannot be restored: {type(error).__name__}: {error}") from None
