"""The menu of training layouts on one class of nodes: layouts that fit, with prices, and reasons for the others.

Invariant: every layout of the priced space is an option, or `rejected_layouts` has its reason. Plans do not need the
reasons, so they have a separate function. Options with more devices are strictly faster, except held options. Times are
seconds, sizes bytes. `libra.plan.options.layout_space` defines the priced space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.config.recipe import Recipe
from libra.cost.adapters import reference_of, training_bytes, version_bytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch, batch_of
from libra.cost.train_memory import memory_columns
from libra.cost.train_passes import Work
from libra.cost.train_step import StepTable, TrainStep, step_table, train_step
from libra.cost.transfer import fabric, weight_sync
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import Array, LayoutTable, ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.options.layout_space import device_counts, families_of, impossible, members_of, needless
from libra.plan.options.menu import Rejected, RejectionKind
from libra.plan.options.restriction import foreseen, permitted, rejected_family, rejected_parts, whole_node_counts
from libra.plan.problem import TrainingOption

_GB = 1e9
_ENDLESS = 1e12  # data-parallel ranks


@dataclass(frozen=True, slots=True)
class Layouts:
    """The menu of one class of nodes, by number of devices."""

    options: tuple[TrainingOption, ...]
    chosen: Mapping[tuple[str, int], ParallelLayout]  # by layout and replicas of the option


def training_layouts(
    model: ModelSpec,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    held: Sequence[ParallelLayout] = (),
) -> Layouts:
    """The fastest layout for each number of devices of `nodes`, unless fewer devices are as fast. Then the `held`
    layouts that fit, even if others are faster. One optimiser step trains on `recipe.batch` trajectories of `classes`.

    `publish` of an option is the time to send the weights to engines on other nodes of the class, or on the same node
    if there is only one. The result may have no option; `rejected_layouts` then gives the reasons.
    """
    space = _LayoutSpace.of(model, nodes, recipe, classes, needed=True)
    work = space.work
    # Replicas of one family are equal whatever their number, so more can join running replicas.
    chosen: dict[tuple[str, int], ParallelLayout] = {}
    steps: list[float] = []
    for row in space.kept:
        layout = space.priced.layout(row)
        chosen[f"{nodes.name}/{layout.family}", layout.dp] = layout
        steps.append(space.best[row])
    for layout in held:
        key = f"{nodes.name}/{layout.family}", layout.dp
        table = LayoutTable.of([layout])
        small_enough = layout.devices <= nodes.devices and _total(space.memory(table))[0] <= nodes.gpu.memory
        if key not in chosen and small_enough and _may_train(recipe, nodes, layout, model.layers):
            chosen[key] = layout
            steps.append(step_table(work, table).seconds(0))
    tails = _tail_seconds(work, recipe, classes, tuple(chosen.values()))
    options = tuple(
        TrainingOption(
            name,
            nodes.name,
            layout.devices,
            dp,
            seconds,
            _publish_seconds(work, recipe, layout, nodes),
            None if tail is None else min(seconds, tail),
        )
        for ((name, dp), layout), seconds, tail in zip(chosen.items(), steps, tails, strict=True)
    )
    return Layouts(options, chosen)


def priced_step(
    model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: Sequence[TrajectoryClass], layout: ParallelLayout
) -> TrainStep:
    """The parts of a layout's step on trajectories of `classes`."""
    return train_step(_work(model, nodes, recipe, classes), layout)


def rejected_layouts(
    model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: Sequence[TrajectoryClass]
) -> tuple[Rejected, ...]:
    """Layouts of the priced space that are not options of `training_layouts`, with reasons; held layouts are not
    considered. A layout rejected for one number of devices has its own name; a family rejected for all numbers has the
    family's name.
    """
    space = _LayoutSpace.of(model, nodes, recipe, classes)
    rejected = [Rejected(name, "does not divide", reason) for name, reason in impossible(model, nodes)]
    fewer, kept = "", set(space.kept)
    for row, seconds in space.best.items():
        layout = space.priced.layout(row)
        if row in kept:
            fewer = f"{nodes.name}/{layout.family}"
            continue
        reason = f"takes {seconds:.4g} s on {layout.devices} devices; {fewer} is as fast on fewer"
        rejected.append(Rejected(layout.name, "slower", reason))
    families = space.families
    rejected += rejected_parts(recipe.carried_by, nodes, recipe.batch)
    foreign = dict.fromkeys(np.flatnonzero(space.foreign).tolist(), rejected_family(recipe.carried_by))
    too_large = _too_large(families, space.memory, nodes, recipe.batch)
    slower = _slower(space)
    chosen_families = set(space.owner[space.kept].tolist())
    for at in range(len(families)):
        reasons = [found[at] for found in (too_large, slower) if at in found]
        kind: RejectionKind = "slower" if at in slower else "does not fit"
        if at in foreign:
            reasons, kind = [foreign[at]], "framework"
        if not reasons and at not in chosen_families:
            reasons = ["no priced number of devices holds whole replicas of it and two or more ranks to shard over"]
            kind = "does not divide"
        if reasons:
            rejected.append(Rejected(families.layout(at).family, kind, "; ".join(reasons)))
    return tuple(rejected)


@dataclass(frozen=True, slots=True)
class _LayoutSpace:
    """Layouts that fit on one class of nodes, with prices: all of them, or only layouts that could be the fastest."""

    work: Work
    memory: Callable[[LayoutTable], Mapping[str, Array]]  # bytes of a device, by item
    families: LayoutTable
    foreign: NDArray[np.bool_]  # [family] whether the framework has none of the family's layouts
    priced: LayoutTable
    owner: NDArray[np.intp]  # [priced] its family
    used: Array  # [priced] devices
    seconds: Array  # [priced] of a step, by a closed formula
    best: Mapping[int, float]  # row of the fastest layout for each number of devices -> its seconds
    kept: list[int]  # rows of `best` that are faster than all rows with fewer devices

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        nodes: NodeClass,
        recipe: Recipe,
        classes: Sequence[TrajectoryClass],
        needed: bool = False,
    ) -> _LayoutSpace:
        """With `needed`, layouts with more recomputation than they need are left out, since pricing takes most of a
        menu's time.
        """
        work = _work(model, nodes, recipe, classes)
        families = families_of(model, nodes, recipe.max_length)
        framework = recipe.carried_by
        counts = whole_node_counts(framework, nodes, device_counts(nodes.gpus, nodes.count))
        family, table = members_of(families, counts, recipe.batch)
        foreign = ~foreseen(framework, families, model.layers)
        if framework.families:
            allowed = permitted(framework, table, recipe.batch, model.layers)
            foreign[family[allowed]] = False  # a single rank shards nothing, whatever its family is
            family, table = family[allowed], table.take(allowed)

        def memory(layouts: LayoutTable) -> Mapping[str, Array]:
            return memory_columns(
                model, layouts, recipe.max_length, nodes.gpu.memory, work.state, work.reference, recipe.execution
            )

        fits = _total(memory(table)) <= nodes.gpu.memory
        if needed:
            fits &= ~needless(families, counts, family, table, fits)
        priced = table.take(fits)
        steps = step_table(work, priced)
        used = priced.replica_devices * priced.dp
        best = _fastest(used, steps)
        kept, shortest = [], math.inf
        for row, seconds in best.items():
            if seconds < shortest:
                kept.append(row)
                shortest = seconds
        return cls(work, memory, families, foreign, priced, family[fits], used, steps.total, best, kept)


def _may_train(recipe: Recipe, nodes: NodeClass, layout: ParallelLayout, layers: int) -> bool:
    """Whether the framework can express the layout on these nodes."""
    framework = recipe.carried_by
    counts = whole_node_counts(framework, nodes, [layout.devices])
    return bool(counts) and bool(permitted(framework, LayoutTable.of([layout]), recipe.batch, layers)[0])


def _work(model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: Sequence[TrajectoryClass]) -> Work:
    return Work(
        model=model,
        batch=batch_of(classes, recipe.batch),
        state=training_bytes(recipe, model),
        reference=reference_of(recipe),
        gpu=nodes.gpu,
        rates=training_rates(nodes.gpu, recipe.dtype, recipe.execution),
        fabric=fabric(nodes),
    )


def _tail_seconds(
    work: Work, recipe: Recipe, classes: Sequence[TrajectoryClass], layouts: Sequence[ParallelLayout]
) -> list[float | None]:
    """With early gradients, the seconds of each layout after the last trajectory: the gradients of its group (the
    longest trajectory, and others of usual length) and the update. Otherwise None for each layout.

    Layouts are priced together: one by one they would take most of the time of a menu.
    """
    if not recipe.early_gradients or not layouts:
        return [None] * len(layouts)
    usual = batch_of(classes, recipe.samples_per_prompt)
    last = Batch((max(cls.mean_context for cls in classes), *usual.lengths), (1.0, *usual.counts))
    steps = step_table(replace(work, batch=last), LayoutTable.of(layouts))
    return [steps.seconds(row) for row in range(len(layouts))]


def _publish_seconds(work: Work, recipe: Recipe, layout: ParallelLayout, nodes: NodeClass) -> float:
    trainers = layout.devices / nodes.gpus
    engines = 0.0 if nodes.count == 1 else max(1.0, nodes.count - trainers)
    return weight_sync(version_bytes(recipe, work.model), trainers, engines, work.fabric).publish


def _total(columns: Mapping[str, Array]) -> Array:
    total: Array = np.sum(list(columns.values()), axis=0)
    return total


def _fastest(used: Array, steps: StepTable) -> dict[int, float]:
    """The fastest layout for each number of devices, fewest devices first: its row and its seconds.

    Unequal micro-batches make most pipelines slower than their formula. Pipelines are simulated in the order of the
    formula's result, until no other layout can be faster. Ties go to the earlier row.
    """
    order = np.lexsort((steps.total, used))
    fastest = {}
    for rows in np.split(order, np.flatnonzero(np.diff(used[order])) + 1) if len(order) else ():
        best, best_seconds = -1, np.inf
        for row in rows.tolist():
            if steps.total[row] >= best_seconds:
                break
            seconds = steps.seconds(row)
            if seconds < best_seconds:
                best, best_seconds = row, seconds
        fastest[best] = best_seconds
    return fastest


def _too_large(
    families: LayoutTable,
    memory: Callable[[LayoutTable], Mapping[str, Array]],
    nodes: NodeClass,
    batch: int,
) -> dict[int, str]:
    """Reasons for families that do not fit at their least dp: the obstacle, and the smallest dp that fits."""
    unit, gpu = families.dp, nodes.gpu
    one, endless = (_total(memory(families.with_dp(np.full(len(families), dp)))) for dp in (1.0, _ENDLESS))
    room = gpu.memory - endless
    # Memory that data-parallel ranks divide falls as 1 / dp; the rest stays.
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where(room > 0, np.ceil(np.maximum(0.0, one - endless) / room - 1e-9), np.inf)
    least = np.maximum(1.0, np.ceil(least / unit)) * unit
    limit = np.minimum(batch, nodes.devices // families.replica_devices)
    at = np.flatnonzero(least > np.minimum(unit, limit))
    shown = np.maximum(1.0, np.minimum(least[at] - unit[at], limit[at]))
    items = memory(families.take(at).with_dp(shown))
    sizes = np.array(list(items.values()))
    replicas = families.replica_devices
    names, largest, needs = list(items), sizes.argmax(axis=0), sizes.sum(axis=0)
    reasons = {}
    for position, (row, dp, need) in enumerate(zip(at.tolist(), shown.tolist(), needs.tolist(), strict=True)):
        if need > gpu.memory:
            item = names[largest[position]]
            reason = (
                f"at dp {dp:.0f} it needs {need / _GB:.1f} GB, {(need - gpu.memory) / _GB:.1f} GB more than {gpu.name}"
                f" has; the largest item is {item} with {sizes[largest[position], position] / _GB:.1f} GB"
            )
        else:
            reason = f"ep {families.ep[row]:.0f} needs a dp of {unit[row]:.0f} or more"
        reasons[row] = f"{reason}; {_remedy(least[row], limit[row], replicas[row], nodes.devices, batch)}"
    return reasons


def _remedy(least: float, limit: float, replica: float, devices: int, batch: int) -> str:
    if not np.isfinite(least):
        return "it fits at no dp"
    if least <= limit:
        return f"it fits from dp {least:.0f}"
    if least > batch:
        return f"it fits from dp {least:.0f}, more than the batch's {batch} trajectories"
    return f"it fits from dp {least:.0f}, on {least * replica:.0f} devices of which there are {devices}"


def _slower(space: _LayoutSpace) -> dict[int, str]:
    """Reasons for families that fit but are not an option: the difference to the fastest layout of another family."""
    best, used, owner = space.best, space.used, space.owner
    if not best:
        return {}
    fastest = np.array(list(best))
    at_count = np.searchsorted(used[fastest], used)
    ratio = space.seconds / np.array(list(best.values()))[at_count]
    names = [space.priced.layout(row).family for row in best]
    # The row at which each family comes closest to the fastest: its first row when sorted by family, then by ratio.
    order = np.lexsort((ratio, owner))
    first = np.ones(len(order), dtype=bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    chosen = set(owner[space.kept].tolist())
    reasons = {}
    for row in order[first].tolist():
        at = int(owner[row])
        if at not in chosen:
            by = f"slower, by {100 * (ratio[row] - 1):.1f} % at least, than" if ratio[row] > 1 else "no faster than"
            reasons[at] = f"{by} {names[at_count[row]]}, on {used[row]:.0f} devices"
    return reasons
