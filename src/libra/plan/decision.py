"""Decides whether a transition is worth its cost.

Invariant: both allocations are priced for the problem's work, and corrected by the price bias that the run has learned.
A change must earn back its cost within the horizon. Its gain must exceed the errors of the tracked statistics and of
the corrected prices. There is no other threshold. A `Decision` records the numbers that led to it, and the priced
moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra.cost.adapters import training_bytes, version_bytes
from libra.cost.device import SwitchCost
from libra.cost.lines import prefill_line
from libra.cost.rollout import EngineTiming, refill_seconds
from libra.cost.transfer import fabric, weight_sync
from libra.cost.whole_iterations import whole_iterations
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import infeasibility, price
from libra.plan.price_bias import BOTTLENECKS, EXACT, PriceBias
from libra.plan.problem import Problem
from libra.plan.solution import Bottleneck, Prediction
from libra.plan.transition import IDLE, Role, Transition, engine_shape

# The vLLM blog (Zero-Reload Model Switching with vLLM Sleep Mode, 2025) reports 30 s to over 100 s to start an engine
# with its weights. This is the geometric mean; a run uses its own measurement instead.
ENGINE_START = 55.0
# Assumed time to start processes, import libraries and build the model. Communicators add at most a few seconds
# (MegaScale, Jiang et al. 2024, arXiv 2402.15627, sec. 3.5: less than 5 s on 2,048 GPUs).
TRAINER_START = 30.0
# Frontier (arXiv 2605.21312): 4.52 s to change between the roles colocated, prefill and decode. The process keeps
# running and keeps its weights.
ROLE_CHANGE = 4.52


def switch_cost(request: ClusterRequest) -> SwitchCost:
    """Assumed seconds of role changes for the request's model on its cluster, used until a run measures them. A
    starting replica also waits for its weights and optimiser state, which may cross the slowest network of the cluster.
    """
    recipe, model = request.recipe, request.model
    slowest = min((fabric(nodes) for nodes in request.cluster.nodes), key=lambda links: links.network)
    state = model.trained_parameters * training_bytes(recipe, model).total
    load = weight_sync(version_bytes(recipe, model), 1, 1, slowest).stall
    return SwitchCost(
        engine_start=ENGINE_START + load, trainer_join=TRAINER_START + state / slowest.network, weight_load=load
    )


def live_refill(request: ClusterRequest) -> float:
    """Device seconds to prefill all live contexts again, on the slowest engines.

    Counts `1 + staleness` live batches, the most that can be in flight. Each context is at a random token of its
    generation.
    """
    recipe = request.recipe
    alive = (1 + recipe.staleness) * recipe.batch
    dearest = 0.0
    for profile in request.profiles:
        for grid in profile.engines:
            budget = recipe.max_batched_tokens
            prefill = prefill_line(whole_iterations(grid, grid.batches[-1], budget), budget)
            timing = EngineTiming((), prefill.per_token, prefill.per_token_context, per_turn=0.0)
            each = sum(cls.share * refill_seconds(timing, cls) for cls in request.classes)
            dearest = max(dearest, alive * each * grid.tp)
    return dearest


def machine_seconds(transition: Transition, switch: SwitchCost) -> float:
    """Seconds that the moves take on one machine, one after another. The time to stop an engine is part of the next
    start.
    """
    return sum(
        switch.trainer_join if move.after.role is Role.TRAIN else switch.engine_start for move in transition.moves
    )


def cluster_seconds(problem: Problem, transition: Transition, switch: SwitchCost, refill: float = 0.0) -> float:
    """Seconds lost while groups of a cluster change; `refill` is `live_refill`, or 0 if no contexts are lost."""
    if transition.before is None:
        return 0.0
    engines = {(move.worker, engine_shape(move.before)) for move in transition.moves if move.before != IDLE}
    starting = [
        switch.trainer_join
        if move.after.role is Role.TRAIN
        else min(ROLE_CHANGE, switch.engine_start)  # the engine runs already, and only its role changes
        if (move.worker, engine_shape(move.after)) in engines
        else switch.engine_start
        for move in transition.moves
        if move.after != IDLE
    ]
    devices = {option.shape: sum(option.uses.values()) for option in problem.engines}
    # A shape that is no longer on the menu has stopped for other reasons, and its contexts are lost already.
    stopped = sum(
        devices.get(engine_shape(move.before) or "", 0) for move in transition.moves if move.before.role is Role.ROLLOUT
    )
    before = sum(count * devices.get(shape, 0) for shape, count in transition.before.engines_by_shape.items())
    after = sum(count * devices[shape] for shape, count in transition.after.engines_by_shape.items())
    lost = refill * stopped / before / after if stopped else 0.0
    return max(starting, default=0.0) + lost


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice between the current and the proposed allocation, with the reason."""

    current: Prediction | None  # corrected; None: nothing runs, or the running allocation cannot serve the problem
    proposed: Prediction  # corrected
    transition: Transition  # from the current allocation to the proposed one, also if `taken` is false
    gain_per_step: float | None  # seconds; None: the current allocation has no price
    horizon_steps: float  # steps for which the proposed plan is expected to hold
    cost: float  # seconds of training time that the change loses
    uncertainty: float  # relative error of the tracked work
    price_error: float  # seconds: standard error of the gain due to errors of prices
    taken: bool
    reason: str

    @property
    def doubt(self) -> float:
        """Seconds per step that the gain must exceed: the two independent errors, combined. 0 if the current allocation
        has no price.
        """
        return 0.0 if self.current is None else math.hypot(self.uncertainty * self.current.step, self.price_error)


@dataclass(frozen=True, slots=True)
class Case:
    """One possible forecast of the coming work, and its probability."""

    problem: Problem
    weight: float  # probability
    recalled: frozenset[str] = frozenset()  # lent shapes whose engines are all away

    def left(self, allocation: Allocation) -> Allocation:
        """The allocation without the engines that are away in this case."""
        return allocation.without(self.recalled) if self.recalled else allocation

    def infeasibility(self, allocation: Allocation) -> str | None:
        """Reason why the allocation cannot serve the work in this case; None if it can."""
        return infeasibility(self.problem, self.left(allocation))


def decide(
    cases: Sequence[Case],
    transition: Transition,
    *,
    horizon_steps: float,
    uncertainty: float,
    cost: float,
    bias: PriceBias,
) -> Decision:
    """Compare the two allocations of a transition over all cases. The change is made if

        (current step - proposed step) * horizon_steps  >  cost
        (current step - proposed step)**2               >  (uncertainty * current step)**2 + price_error**2

    with both steps in expected seconds over the same cases, corrected by the `bias`. `cost` is the transition's
    seconds. `price_error` is the standard error of the difference of the two corrected steps. If both steps have the
    same bottleneck, its correction factor has the same relative error in both, so only the error of the difference
    counts. If the bottlenecks differ, their errors cancel only as far as they are correlated. A current allocation that
    does not fit all cases is changed at any cost. Raises ValueError when an argument is negative, or the proposal does
    not fit.
    """
    for name, value in (("horizon_steps", horizon_steps), ("uncertainty", uncertainty), ("cost", cost)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; give a number >= 0")
    current, proposed = transition.before, transition.after

    def decided(
        before: _Expected | None, gain: float | None, reason: str, *, error: float = 0.0, taken: bool = True
    ) -> Decision:
        was = None if before is None else before.step
        return Decision(was, after.step, transition, gain, horizon_steps, cost, uncertainty, error, taken, reason)

    after = _expected(cases, proposed, bias)
    if current is None:
        return decided(None, None, "no allocation is running that can continue: the best plan starts")
    unfit = next((reason for case in cases if (reason := case.infeasibility(current)) is not None), None)
    if unfit is not None:
        return decided(None, None, f"the current allocation no longer fits: {unfit}")
    before = _expected(cases, current, bias)
    gain = before.step.step - after.step.step
    if current == proposed:
        return decided(before, gain, "the current allocation is optimal", taken=False)
    error = bias.error_between(before.bounds, after.bounds)
    taken, reason = _weigh(before.step.step, gain, horizon_steps, cost, uncertainty * before.step.step, error)
    return decided(before, gain, reason, error=error, taken=taken)


def expected(cases: Sequence[Case], allocation: Allocation, bias: PriceBias = EXACT) -> Prediction:
    """Mean corrected price of an allocation over the cases; the bottleneck is that of the likeliest case. Raises
    ValueError if the allocation does not fit a case.
    """
    return _expected(cases, allocation, bias).step


@dataclass(frozen=True, slots=True)
class _Expected:
    step: Prediction
    bounds: dict[Bottleneck, float]  # expected seconds of a step by bottleneck, which may differ between cases


def _expected(cases: Sequence[Case], allocation: Allocation, bias: PriceBias) -> _Expected:
    prices = [bias.corrected(price(case.problem, case.left(allocation))) for case in cases]
    likeliest = max(range(len(cases)), key=lambda index: cases[index].weight)

    def mean(values: Iterable[float]) -> float:
        return math.fsum(case.weight * value for case, value in zip(cases, values, strict=True))

    step = Prediction(
        step=mean(each.step for each in prices),
        rollout=mean(each.rollout for each in prices),
        training=mean(each.training for each in prices),
        latency=mean(each.latency for each in prices),
        bottleneck=prices[likeliest].bottleneck,
    )
    bounds = {name: mean(each.step * (each.bottleneck == name) for each in prices) for name in BOTTLENECKS}
    return _Expected(step, bounds)


def _weigh(
    step: float, gain: float, horizon_steps: float, cost: float, unsure: float, price_error: float
) -> tuple[bool, str]:
    """Return whether a gain of `gain` seconds per step is worth its cost, and the reason. A step takes `step` seconds.
    The error of the tracked work is `unsure` seconds per step, the error of the prices `price_error` seconds per step.
    """
    if gain <= 0:
        return (
            False,
            f"no better allocation was found: the best other allocation takes {-gain:.4g} s longer than {step:.4g} s",
        )
    saves = f"the change saves {gain:.4g} s of {step:.4g} s a step"
    doubt = math.hypot(unsure, price_error)
    if gain <= doubt:
        of = " and ".join(
            [f"{unsure:.4g} s of uncertainty in the tracked work"] * (unsure > 0)
            + [f"{price_error:.4g} s of uncertainty in prices"] * (price_error > 0)
        )
        together = f", {doubt:.4g} s together" if unsure > 0 and price_error > 0 else ""
        return False, f"{saves}, not more than the {of}{together}"
    total = f"{saves}, {gain * horizon_steps:.4g} s over {horizon_steps:.4g} steps"
    if gain * horizon_steps <= cost:
        return False, f"{total}, not more than the {cost:.4g} s it costs"
    return True, f"{total}, more than the {cost:.4g} s it costs"
