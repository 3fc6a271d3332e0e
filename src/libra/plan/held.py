"""Menus that list the same training layouts, so that what runs has a price beside what would be new.

Invariant: a layout on one of the menus is on all of them, each time priced for that menu's own trajectories. A menu by
itself lists, for each number of devices, the layout that is fastest there; under other lengths that is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libra.cost.collectives import fabric
from libra.cost.train_batch import batch_of
from libra.cost.train_passes import Work
from libra.cost.train_rates import training_rates
from libra.cost.train_step import step_table
from libra.cost.transfer import weight_sync
from libra.parallel import LayoutTable, ParallelLayout
from libra.plan.cluster_request import ClusterRequest, Menu
from libra.plan.problem import TrainingOption

Layouts = Mapping[tuple[str, int], ParallelLayout]  # by layout and replicas of the training option


def shared_menus(requests: Sequence[ClusterRequest], held: Layouts) -> tuple[Menu, ...]:
    """The menu of each request, with the layouts of all of them and those that are `held`.

    The requests may differ in classes and in what runs; raises ValueError where they differ in cluster, model or
    recipe. A layout of a class of nodes that the cluster does not have is left out: nothing could run in it.
    """
    for field in ("cluster", "model", "recipe"):
        if any(getattr(request, field) != getattr(requests[0], field) for request in requests):
            raise ValueError(f"{field} differs between the requests; share menus among plans of one {field}")
    menus = [request.menu() for request in requests]
    layouts = dict(held)
    for menu in menus:
        layouts.update(menu.layouts)
    return tuple(_with(menu, request, layouts) for menu, request in zip(menus, requests, strict=True))


def _with(menu: Menu, request: ClusterRequest, layouts: Layouts) -> Menu:
    """The menu with all of `layouts` on it, in an order that does not depend on theirs."""
    training = list(menu.problem.training)
    for nodes in request.cluster.nodes:
        missing = sorted(
            key
            for key, layout in layouts.items()
            if key not in menu.layouts and key[0] == f"{nodes.name}/{layout.family}"
        )
        if not missing:
            continue
        work = Work(
            model=request.model,
            batch=batch_of(request.classes, request.recipe.batch),
            state=request.recipe.training_bytes,
            reference=request.recipe.reference,
            gpu=nodes.gpu,
            rates=training_rates(nodes.gpu),
            fabric=fabric(nodes),
        )
        steps = step_table(work, LayoutTable.of([layouts[key] for key in missing]))
        weights = request.model.parameters * request.recipe.rollout_weight_bytes
        for row, key in enumerate(missing):
            layout = layouts[key]
            trainers = layout.devices / nodes.gpus
            engines = 0.0 if nodes.count == 1 else max(1.0, nodes.count - trainers)
            publish = weight_sync(weights, trainers, engines, work.fabric).publish
            training.append(TrainingOption(key[0], nodes.name, layout.devices, layout.dp, steps.seconds(row), publish))
    there = {(option.layout, option.replicas) for option in training}
    known = {key: layout for key, layout in layouts.items() if key in there}
    return replace(menu, problem=replace(menu.problem, training=tuple(training)), layouts=known)
