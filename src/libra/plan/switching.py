"""What a transition costs, in seconds of stepping.

Invariant: a cost is of the very moves that are made, and never below what is lost; what goes on meanwhile is not
credited. On one machine moves are made one after the other, so their seconds add up. On a cluster engines start side by
side on their own devices, and so do replicas, so the slowest start counts:

    seconds = max(engine_start if an engine starts, trainer_join if a replica starts)  +  refill * stopped / generating

A stopped engine loses its KV. Of the device seconds that `refill_seconds` says all live contexts take to be prefilled
again, its share is that of its devices among those that generate now (`stopped`); the engines of the wanted allocation
do it together (`generating` devices). Engines that serve another range keep their KV: only new turns are routed anew.
"""

from __future__ import annotations

from libra.cost.collectives import fabric
from libra.cost.device import SwitchCost
from libra.cost.grid import prefill_line
from libra.cost.rollout import EngineTiming, refill_seconds
from libra.cost.transfer import weight_sync
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.problem import Problem
from libra.plan.transition import IDLE, Role, Transition, group_transition

# The vLLM blog (Zero-Reload Model Switching with vLLM Sleep Mode, 2025) has 30 to over 100 s for a start with weights;
# the middle of that in the logarithm. What runs measures its own.
ENGINE_START = 55.0
# Assumed: processes, imports, building the model. Communicators take a few seconds more at most (MegaScale, Jiang et
# al. 2024, arXiv 2402.15627, sec. 3.5: less than 5 s on 2,048 GPUs).
TRAINER_START = 30.0


def switch_cost(request: ClusterRequest) -> SwitchCost:
    """Role changes of the request's model on its cluster, as long as none has been measured.

    A replica that starts also waits for its weights and optimiser state: they may all have to cross the network of one
    node, the slowest that the cluster has.
    """
    recipe, model = request.recipe, request.model
    slowest = min((fabric(nodes) for nodes in request.cluster.nodes), key=lambda links: links.network)
    state = model.parameters * recipe.training_bytes.total
    load = weight_sync(model.parameters * recipe.rollout_weight_bytes, 1, 1, slowest).stall
    return SwitchCost(
        engine_start=ENGINE_START + load, trainer_join=TRAINER_START + state / slowest.network, weight_load=load
    )


def live_refill(request: ClusterRequest) -> float:
    """Device seconds in which all live contexts could be prefilled again: those of `1 + staleness` batches, as many as
    may be under way, each at a random token of its generation, on the engines to which that comes dearest."""
    recipe = request.recipe
    alive = (1 + recipe.staleness) * recipe.batch
    dearest = 0.0
    for profile in request.profiles:
        for grid in profile.engines:
            prefill = prefill_line(grid, recipe.max_batched_tokens)
            timing = EngineTiming((), prefill.per_token, prefill.per_token_context, per_turn=0.0)
            each = sum(cls.share * refill_seconds(timing, cls) for cls in request.classes)
            dearest = max(dearest, alive * each * grid.tp)
    return dearest


def machine_seconds(transition: Transition, switch: SwitchCost) -> float:
    """Seconds that the moves of one machine's devices take. Stopping an engine is part of what follows it."""
    return sum(
        switch.trainer_join if move.after.role is Role.TRAIN else switch.engine_start for move in transition.moves
    )


def cluster_seconds(problem: Problem, transition: Transition, switch: SwitchCost, refill: float = 0.0) -> float:
    """Seconds lost while groups of a cluster change; `refill` is `live_refill`, 0 where contexts are not lost."""
    if transition.before is None:
        return 0.0
    starting = [
        switch.trainer_join if move.after.role is Role.TRAIN else switch.engine_start
        for move in transition.moves
        if move.after != IDLE
    ]
    devices = {option.shape: option.devices for option in problem.engines}
    # A shape that is no longer on the menu has stopped for other reasons, and its contexts with it.
    stopped = sum(
        devices.get(move.before.shape or "", 0) for move in transition.moves if move.before.role is Role.ROLLOUT
    )
    before = sum(count * devices.get(shape, 0) for shape, count in transition.before.engines_by_shape.items())
    after = sum(count * devices[shape] for shape, count in transition.after.engines_by_shape.items())
    lost = refill * stopped / before / after if stopped else 0.0
    return max(starting, default=0.0) + lost


def switch_seconds(
    problem: Problem, current: Allocation, wanted: Allocation, switch: SwitchCost, refill: float = 0.0
) -> float:
    """`cluster_seconds` between allocations that are not placed."""
    return cluster_seconds(problem, group_transition(current, wanted), switch, refill)
