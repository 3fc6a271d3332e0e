"""The routing policies by the names that users give them.

Invariant: a name means one rule, the same one that its snapshots name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from libra.route import cmlfq, published
from libra.route.baselines import LeastLoaded, RoundRobin, TwoChoices
from libra.route.bucket import AttainedService
from libra.route.by_length import LengthByPrompt
from libra.route.cmlfq import CMLFQ
from libra.route.policy import Policy
from libra.route.predictor import LengthPredictor
from libra.route.published import PublishedCMLFQ
from libra.route.shortest import ShortestRemaining

_MAKE: Mapping[str, Callable[[bool, int], Policy]] = {
    RoundRobin.NAME: lambda sticky, seed: RoundRobin(sticky=sticky),
    LeastLoaded.NAME: lambda sticky, seed: LeastLoaded(sticky=sticky),
    TwoChoices.NAME: lambda sticky, seed: TwoChoices(sticky=sticky, seed=seed),
    LengthByPrompt.NAME: lambda sticky, seed: LengthByPrompt(sticky=sticky),
    LengthPredictor.NAME: lambda sticky, seed: LengthPredictor(sticky=sticky),
    AttainedService.NAME: lambda sticky, seed: AttainedService(sticky=sticky),
    ShortestRemaining.NAME: lambda sticky, seed: ShortestRemaining(sticky=sticky),
    published.NAME: lambda sticky, seed: PublishedCMLFQ(),
    cmlfq.NAME: lambda sticky, seed: CMLFQ(),
}
POLICIES = tuple(_MAKE)


def policy_named(name: str, *, sticky: bool = True, seed: int = 0) -> Policy:
    """A new policy, which has seen nothing yet.

    `sticky`: a later turn follows its trajectory's prefix where it can; `seed` is for the rules that draw. Raises
    ValueError for a name that is none of `POLICIES`, and where C-MLFQ, which follows prefixes always, is told not to.
    """
    if name not in _MAKE:
        raise ValueError(f"policy is {name!r}; choose one of {', '.join(POLICIES)}")
    if name in (published.NAME, cmlfq.NAME) and not sticky:
        raise ValueError(f"{name} follows prefixes inside a bucket as part of its rule: leave sticky true")
    return _MAKE[name](sticky, seed)


def policy_restored(name: str, snapshot: dict[str, Any]) -> Policy:
    """The policy `name` as it was when it gave `snapshot`. Raises ValueError as `policy_named`, and if the snapshot is
    of another policy or format."""
    return type(policy_named(name)).restore(snapshot)
