"""The nearest request with which something trains, where nothing does.

Invariant: every named layout is on the menu of the changed request, not only small enough by a formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from libra.config.recipe import Recipe
from libra.cost.sources.rates import dtype_refusal
from libra.hardware.cluster import Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.options.layouts import training_layouts

_MOST_TIMES = 64  # as many nodes as there are, at most, are looked at
_LIGHTER: tuple[dict[str, object], ...] = (  # changes of a recipe that take less memory, the least first
    {"reference": "offloaded"},
    {"offload_optimiser": True},
    {"offload_optimiser": True, "reference": "offloaded"},
)


def remedies(model: ModelSpec, cluster: Cluster, recipe: Recipe, classes: Sequence[TrajectoryClass]) -> Iterator[str]:
    """Yield changes with which a layout trains the model: the smallest of the recipe, then more nodes of a class."""
    trained = [nodes for nodes in cluster.nodes if dtype_refusal(nodes.gpu, recipe.dtype) is None]
    for change in _LIGHTER:
        lighter = recipe.model_copy(update=change)
        resident = recipe.reference == "resident" or "reference" not in change
        less = lighter != recipe and resident
        if less and any(_smallest(model, nodes, lighter, classes) for nodes in trained):
            yield " and ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
            break
    for nodes in trained:
        found = more_nodes(model, nodes, recipe, classes)
        if found is not None:
            more, layout = found
            yield f"{more} nodes of {nodes.name} ({layout.devices} GPUs train, by {layout.name})"


def more_nodes(
    model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: Sequence[TrajectoryClass]
) -> tuple[int, ParallelLayout] | None:
    """The fewest nodes of this class with which something trains, and the layout on fewest devices there."""
    few, many = nodes.count, 2 * nodes.count
    while (found := _smallest(model, replace(nodes, count=many), recipe, classes)) is None:
        few, many = many, 2 * many
        if many > _MOST_TIMES * nodes.count:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        fewer = _smallest(model, replace(nodes, count=middle), recipe, classes)
        few, many, found = (few, middle, fewer) if fewer else (middle, many, found)
    return many, found


def _smallest(
    model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: Sequence[TrajectoryClass]
) -> ParallelLayout | None:
    chosen = training_layouts(model, nodes, recipe, classes).chosen.values()
    return min(chosen, key=lambda layout: layout.devices, default=None)
