"""The part of a menu that one framework can carry out.

Invariant: a request without a framework keeps its menu. With a framework, every plan for nodes of one class can be
exported. Layouts excluded by `permitted` and `whole_node_counts`, and options excluded by `restricted`, are listed as
rejected, with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from libra.config.frameworks import Framework, TrainingFamily
from libra.hardware.cluster import NodeClass
from libra.hardware.parallel import SHARDING, LayoutTable, ParallelLayout
from libra.plan.options.menu import Menu, Rejected

Mask = NDArray[np.bool_]


def permitted(framework: Framework, layouts: LayoutTable, batch: int, layers: int) -> Mask:
    """[layout] whether a family of the framework has the layout for this number of layers, and the layout's ranks
    divide the batch.
    """
    found = foreseen(framework, layouts, layers)
    return found & (batch % layouts.dp == 0) if framework.families else found


def foreseen(framework: Framework, layouts: LayoutTable, layers: int) -> Mask:
    """[layout] whether a family of the framework has the layout for this number of layers. Interleaved pipelines and
    unequal stages are excluded: no export writes the frameworks' keys for them.
    """
    if not framework.families:
        return np.ones(len(layouts), dtype=bool)
    found: Mask = np.any([_has(family, layouts) for family in framework.families], axis=0)
    even: Mask = (layouts.virtual == 1) & (layers % layouts.pp == 0)
    return found & even


def family_of(framework: Framework, layout: ParallelLayout, layers: int) -> TrainingFamily | None:
    """The first of the framework's families that has the layout; None if there is none."""
    table = LayoutTable.of([layout])
    if not foreseen(framework, table, layers)[0]:
        return None
    return next((family for family in framework.families if _has(family, table)[0]), None)


def _has(family: TrainingFamily, layouts: LayoutTable) -> Mask:
    shardings = [SHARDING.index(name) for name in SHARDING if name in family.shardings]
    has: Mask = np.isin(layouts.sharding, shardings) | (layouts.dp * layouts.cp == 1)
    degrees = (
        (family.tensor, layouts.tp),
        (family.pipeline, layouts.pp),
        (family.context, layouts.cp),
        (family.experts, layouts.ep),
    )
    for there, degree in degrees:
        if not there:
            has = has & (degree == 1)
    return has


def takes_whole_nodes(framework: Framework, nodes: NodeClass) -> bool:
    """Whether training and rollout must not share a node of this class. A single node has to be shared."""
    return framework.whole_nodes and nodes.count > 1


def whole_node_counts(framework: Framework, nodes: NodeClass, counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of training devices that the framework accepts."""
    if not takes_whole_nodes(framework, nodes):
        return tuple(counts)
    return tuple(count for count in counts if count % nodes.gpus == 0)


def rejected_parts(framework: Framework, nodes: NodeClass, batch: int) -> tuple[Rejected, ...]:
    """Parts of nodes and of the batch that are excluded from training, with the reason."""
    found = []
    if takes_whole_nodes(framework, nodes) and nodes.gpus > 1:
        reason = f"{framework.name} trains on whole nodes of {nodes.gpus} GPUs"
        found.append(Rejected(f"{nodes.name}/part of a node", "framework", reason))
    if framework.families:
        reason = f"{framework.name} gives every data-parallel rank an equal part of the batch of {batch} trajectories"
        found.append(Rejected(f"{nodes.name}/dp that does not divide the batch", "framework", reason))
    return tuple(found)


def rejected_family(framework: Framework) -> str:
    """Reason why the framework cannot use a layout."""
    names = " or ".join(family.name for family in framework.families)
    return f"{framework.name} trains by {names}, which has no such layout"


def restricted(menu: Menu, framework: Framework, classes: Sequence[NodeClass]) -> Menu:
    """The menu without lent engines, which no framework can start. If the framework requires it, also with one engine
    size or without idle devices.
    """
    if not framework.name:
        return menu
    problem = menu.problem
    lent = problem.lent
    reason = f"it is lent, but {framework.name} starts engines only on its own nodes"
    return replace(
        menu,
        problem=replace(
            problem,
            engines=tuple(option for option in problem.engines if option.shape not in lent),
            most_buckets=problem.most_buckets if framework.mixed_engines else 1,
            use_all_devices=any(takes_whole_nodes(framework, nodes) for nodes in classes),
            restriction=restriction_words(framework),
        ),
        rejected=(*menu.rejected, *(Rejected(shape, "framework", reason) for shape in sorted(lent))),
        lent=(),
        availability=Menu(problem).availability,
    )


def restriction_words(framework: Framework) -> str:
    """The restriction and its remedy, for messages about a missing plan; empty if nothing is excluded."""
    if not framework.restriction:
        return ""
    return f"for {framework.name} only {framework.restriction}: leave out framework (--for), or give another one"
