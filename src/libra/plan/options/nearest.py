"""The closest request with a plan, if no layout can train.

Invariant: a suggested layout is on the menu of the changed request, and fits together with an engine in the mode of the
request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from libra.cost.sources.rates import dtype_refusal
from libra.hardware.cluster import NodeClass
from libra.plan.model.feasibility import smallest
from libra.plan.options.layouts import training_layouts
from libra.plan.problem import InfeasiblePlanError

if TYPE_CHECKING:  # that module imports this one
    from libra.plan.options.cluster_request import ClusterRequest

_MOST_TIMES = 64  # largest multiple of the present nodes that is tried
_MOST_BESIDE = 16  # most nodes that are added for an engine
_LIGHTER: tuple[dict[str, object], ...] = (  # changes of a recipe that save memory, the smallest change first
    {"reference": "offloaded"},
    {"offload_optimiser": True},
    {"offload_optimiser": True, "reference": "offloaded"},
)


def remedies(request: ClusterRequest) -> Iterator[str]:
    """Yield changes with which a plan exists: the smallest change of the recipe, then more nodes of a class."""
    recipe = request.recipe
    for change in _LIGHTER:
        lighter = recipe.model_copy(update=change)
        resident = recipe.reference == "resident" or "reference" not in change
        if lighter != recipe and resident and _smallest_plan(replace(request, recipe=lighter)):
            yield " and ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
            break
    for nodes in request.cluster.nodes:
        found = more_nodes(request, nodes)
        if found is not None:
            yield f"{found[0]} nodes of {nodes.name} ({found[1]})"


def more_nodes(request: ClusterRequest, nodes: NodeClass) -> tuple[int, str] | None:
    """The fewest nodes of this class that have room for training and an engine, and a text on the use of their GPUs."""
    if dtype_refusal(nodes.gpu, request.recipe.dtype) is not None:
        return None
    fewest = _that_train(request, nodes)
    if fewest is None:
        return None
    for count in range(fewest, fewest + _MOST_BESIDE + 1):
        more = tuple(replace(it, count=count) if it == nodes else it for it in request.cluster.nodes)
        found = _smallest_plan(replace(request, cluster=replace(request.cluster, nodes=more)))
        if found is not None:
            return count, found
    return None


def _smallest_plan(request: ClusterRequest) -> str | None:
    """Text for training and an engine on the fewest GPUs; None if they do not fit together."""
    if not any(it.options for it in request.layouts().values()):
        return None
    try:
        menu = request.menu()
    except InfeasiblePlanError:
        return None
    found = smallest(menu.problem)
    if found is None:
        return None
    train, engine = found
    layout, devices = menu.layouts[train.layout, train.replicas], sum(engine.uses.values())
    verb = "trains" if train.devices == 1 else "train"
    rest = "and generate in turn" if menu.problem.colocated else f"{devices} generate{'s' if devices == 1 else ''}"
    return f"{train.devices} GPU{'s' if train.devices > 1 else ''} {verb}, by {layout.name}, {rest}"


def _that_train(request: ClusterRequest, nodes: NodeClass) -> int | None:
    """The fewest nodes of this class on which a layout trains."""
    few, many = 0, nodes.count
    while not _trains(request, replace(nodes, count=many)):
        few, many = many, 2 * many
        if many > _MOST_TIMES * nodes.count:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _trains(request, replace(nodes, count=middle)) else (middle, many)
    return many


def _trains(request: ClusterRequest, nodes: NodeClass) -> bool:
    return bool(training_layouts(request.model, nodes, request.recipe, request.classes).chosen)
