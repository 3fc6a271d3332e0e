"""Requests for a framework: their defaults, and settings that contradict them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from libra.config.frameworks import FRAMEWORKS, OWN, UNRESTRICTED, framework_named
from libra.config.recipe import Recipe
from libra.hardware.parallel import SHARDING
from libra.route.catalogue import POLICIES


def given(**changes: object) -> dict[str, Any]:
    return {"batch": 64, "samples_per_prompt": 8, "max_length": 8192, **changes}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_the_table_names_is_known(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert framework.name == name
    assert framework.router is None or framework.router in POLICIES
    assert {sharding for family in framework.families for sharding in family.shardings} <= set(SHARDING)


def test_no_framework_restricts_nothing() -> None:
    assert framework_named(None) is UNRESTRICTED
    assert UNRESTRICTED.restriction == FRAMEWORKS["vllm"].restriction == ""


def test_libra_run_is_planned_for_too_and_exported_for_never() -> None:
    assert framework_named("libra") is OWN
    assert "libra" not in FRAMEWORKS


def test_the_router_follows_the_framework_unless_given() -> None:
    assert Recipe(**given()).router == "cmlfq"
    assert Recipe(**given(framework="verl")).router == "least-loaded"
    assert Recipe(**given(framework="trl")).router == "cmlfq"
    assert Recipe(**given(framework="verl", router="round-robin")).router == "round-robin"


def test_a_recipe_without_framework_is_written_as_before() -> None:
    assert "framework" not in Recipe(**given()).model_dump()
    assert Recipe(**given()).model_dump()["router"] == "cmlfq"


@pytest.mark.parametrize("changes", [{}, {"router": "cmlfq"}, {"router": "least-loaded"}])
def test_a_written_recipe_reads_back_with_the_origin_of_its_router(changes: dict[str, str]) -> None:
    recipe = Recipe(**given(framework="verl", **changes))
    read = Recipe.model_validate_json(recipe.model_dump_json())
    assert read == recipe
    assert read.router_given == recipe.router_given == bool(changes)
    assert read.without_framework() == Recipe(**given(**changes))


REFUSED = [
    ({"framework": "verll"}, "unknown framework 'verll'; did you mean verl?"),
    ({"framework": "verl", "mode": "colocated"}, "mode is colocated, but verl"),
    ({"framework": "trl", "prefill_decode": True}, "prefill_decode is true, but trl has no"),
    ({"framework": "slime", "staleness": 2}, "staleness is 2, but slime allows at most 1: lower staleness"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_a_framework_cannot_do_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("?", r"\?")):
        Recipe(**given(**changes))
