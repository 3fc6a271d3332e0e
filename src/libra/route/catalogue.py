"""The routing policies by the names that users give them.

Invariant: a name means one rule, the same one that its snapshots name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from libra.route import cmlfq
from libra.route.baselines import LeastLoaded, RoundRobin, TwoChoices
from libra.route.cmlfq import PublishedCMLFQ
from libra.route.policy import Policy

_MAKE: Mapping[str, Callable[[bool, int], Policy]] = {
    RoundRobin.NAME: lambda sticky, seed: RoundRobin(sticky=sticky),
    LeastLoaded.NAME: lambda sticky, seed: LeastLoaded(sticky=sticky),
    TwoChoices.NAME: lambda sticky, seed: TwoChoices(sticky=sticky, seed=seed),
    cmlfq.NAME: lambda sticky, seed: PublishedCMLFQ(),
}
POLICIES = tuple(_MAKE)


def policy_named(name: str, *, sticky: bool = True, seed: int = 0) -> Policy:
    """A new policy, which has seen nothing yet.

    `sticky`: a later turn follows its trajectory's prefix where it can; `seed` is for the rules that draw. Raises
    ValueError for a name that is none of `POLICIES`, and where C-MLFQ, which follows prefixes always, is told not to.
    """
    if name not in _MAKE:
        raise ValueError(f"policy is {name!r}; choose one of {', '.join(POLICIES)}")
    if name == cmlfq.NAME and not sticky:
        raise ValueError(f"{name} follows prefixes inside a bucket as part of its rule: leave sticky true")
    return _MAKE[name](sticky, seed)
