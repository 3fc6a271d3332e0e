"""Policies by name."""

from __future__ import annotations

from copy import deepcopy

import pytest

from libra.route.catalogue import POLICIES, policy_named
from libra.route.policy import InstanceView, ToolReturn, TurnRequest, View

FLEET = View(tuple(InstanceView(str(number), 0, 100, number) for number in range(9)), (100,), 10)


def test_the_names_are_these() -> None:
    assert POLICIES == (
        "round-robin",
        "least-loaded",
        "two-choices",
        "sticky",
        "length-by-prompt",
        "length-predictor",
        "mlfq",
        "shortest-remaining-first",
        "cmlfq-published",
        "cmlfq",
    )


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(
        ValueError, match="'random'; choose one of round-robin, least-loaded, two-choices, sticky, length-by"
    ):
        policy_named("random")


@pytest.mark.parametrize("name", ["cmlfq-published", "cmlfq"])
def test_what_always_follows_prefixes_cannot_be_told_not_to(name: str) -> None:
    with pytest.raises(ValueError, match="leave sticky true"):
        policy_named(name, sticky=False)


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "two-choices"])
def test_the_options_arrive(name: str) -> None:
    for sticky in (True, False):
        policy = policy_named(name, sticky=sticky)
        policy.place(TurnRequest("t", "p", 10, 10), View(FLEET.instances[8:], (100,), 10))
        again = policy.tool_returned(
            TurnRequest("t", "p", 10, 10), ToolReturn("search", "ok", 0), View(FLEET.instances, (100,), 10)
        )
        assert again is not None
        assert (again.reason == "holds the prefix") == sticky


@pytest.mark.parametrize("name", POLICIES)
def test_a_copy_places_as_the_policy_that_it_is_of(name: str) -> None:
    """Plans are compared with a copy each; the compiled core has classes that copy in their own way."""
    policy = policy_named(name, seed=3)
    for number in range(5):
        policy.place(TurnRequest(str(number), "p", 10 * number, 10), FLEET)
    copies = [deepcopy(policy), policy]
    assert len({copy.place(TurnRequest("t", "p", 30, 10), FLEET) for copy in copies}) == 1


def test_the_seed_arrives() -> None:
    def run(seed: int) -> list[str]:
        policy = policy_named("two-choices", seed=seed)
        placements = [policy.place(TurnRequest(str(number), "p", 10, 10), FLEET) for number in range(30)]
        return [placement.instance for placement in placements if placement is not None]

    assert run(1) == run(1)
    assert run(1) != run(2)
