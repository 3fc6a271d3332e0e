"""Every layout of one menu is on all of them, at the price that its own menu gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, LONG, QWEN_14B, RECIPE, SHORT

from libra.plan.options.cluster_request import ClusterRequest, Menu, sharing_layouts
from libra.plan.planner import Planner

PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE)
SHORTER = PLANNER.request((replace(SHORT, share=1.0),))
LONGER = PLANNER.request((replace(LONG, share=1.0, peak_context=8000, mean_context=8000.0),))


def shared_menus(requests: tuple[ClusterRequest, ...]) -> tuple[Menu, ...]:
    return tuple(request.menu() for request in sharing_layouts(requests))


def prices(menu_of: object) -> dict[tuple[str, int], tuple[float, float, int]]:
    return {
        (option.layout, option.replicas): (option.seconds, option.publish, option.devices)
        for option in menu_of.problem.training  # type: ignore[attr-defined]
    }


def test_what_a_menu_has_itself_keeps_its_price_and_what_it_lacks_is_added() -> None:
    alone = [prices(request.menu()) for request in (SHORTER, LONGER)]
    assert alone[0].keys() != alone[1].keys(), "the case shows nothing: both lengths have the same menu"
    menus = shared_menus((SHORTER, LONGER))
    shared = [prices(menu) for menu in menus]
    assert shared[0].keys() == shared[1].keys() == alone[0].keys() | alone[1].keys()
    for own, all_ in zip(alone, shared, strict=True):
        assert all_.items() >= own.items()
    for menu in menus:
        assert menu.layouts.keys() == prices(menu).keys()
        assert len(menu.problem.training) == len(menu.layouts), "an option is listed twice"


def test_an_added_layout_is_never_the_fastest_of_its_size() -> None:
    """Were it faster, the menu would have had it."""
    alone = prices(SHORTER.menu())
    shared = prices(shared_menus((SHORTER, LONGER))[0])
    for key in shared.keys() - alone.keys():
        seconds, _, devices = shared[key]
        assert seconds >= min(own for own, _, used in alone.values() if used <= devices) * (1 - 1e-9)


def test_what_is_held_is_priced_as_the_menu_that_it_is_from_prices_it() -> None:
    menu = SHORTER.menu()
    lacking = LONGER.menu().layouts
    key, layout = next((key, layout) for key, layout in menu.layouts.items() if key not in lacking)
    held = ((key[0].partition("/")[0], layout),)
    longer = replace(LONGER, held=held).menu()
    assert longer.layouts[key] == layout
    assert prices(replace(SHORTER, held=held).menu()) == prices(menu)
    assert prices(longer)[key][0] > prices(menu)[key][0], "longer trajectories take longer to train on"
    assert prices(longer)[key][1:] == prices(menu)[key][1:]


def test_a_layout_of_nodes_that_are_not_there_is_left_out() -> None:
    layout = next(iter(SHORTER.menu().layouts.values()))
    assert prices(replace(LONGER, held=(("h100", layout),)).menu()) == prices(LONGER.menu())


def test_requests_differ_in_their_trajectories_only() -> None:
    other = replace(PLANNER, recipe=RECIPE.model_copy(update={"batch": 128})).request(CLASSES)
    with pytest.raises(ValueError, match="recipe differs"):
        sharing_layouts((SHORTER, other))
