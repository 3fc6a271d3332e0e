"""Requests whose menus list the same training layouts, so that what runs has a price beside what would be new.

Invariant: a layout on one of the menus is on all of them, each time priced for that menu's own trajectories. A menu by
itself lists, for each number of devices, the layout that is fastest there; under other lengths that is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from libra.hardware.parallel import ParallelLayout
from libra.plan.options.cluster_request import ClusterRequest

Held = tuple[tuple[str, ParallelLayout], ...]  # class of nodes and layout


def sharing_layouts(requests: Sequence[ClusterRequest]) -> tuple[ClusterRequest, ...]:
    """The requests, each of which holds the layouts on all of their menus and what any of them holds already.

    They may differ in classes and in what runs; raises ValueError where they differ in cluster, model or recipe.
    """
    for field in ("cluster", "model", "recipe"):
        if any(getattr(request, field) != getattr(requests[0], field) for request in requests):
            raise ValueError(f"{field} differs between the requests; share layouts among plans of one {field}")
    found = {held for request in requests for held in request.held}
    for request in requests:
        for name, menu in request.layouts().items():
            found.update((name, layout) for layout in menu.chosen.values())
    shared: Held = tuple(sorted(found, key=lambda held: (held[0], held[1].name)))
    return tuple(replace(request, held=shared) for request in requests)
