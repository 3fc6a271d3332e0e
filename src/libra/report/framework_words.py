"""The sentence on the cost of a framework."""

from __future__ import annotations

from libra.plan.explain.framework_cost import FrameworkCost
from libra.report.words import duration, percent, printable

_NOTHING = 5e-4  # relative difference that the solver accepts to save moves and devices


def framework_sentence(cost: FrameworkCost | None) -> tuple[str, ...]:
    """A sentence on the cost of the plan's framework; empty without a framework."""
    if cost is None:
        return ()
    if cost.share < _NOTHING:
        return (f"Planning for {cost.framework} costs nothing: a step is predicted to take {duration(cost.step)}.",)
    same = cost.router == cost.free_router
    routed = "" if same else f"turns routed by {printable(cost.router)}"
    left = "; ".join(words for words in (cost.restriction, routed) if words)
    other = "" if same else f", which assumes the router {cost.free_router} without errors"
    return (
        f"Planning for {cost.framework} ({left}) makes a step {percent(cost.share)} longer: {duration(cost.step)}"
        f" predicted, against {duration(cost.free)} without --for{other}.",
    )
