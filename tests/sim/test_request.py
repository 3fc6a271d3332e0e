"""The fields that describe a request, and those that only its engine may set."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from libra.sim.engine.request import Chain, Request

ASKED = {"number", "arrival", "prompt_tokens", "output_tokens", "chain", "priority", "stop", "cancel_at", "ask_at"}
ASKED |= {"pull", "keeps", "owner"}


@pytest.mark.parametrize("outcome", sorted({field.name for field in fields(Request)} - ASKED))
def test_what_becomes_of_a_request_cannot_be_given(outcome: str) -> None:
    given: dict[str, Any] = {outcome: 1}
    with pytest.raises(TypeError, match=outcome):
        Request(0, 0, 1, 1, **given)


def test_a_fork_shares_the_beginning_of_its_own_parent() -> None:
    root = Chain("root")
    branch = Chain("branch", root, 8)
    assert Chain("twig", branch, 8).fork == 8
    for name, parent, fork in (("alone", None, 1), ("behind", root, -1)):
        with pytest.raises(ValueError, match=f"'{name}': fork is {fork}; give the number of tokens shared"):
            Chain(name, parent, fork)
    with pytest.raises(ValueError, match=r"'twig' forks at 7, where 'branch' is still its parent's \(up to 8\)"):
        Chain("twig", branch, 7)
