"""The routing policies, by name.

Invariant: each name is one rule, also in snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra.config.yaml_file import nearest
from libra.route.baselines import LeastLoaded, RoundRobin, ShortestRemaining, TwoChoices
from libra.route.bucket import AttainedService
from libra.route.cmlfq import CMLFQ
from libra.route.expected_length import LengthByPrompt, LengthPredictor
from libra.route.live import LivePolicy, StickyPolicy
from libra.route.policy import Policy
from libra.route.published import PublishedCMLFQ
from libra.route.session_hash import SessionHash

_BY_NAME: dict[str, type[LivePolicy[Any]]] = {
    policy.NAME: policy
    for policy in (
        RoundRobin,
        LeastLoaded,
        TwoChoices,
        SessionHash,
        LengthByPrompt,
        LengthPredictor,
        AttainedService,
        ShortestRemaining,
        PublishedCMLFQ,
        CMLFQ,
    )
}
POLICIES = tuple(_BY_NAME)


def policy_named(name: str, *, sticky: bool = True, seed: int = 0) -> Policy:
    """Make a new, untrained policy. With `sticky`, a later turn goes to the instance with its prefix if possible.
    `seed` is for rules with random draws. Raises `ValueError` for a name that is not in `POLICIES`, and for `sticky`
    false with a policy that always follows prefixes.
    """
    kind = _kind(name)
    if issubclass(kind, TwoChoices):
        return kind(sticky=sticky, seed=seed)
    if issubclass(kind, StickyPolicy):
        return kind(sticky=sticky)
    if not sticky:
        raise ValueError(f"{name} follows prefixes as part of its rule: leave sticky true")
    return kind()


def is_path(name: str) -> bool:
    """Whether the name of a policy has the form path.py:Class."""
    return ".py:" in name


def ignores_buckets(name: str) -> bool:
    """Whether the policy with this name ignores buckets. False for a user's own class (path.py:Class), which may use
    buckets.
    """
    kind = _BY_NAME.get(name)
    return kind is not None and not kind.BUCKETS


def policy_restored(name: str, snapshot: dict[str, Any]) -> Policy:
    """Make the policy `name` in the state of `snapshot`. Raises `ValueError` like `policy_named`, and for a snapshot of
    another policy or format.
    """
    return _kind(name).restore(snapshot)


def _kind(name: str) -> type[LivePolicy[Any]]:
    check_policy(name)
    return _BY_NAME[name]


def check_policy(name: str, known: Sequence[str] = POLICIES) -> None:
    """Raise `ValueError` for a name that is not in `known`."""
    if name not in known:
        close = nearest(name, known)
        raise ValueError(
            f"policy is {name!r}; " + (f"did you mean {close}?" if close else f"choose one of {', '.join(known)}")
        )
