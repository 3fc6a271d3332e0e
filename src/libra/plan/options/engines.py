"""Priced engine options on one class of nodes for one request.

Invariant: an option is listed only if its engines can serve a class. Before the correction by `BatchFactors`, its price
is never below the profile's times for its classes, within the tolerance of `libra.cost.lines.iteration_lines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from libra.config.recipe import Recipe
from libra.cost.adapters import engine_bytes, version_bytes
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.engine_memory import kv_tokens
from libra.cost.grid import EngineGrid, EngineProfile
from libra.cost.lines import iteration_lines, prefill_line
from libra.cost.longest import MemberSeconds
from libra.cost.quantization import rollout_quantization
from libra.cost.rollout import EngineTiming, batch_work, refill_seconds, refills, secant_timings
from libra.cost.sources.roofline import engine_degrees
from libra.cost.transfer import fabric, weight_sync
from libra.cost.whole_iterations import EVEN, RunningBatch, running_batch, whole_iterations
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.lengths import TrajectoryClass
from libra.plan.options.menu import Rejected
from libra.plan.problem import EngineOption

# Slowdowns between which the seconds of the longest trajectory are interpolated. The last one sets the slope beyond 32,
# where the seconds of tools are negligible.
_SLOWED = (1.0, 2.0, 4.0, 8.0, 32.0, 1e6)


def engine_kv_tokens(
    model: ModelSpec,
    nodes: NodeClass,
    recipe: Recipe,
    tp: int,
    taken: float = 0.0,
    *,
    context: float | None = None,
) -> int:
    """Capacity of the KV cache of an engine of `tp` GPUs, in tokens, for sequences of `context` tokens (default:
    `max_length`). 0 if the weights leave no room. `taken` bytes of each GPU belong to another engine.
    """
    return kv_tokens(
        model,
        nodes.gpu.usable,
        recipe.gpu_memory_utilization,
        tp,
        batched_tokens=recipe.max_batched_tokens,
        quantization=rollout_quantization(recipe),
        taken=taken + engine_bytes(recipe, model, tp),
        context=recipe.max_length if context is None else context,
        switched=nodes.gpu.switched,
    )


def batch_kv_tokens(
    model: ModelSpec, nodes: NodeClass, recipe: Recipe, tp: int, classes: Sequence[TrajectoryClass]
) -> int:
    """Tokens that the KV cache of an engine of `tp` GPUs holds while it decodes a batch of these classes. At least the
    tokens of one trajectory of `max_length`, if it fits alone.
    """
    alone = min(engine_kv_tokens(model, nodes, recipe, tp), recipe.max_length)
    return max(alone, engine_kv_tokens(model, nodes, recipe, tp, context=mean_context(classes)))


def mean_context(classes: Sequence[TrajectoryClass]) -> float:
    """Mean tokens of context of the sequences that decode at one time."""
    generated = sum(cls.share * cls.generated for cls in classes)
    return sum(cls.share * cls.context_sum for cls in classes) / generated if generated else 1.0


def engine_options(
    model: ModelSpec,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profile: EngineProfile,
    longest_context: int,
    factors: BatchFactors = BATCH,
) -> tuple[tuple[EngineOption, ...], tuple[Rejected, ...]]:
    """Options of every tensor-parallel degree (across nodes if no node holds the model), and the rejected degrees.

    All trajectories of a step start when weights are published. A lower `max_num_seqs` would only make them wait, so
    engines have the largest value that memory allows. Options of a degree differ in the number of sequences for which
    their price is most exact.
    """
    options: list[EngineOption] = []
    rejected: list[Rejected] = []
    known = {grid.tp for grid in profile.engines}
    quantization = rollout_quantization(recipe)
    for tp in engine_degrees(model, nodes, recipe):
        shape = f"{nodes.name}/tp{tp}"
        refused = quantization.tp_refusal(model, tp)
        if refused is not None:
            rejected.append(Rejected(shape, "does not divide", refused))
            continue
        if tp not in known:
            rejected.append(Rejected(shape, "no times", f"the profile has no times for it ({profile.source})"))
            continue
        kv = batch_kv_tokens(model, nodes, recipe, tp, classes)
        holds = min(engine_kv_tokens(model, nodes, recipe, tp), longest_context)
        if holds < classes[0].peak_context:
            weights = quantization.weight_bytes(model, tp)
            rejected.append(
                Rejected(
                    shape,
                    "does not fit",
                    f"{weights / 1e9:.1f} GB of weights leave room for {kv:,} tokens of KV in"
                    f" {nodes.gpu.memory / 1e9:.1f} GB; the shortest class needs {classes[0].peak_context:,}",
                )
            )
            continue
        options += shape_options(nodes, recipe, classes, profile.grid(tp), shape, kv, holds, model, factors)
    return tuple(options), tuple(rejected)


def shape_options(
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    grid: EngineGrid,
    shape: str,
    kv: int,
    holds: int,
    model: ModelSpec,
    factors: BatchFactors = BATCH,
    *,
    slowed: float = 1.0,
    recalls: float = 0.0,
) -> list[EngineOption]:
    """Options of engines with `kv` tokens of KV memory and contexts of up to `holds` tokens. All times of
    the engines are multiplied by `slowed`, and `recalls` per second lose the contexts of all trajectories in flight."""
    served = [cls for cls in classes if cls.peak_context <= holds]
    running = running_batch(served, overlapping=recipe.staleness > 0)
    engine = priced_engine(recipe, classes, grid if slowed == 1 else grid.slowed(slowed), kv, holds, running)
    timing, max_num_seqs = engine.timing, engine.max_num_seqs
    longest = max([1.0, *(cls.context_sum / cls.generated for cls in served if cls.generated)])
    mean = mean_context(served)
    together = max(2, min(max_num_seqs, recipe.batch, int(kv / max(1.0, mean))))
    weights = version_bytes(recipe, model)
    option = partial(
        EngineOption,
        shape=shape,
        pool=nodes.name,
        devices=grid.tp,
        max_num_seqs=max_num_seqs,
        holds=holds,
        stall=slowed * weight_sync(weights, trainer_nodes=1, engine_nodes=1, fabric=fabric(nodes)).stall,
    )
    return [
        option(**_batch_prices(near, recipe, classes, kv, factors, recalls))
        for near in secant_timings(timing, engine.grid, together, (max(1.0, mean), longest))
    ]


@dataclass(frozen=True, slots=True)
class PricedEngine:
    """Times of an engine, as priced by the planner."""

    timing: EngineTiming
    grid: EngineGrid  # of whole iterations
    max_num_seqs: int


def priced_engine(
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    grid: EngineGrid,
    kv: int,
    holds: int,
    running: RunningBatch = EVEN,
) -> PricedEngine:
    """Price an engine with `kv` tokens of KV memory and contexts of up to `holds`; `running` is its decode batch."""
    contexts = [c.context_sum / c.generated for c in classes if c.peak_context <= holds and c.generated] or [1.0]
    max_num_seqs = min(int(kv / max(1.0, min(contexts))), grid.batches[-1])
    host = grid.host
    try:
        grid = whole_iterations(grid, max_num_seqs, recipe.max_batched_tokens, running)
        prefill = prefill_line(grid, recipe.max_batched_tokens)
    except ValueError as error:
        raise ValueError(f"max_batched_tokens is {recipe.max_batched_tokens}: {error}: lower it") from None
    lines = iteration_lines(grid, max_num_seqs, contexts=(1.0, float(max(2, holds))), kv_tokens=float(kv))
    timing = EngineTiming(
        lines,
        prefill.per_token,
        prefill.per_token_context,
        per_turn=host.admission,
        per_admitted_token=host.context_token + host.cached_token,
    )
    return PricedEngine(timing, grid, max_num_seqs)


def _batch_prices(
    timing: EngineTiming,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    kv: int,
    factors: BatchFactors,
    recalls: float,
) -> dict[str, Any]:
    """Prices of an option from one timing of its engines, by class: work, refills, and seconds of the longest
    trajectory.
    """
    batches = 1 + recipe.staleness  # in flight; a step can wait for the longest trajectory of each
    expected = [recipe.batch * cls.share for cls in classes]
    members = MemberSeconds.of(timing, classes).corrected(factors)
    stays = members.means(len(classes))
    # By Little's law, count * stay / step trajectories of a class are in flight.
    refresh, again = [0.0] * len(classes), [0.0] * len(classes)
    if recipe.kv_on_update == "refresh" and recipe.staleness:
        for j, (count, cls, stay) in enumerate(zip(expected, classes, stays, strict=True)):
            refill = refill_seconds(timing, cls)
            # At an update, live contexts in their last turn are not prefilled again.
            refresh[j] = count * stay * max(0.0, cls.turns - 1) / max(1.0, cls.turns) * refill
            again[j] = min(max(0.0, cls.turns - 1), float(batches)) * refill
    # A recall loses the contexts of the count * stay / step trajectories in flight.
    lost = [
        recalls * count * stay * refill_seconds(timing, cls) if recalls else 0.0
        for count, cls, stay in zip(expected, classes, stays, strict=True)
    ]
    work = [
        [count * row + prefilled for row in batch_work(timing, cls, kv, factors)]
        for count, cls, prefilled in zip(expected, classes, lost, strict=True)
    ]
    prices = {
        "work": tuple(zip(*work, strict=True)),
        "refresh": tuple(refresh),
        **residences(members.more(generates=again), recipe.batch),
    }
    refill_all = [count * refills(timing, cls, factors) for count, cls in zip(expected, classes, strict=True)]
    if not any(refill_all):
        return prices
    # One batch for any staleness: most trajectories of an older batch are finished, and only its longest continue.
    caches = [
        count * cls.context_sum / cls.generated / kv if cls.generated else 0.0
        for count, cls in zip(expected, classes, strict=True)
    ]
    return {**prices, "refill": tuple(refill_all), "kv_occupancy": tuple(caches)}


def residences(members: MemberSeconds, draws: float) -> dict[str, Any]:
    """Seconds of the longest of `draws` trajectories of an option, alone and together with others."""
    upto = [members.longest(draws, slowed) for slowed in _SLOWED]
    lines = _chords(upto)
    return {
        "residence": upto[0],
        "generates": tuple(generates for generates, _ in lines),
        "waits": tuple(waits for _, waits in lines),
    }


def _chords(upto: Sequence[Sequence[float]]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """(generates, waits) of [class] for each line through the seconds [slowed][class] of two neighbours in `_SLOWED`.
    Seconds are convex, so between its two points a line is the highest. All options have the same lines."""
    found: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for (low, before), (high, after) in pairwise(zip(_SLOWED, upto, strict=True)):
        generates = tuple((more - less) / (high - low) for less, more in zip(before, after, strict=True))
        waits = tuple(max(0.0, seconds - low * rate) for seconds, rate in zip(before, generates, strict=True))
        found.append((generates, waits))
    return found
