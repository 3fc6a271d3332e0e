"""What a request for a cluster refuses, and the menu it is turned into."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, RECIPE, SHORT
from tables import by_name

from libra.config.recipe import Recipe
from libra.cost.transfer import colocated_switch_seconds
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest, sharing_layouts
from libra.plan.options.engines import engine_options
from libra.plan.options.layouts import training_layouts
from libra.plan.options.menu import Menu
from libra.plan.planner import Planner, rooflines
from libra.plan.problem import InfeasiblePlanError, Pool

L40S = NodeClass("l40s", 1, 4, GPUS["L40S"], intra_bandwidth=32e9, inter_bandwidth=12.5e9)
MIXED = Cluster((A800, L40S))


def request(cluster: Cluster = CLUSTER, model: ModelSpec = QWEN_06B, recipe: Recipe = RECIPE) -> ClusterRequest:
    return ClusterRequest(cluster, model, recipe, CLASSES, rooflines(cluster, model, recipe))


REQUEST = request()

REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("longer than the model", lambda: replace(REQUEST, recipe=RECIPE.model_copy(update={"max_length": 40961})),
     "max_length is 40961; Qwen/Qwen3-0.6B is made for 40960 tokens: lower max_length"),
    ("no class", lambda: replace(REQUEST, classes=()), "classes is empty"),
    ("a class too long", lambda: replace(REQUEST, recipe=RECIPE.model_copy(update={"max_length": 3999})),
     "classes[1].peak_context is 4000; it lies between 1 and longest_context (3999)"),
    ("a profile too few", lambda: replace(REQUEST, cluster=MIXED), "there are 1 profiles for 2 classes of nodes"),
    ("no FP8", lambda: replace(REQUEST, recipe=RECIPE.model_copy(update={"dtype": "fp8"})),
     "dtype is fp8, but A800 does not multiply in fp8: set it to bf16, or choose another GPU"),
    ("a profile too many", lambda: replace(REQUEST, profiles=REQUEST.profiles * 2), "there are 2 profiles for 1"),
]  # fmt: skip


@by_name("make, message", REFUSED)
def test_a_request_that_contradicts_itself_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_the_menu_lists_what_each_class_of_nodes_can_do() -> None:
    mixed = request(MIXED)
    menu = mixed.menu()
    problem = menu.problem
    assert problem.pools == (Pool("a800", 2, 8), Pool("l40s", 1, 4))
    engines, training, chosen = [], [], {}
    for nodes, profile in zip(MIXED.nodes, mixed.profiles, strict=True):
        engines += engine_options(QWEN_06B, nodes, RECIPE, CLASSES, profile, 8192)[0]
        layouts = training_layouts(QWEN_06B, nodes, RECIPE, CLASSES)
        training += layouts.options
        chosen.update(layouts.chosen)
    assert problem.engines == tuple(engines)
    assert problem.training == tuple(training)
    assert (
        {option.pool for option in problem.engines} == {option.pool for option in problem.training} == {"a800", "l40s"}
    )
    assert menu.layouts == chosen
    for option in problem.training:
        layout = menu.layouts[option.layout, option.replicas]
        assert (layout.dp, layout.devices) == (option.replicas, option.devices)


def test_nodes_that_do_not_multiply_in_fp8_generate_and_do_not_train() -> None:
    mixed = request(MIXED, recipe=RECIPE.model_copy(update={"dtype": "fp8"}))
    problem = mixed.menu().problem
    assert {option.pool for option in problem.training} == {"l40s"}
    assert {option.pool for option in problem.engines} == {"a800", "l40s"}
    assert ("a800", "does not multiply") in {(each.name, each.kind) for each in mixed.rejected_layouts()}


def test_the_problem_is_that_of_the_recipe() -> None:
    recipe = Recipe(batch=3, samples_per_prompt=3, max_length=8192, staleness=2, max_buckets=3, router_hit=0.5)
    current = Allocation(1, (Bucket("a800/tp1", 1, 0, 8192),), "x")
    problem = replace(request(recipe=recipe), current=current).menu().problem
    assert (problem.peaks, problem.longest_context) == ((1000, 4000), 8192)
    assert problem.expected == (True, True)  # the expected longest trajectory has three quarters of a LONG a step in it
    assert (problem.staleness, problem.shared, problem.most_buckets, problem.current) == (2, True, 3, current)
    assert problem.recall_known == (pytest.approx((0.2, 0.25)), (1.0, 1.0))
    assert problem.recall_possible == (pytest.approx((0.2, 0.25)), pytest.approx((0.4, 0.5)), (1.0, 1.0))
    assert (problem.colocated, problem.switch) == (False, 0.0)
    assert not problem.use_all_devices
    assert not problem.one_bucket_per_shape


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_only_colocated_devices_change_sides(mode: str) -> None:
    problem = request(recipe=Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode=mode)).menu().problem
    assert problem.staleness == 0
    assert problem.colocated == (mode == "colocated")
    # 16 bytes of each parameter are spread over 16 devices, two come back to eight of a node.
    switch = colocated_switch_seconds(QWEN_06B.parameters * 16 / 16, QWEN_06B.parameters * 2 / 8)
    assert problem.switch == (pytest.approx(switch) if mode == "colocated" else 0.0)


def test_what_is_no_option_has_its_reason() -> None:
    asked = request(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"gpu_memory_utilization": 0.37}))
    menu, layouts = asked.menu(), asked.rejected_layouts()
    assert [each.name for each in menu.rejected] == ["a800/tp1"]
    assert {option.shape for option in menu.problem.engines} == {"a800/tp2", "a800/tp4", "a800/tp8"}
    assert layouts and all(each.reason for each in (*layouts, *menu.rejected))


NO_OPTION = [
    # 16 bytes for each of 14.8 billion parameters
    ("training", Cluster((replace(A800, count=1, gpus=1),)), 0.9,
     r"no layout trains Qwen/Qwen3-14B on .*: there is a plan with \d+ nodes of a800 \(.* 1 generates\)"),
    (
        "generation",
        CLUSTER,
        0.05,
        "no engine holds Qwen/Qwen3-14B: a800/tp8: 3.7 GB of weights .*: it would fit"
        " with gpu_memory_utilization: 0.9$",
    ),
]  # fmt: skip


@by_name("cluster, utilization, message", NO_OPTION)
def test_a_model_without_an_option_has_no_menu(cluster: Cluster, utilization: float, message: str) -> None:
    recipe = RECIPE.model_copy(update={"gpu_memory_utilization": utilization})
    with pytest.raises(InfeasiblePlanError, match=message):
        request(cluster, QWEN_14B, recipe).menu()


def test_classes_that_end_together_are_no_problem() -> None:
    twins = (replace(SHORT, share=0.5, peak_context=4000), replace(LONG, share=0.5))
    assert replace(REQUEST, classes=twins).menu().problem.peaks == (4000, 4000)


OVER_NODES = ": it would fit with engines on several nodes, which slime and miles start and vllm does not"
H100 = NodeClass("h100", 32, 8, GPUS["H100"], intra_bandwidth=450e9, inter_bandwidth=50e9)


@pytest.mark.parametrize(
    ("gpu", "recipe", "remedy"),
    [
        (
            *("H100", {"rollout_dtype": "bf16"}),
            f"{OVER_NODES}, or 8 H200 a node and rollout_dtype: fp8",
        ),
        ("H200", {"rollout_dtype": "bf16"}, f"{OVER_NODES}, or rollout_dtype: fp8"),
        ("H100", {"rollout_dtype": "fp8"}, f"{OVER_NODES}, or 8 H200 a node"),
        ("H100", {}, f"{OVER_NODES}, or 8 H200 a node"),  # its checkpoint has 8 bits
        ("H100", {"gpu_memory_utilization": 0.3}, "give nodes with more total memory"),
    ],
)
def test_a_model_that_no_engine_holds_is_told_what_would(gpu: str, recipe: dict[str, object], remedy: str) -> None:
    model = load_model("deepseek-ai/DeepSeek-V3")
    cluster = Cluster((replace(H100, gpu=GPUS[gpu]),))
    inside = RECIPE.model_copy(update=recipe | {"framework": "vllm"})  # it starts no engine on several nodes
    with pytest.raises(InfeasiblePlanError, match=r"no engine holds .*: h100/tp8: .* GB of weights") as refusal:
        request(cluster, model, inside).menu()
    assert str(refusal.value).endswith(remedy)


# Every layout of one menu is on all of them, at the price that its own menu gives it.

PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE)
SHORTER = PLANNER.request((replace(SHORT, share=1.0),))
LONGER = PLANNER.request((replace(LONG, share=1.0, peak_context=8000, mean_context=8000.0),))


def shared_menus(requests: tuple[ClusterRequest, ...]) -> tuple[Menu, ...]:
    return tuple(request.menu() for request in sharing_layouts(requests))


def prices(menu: Menu) -> dict[tuple[str, int], tuple[float, float, int]]:
    return {
        (option.layout, option.replicas): (option.seconds, option.publish, option.devices)
        for option in menu.problem.training
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
