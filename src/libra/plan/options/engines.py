"""Every way to generate on one class of nodes, priced for one request.

Invariant: an option is listed only if an engine of it can serve some class, and before `BatchFactors` correct it its
price is never below what the profile says for the classes it serves, to the tolerance that
`libra.cost.grid.iteration_lines` states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from libra.config.recipe import Recipe
from libra.cost.collectives import fabric
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.engine_memory import kv_tokens
from libra.cost.grid import EngineGrid, EngineProfile, iteration_lines, prefill_line
from libra.cost.rollout import (
    EngineTiming,
    Longest,
    batch_alone,
    batch_work,
    longest_alone,
    refill_seconds,
    secant_timings,
)
from libra.cost.sources.rates import Calibration
from libra.cost.sources.roofline import roofline
from libra.cost.transfer import weight_sync
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.lengths import TrajectoryClass
from libra.plan.problem import EngineOption

# Shares of tool returns that find their context gone, at most, that options are priced for; with 1 all of them do.
_EVICTED = (0.0, 0.125, 0.25, 0.5, 1.0)
# Of batches that overlap, one that waits for a long trajectory gives time to those behind it: with 0 each waits for its
# own, with 1 all of them for the same one. Chosen between, not fitted.
_SHARED_WAIT = 1 / 3
# Times as long as alone that generation takes beside overlapping batches: as on engines that are half busy. Chosen; it
# says which trajectory is the longest and how much is unfinished beside it, not what either takes.
_SLOWED = 2.0
_TOLD_APART = 0.04  # relative: longest trajectories whose seconds are as near share an option


@dataclass(frozen=True, slots=True)
class RejectedEngine:
    """An engine size that is no option, and why."""

    shape: str
    reason: str


def tensor_degrees(model: ModelSpec, nodes: NodeClass) -> tuple[int, ...]:
    """Tensor-parallel degrees of an engine: powers of two that divide the node's GPUs and the model's heads."""
    powers = [2**k for k in range(nodes.gpus.bit_length()) if nodes.gpus % 2**k == 0]
    return tuple(tp for tp in powers if model.tp_refusal(tp) is None)


def most_buckets(recipe: Recipe, classes: Sequence[TrajectoryClass]) -> int:
    """Ranges of final context that a router can tell apart: where no tool ever returns, a trajectory says nothing by
    which it could change its bucket."""
    return recipe.max_buckets if any(cls.before_first_return < 1 for cls in classes) else 1


def engine_kv_tokens(model: ModelSpec, nodes: NodeClass, recipe: Recipe, tp: int) -> int:
    """Tokens that the KV cache of an engine of `tp` GPUs holds; 0 when the weights leave no room."""
    return kv_tokens(
        model,
        nodes.gpu.memory,
        recipe.gpu_memory_utilization,
        tp,
        weight_bytes=recipe.rollout_weight_bytes,
        kv_bytes=recipe.kv_bytes,
        batched_tokens=recipe.max_batched_tokens,
    )


def node_roofline(
    nodes: NodeClass, model: ModelSpec, recipe: Recipe, calibration: Calibration | None = None
) -> EngineProfile:
    """The roofline of every degree of an engine on these nodes, with measured rates where there is a calibration."""
    return roofline(
        nodes.gpu,
        model,
        tensor_degrees(model, nodes),
        dtype_bytes=recipe.rollout_weight_bytes,
        intra_bandwidth=nodes.intra_bandwidth,
        calibration=calibration,
    )


def engine_options(
    model: ModelSpec,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profile: EngineProfile,
    longest_context: int,
    factors: BatchFactors = BATCH,
) -> tuple[tuple[EngineOption, ...], tuple[RejectedEngine, ...]]:
    """Options of every tensor-parallel degree, and the degrees that hold no trajectory.

    All trajectories of a step start when weights are published, so fewer seats would only make them wait: engines have
    as many as memory lasts for, and options of a degree differ in the longest class that they are priced for.
    """
    options: list[EngineOption] = []
    rejected: list[RejectedEngine] = []
    known = {grid.tp for grid in profile.engines}
    for tp in tensor_degrees(model, nodes):
        shape = f"{nodes.name}/tp{tp}"
        if tp not in known:
            rejected.append(RejectedEngine(shape, f"the profile has no times for it ({profile.source})"))
            continue
        kv = engine_kv_tokens(model, nodes, recipe, tp)
        holds = min(kv, longest_context)
        if holds < classes[0].peak_context:
            weights = model.weight_bytes(recipe.rollout_weight_bytes, tp)
            rejected.append(
                RejectedEngine(
                    shape,
                    f"{weights / 1e9:.1f} GB of weights leave room for {kv:,} tokens of"
                    f" {nodes.gpu.memory / 1e9:.1f} GB; the shortest class has {classes[0].peak_context:,}",
                )
            )
            continue
        options += _shape_options(nodes, recipe, classes, profile.grid(tp), shape, kv, holds, model, factors)
    return tuple(options), tuple(rejected)


def _shape_options(
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    grid: EngineGrid,
    shape: str,
    kv: int,
    holds: int,
    model: ModelSpec,
    factors: BatchFactors,
) -> list[EngineOption]:
    served = [cls for cls in classes if cls.peak_context <= holds]
    contexts = [cls.context_sum / cls.generated for cls in served if cls.generated] or [1.0]
    shortest, longest = max(1.0, min(contexts)), max(1.0, *contexts)
    try:
        prefill = prefill_line(grid, recipe.max_batched_tokens)
    except ValueError as error:
        raise ValueError(f"max_batched_tokens is {recipe.max_batched_tokens}: {error}: lower it") from None
    weights = model.parameters * recipe.rollout_weight_bytes
    stall = weight_sync(weights, trainer_nodes=1, engine_nodes=1, fabric=fabric(nodes)).stall
    seats = min(int(kv / shortest), grid.batches[-1])
    lines = iteration_lines(grid, seats, contexts=(shortest, longest), kv_tokens=float(kv))
    timing = EngineTiming(lines, prefill.per_token, prefill.per_token_context, per_turn=0.0)
    generated = sum(cls.share * cls.generated for cls in served)
    mean = sum(cls.share * cls.context_sum for cls in served) / generated if generated else 1.0
    together = max(2, min(seats, recipe.batch, int(kv / max(1.0, mean))))
    return [
        option
        for near in secant_timings(timing, grid, together, (max(1.0, mean), longest))
        for option in _batch_options(
            near, recipe, classes, shape, nodes.name, grid.tp, seats, kv, holds, stall, factors
        )
    ]


def _batch_options(
    timing: EngineTiming,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    shape: str,
    pool: str,
    devices: int,
    seats: int,
    kv: int,
    holds: int,
    stall: float,
    factors: BatchFactors,
) -> list[EngineOption]:
    """Options for each class that may be the longest of a bucket, as far as these take different times, and for each
    share of contexts that caches may forget, as far as fewer engines forget more."""
    batches = 1 + recipe.staleness  # that are under way, and that a step can wait for the longest trajectory of
    expected = [recipe.batch * cls.share for cls in classes]
    factors = factors.at(recipe.staleness)
    # A plan lets all its buckets end together, so the last trajectory is the longest of as many more draws. How many
    # buckets it has is not known yet: the geometric mean of the fewest and the most.
    more = math.sqrt(most_buckets(recipe, classes)) * batches**_SHARED_WAIT
    draws = [more * count for count in expected]
    slowed = _SLOWED if recipe.staleness else 1.0
    alone = [batch_alone(timing, cls, count, factors, slowed) for count, cls in zip(draws, classes, strict=True)]
    # By Little's law, count * stay / step trajectories of a class are under way.
    stay = [batch_alone(timing, cls, 1.0, factors) for cls in classes]
    refresh = [0.0] * len(classes)
    if recipe.kv_on_update == "refresh" and recipe.staleness:
        for j, (count, cls) in enumerate(zip(expected, classes, strict=True)):
            refill = refill_seconds(timing, cls)
            # Of the contexts that are alive at an update, those in their last turn are spared.
            refresh[j] = count * stay[j].seconds * max(0.0, cls.turns - 1) / max(1.0, cls.turns) * refill
            again = min(max(0.0, cls.turns - 1), float(batches)) * refill
            alone[j] = replace(alone[j], generates=alone[j].generates + again)
    upto = [longest_alone(alone[: last + 1], draws[: last + 1], slowed) for last in range(len(classes))]
    unfinished = _unfinished_tokens(recipe, classes, _alive(recipe, stay, upto[-1], slowed))
    one_holds = (level for level, share in enumerate(_EVICTED) if sum(unfinished) <= (1 + share) * kv)
    evictions = _EVICTED[: 1 + next(one_holds, len(_EVICTED) - 1)]
    tops: list[int] = []
    for last in reversed(range(len(classes))):
        if not tops or upto[last].seconds < (1 - _TOLD_APART) * upto[tops[-1]].seconds:
            tops.append(last)
    works: list[tuple[int, float, tuple[tuple[float, ...], ...]]] = []
    for top in tops:
        # What others generate while the longest trajectory waits for a tool does not delay it. But where batches
        # overlap it delays the next one, and that the tools' seconds are not slowed is in the price.
        spared = 0.0 if recipe.staleness or not upto[top].waits else upto[top].waits / upto[top].seconds
        for evicted in evictions:
            rows = [
                [count * row for row in batch_work(timing, cls, kv, spared, evicted, factors)]
                for count, cls in zip(expected, classes, strict=True)
            ]
            works.append((top, evicted, tuple(zip(*rows, strict=True))))
    # What is longer than an option's longest class takes no less than this, whichever other option it has.
    by_one = batches * (max(sum(row) for _, _, work in works for row in work) + stall)
    return [
        EngineOption(
            shape=shape,
            pool=pool,
            devices=devices,
            seats=seats,
            holds=holds,
            stall=stall,
            work=work,
            refresh=tuple(refresh),
            residence=tuple(it.seconds if j <= top else by_one + it.seconds for j, it in enumerate(upto)),
            generates=upto[top].generates,
            waits=upto[top].waits,
            # With the most that is priced, a context is always gone, or all of them fit one engine.
            fills=() if evicted == evictions[-1] else tuple(tokens / ((1 + evicted) * kv) for tokens in unfinished),
        )
        for top, evicted, work in reversed(works)
    ]


def _alive(recipe: Recipe, stay: Sequence[Longest], longest: Longest, slowed: float) -> tuple[float, ...]:
    """[class] share of the time that a trajectory of a batch is unfinished, if batches follow each other as fast as
    the longest lets them. All of a batch that is the only one are there at first."""
    most = slowed * longest.generates + longest.waits
    if not recipe.staleness or not most:
        return (1.0,) * len(stay)
    return tuple(min(1.0, (slowed * it.generates + it.waits) / most) for it in stay)


def _unfinished_tokens(recipe: Recipe, classes: Sequence[TrajectoryClass], alive: Sequence[float]) -> tuple[float, ...]:
    """[class] tokens of context of all that is under way.

    Caches forget what was used least recently. In a batch that is served in turns that is what is needed next, so soon
    after not all of it fits anything that is needed is gone: of (1 + x) times as much as fits, a share x.
    """
    batches = (1 + recipe.staleness) * recipe.batch
    return tuple(
        its * batches * cls.share * cls.context_sum / cls.generated if cls.generated else 0.0
        for its, cls in zip(alive, classes, strict=True)
    )
