"""Whether a proposed plan is worth what the change costs.

Invariant: both allocations are priced for the same work, the request's. A change must earn back its cost within the
horizon, and its gain must exceed what the tracked statistics may be wrong by; no other threshold delays it. The
decision carries every number that it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.plan.moves import Move, diff
from libra.plan.price import fits, price
from libra.plan.problem import Plan, PlanRequest, Prediction


@dataclass(frozen=True, slots=True)
class Decision:
    """Change to the proposed allocation, or stay, and why."""

    current: Prediction | None  # None: the current allocation cannot serve the request
    proposed: Prediction
    moves: tuple[Move, ...]  # from the current allocation to the proposed one, also when the change is not taken
    gain_per_step: float | None  # seconds; None: the current allocation has no price
    horizon_steps: float  # steps for which the proposed plan is expected to hold
    cost: float  # seconds of stepping that the change loses
    uncertainty: float  # relative standard error of the tracked work
    taken: bool
    reason: str


def decide(request: PlanRequest, proposed: Plan, *, horizon_steps: float, uncertainty: float, cost: float) -> Decision:
    """Compare the proposed plan with `request.current`. `cost` is in seconds, from measured moves of this kind."""
    for name, value in (("horizon_steps", horizon_steps), ("uncertainty", uncertainty), ("cost", cost)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; give a number >= 0")
    if request.current is None:
        raise ValueError("request.current is None; put the running allocation there to decide whether to leave it")
    after = price(request, proposed.allocation)
    moves = diff(request.current, proposed.allocation)
    numbers = (horizon_steps, cost, uncertainty)
    unfit = fits(request, request.current)
    if unfit is not None:
        return Decision(None, after, moves, None, *numbers, True, f"the current allocation no longer fits: {unfit}")
    before = price(request, request.current)
    gain = before.step - after.step
    if request.current == proposed.allocation:
        return Decision(before, after, moves, gain, *numbers, False, "the current allocation is optimal")
    taken, reason = _weigh(before.step, gain, *numbers)
    return Decision(before, after, moves, gain, *numbers, taken, reason)


def _weigh(step: float, gain: float, horizon_steps: float, cost: float, uncertainty: float) -> tuple[bool, str]:
    if gain <= 0:
        return (
            False,
            f"nothing better was found: the best other allocation takes {-gain:.4g} s longer than {step:.4g} s",
        )
    saves = f"the change saves {gain:.4g} s of {step:.4g} s a step"
    if gain <= uncertainty * step:
        return False, f"{saves}, not more than the {uncertainty * step:.4g} s by which the tracked work is uncertain"
    total = f"{saves}, {gain * horizon_steps:.4g} s over {horizon_steps:.4g} steps"
    if gain * horizon_steps <= cost:
        return False, f"{total}, not more than the {cost:.4g} s it costs"
    return True, f"{total}, more than the {cost:.4g} s it costs"
