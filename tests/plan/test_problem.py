"""What the values of a request refuse, and the remedy they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from oracles.small_request import LONG, REQUEST, SHORT, WORKLOAD

from libra.plan.problem import Allocation, Bucket, EngineShape, Fleet

REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("fleet", lambda: Fleet(1, -1, 0), "hybrid is -1; set it to 0 or more"),
    ("shape", lambda: EngineShape("s", 0, 1, 1), "max_model_len is 0; set it to 1 or more"),
    ("shape name", lambda: EngineShape("", 1, 1, 1), "name of an engine shape is empty"),
    ("trajectories", lambda: replace(WORKLOAD, trajectories=0), "trajectories is 0"),
    ("staleness", lambda: replace(WORKLOAD, max_staleness=-1), "max_staleness is -1"),
    ("train tokens", lambda: replace(WORKLOAD, train_tokens=float("nan")), "train_tokens is nan"),
    ("router", lambda: replace(WORKLOAD, router_hit=1.1), "router_hit is 1.1; give a share between 0 and 1"),
    ("no class", lambda: replace(WORKLOAD, classes=()), "at least one trajectory class"),
    ("shares", lambda: replace(WORKLOAD, classes=(SHORT,)), "the shares sum to 0.75; divide each by their sum"),
    ("order", lambda: replace(WORKLOAD, classes=(LONG, SHORT)), "sort them by peak_context"),
    ("peak", lambda: replace(WORKLOAD, longest_context=3000), r"classes\[1\].peak_context is 4000"),
    ("mean", lambda: replace(WORKLOAD, classes=(replace(SHORT, turns=-1.0), LONG)), r"classes\[0\].*negative"),
    ("first", lambda: replace(WORKLOAD, classes=(replace(SHORT, before_first_return=2.0), LONG)), "fraction of 0 to 1"),
    ("empty range", lambda: Bucket("s", 1, 100, 100), r"bucket \(100, 100\] is empty"),
    ("no engine", lambda: Bucket("s", 0, 0, 100), "engines is 0; set it to 1 or more"),
    ("gap", lambda: Allocation(1, (Bucket("s", 1, 0, 100), Bucket("t", 1, 200, 300))), "start it above 100"),
    ("replicas", lambda: Allocation(-1, ()), "replicas is -1"),
    ("same name", lambda: replace(REQUEST, shapes=REQUEST.shapes[:1] * 2), "name each once"),
    ("shape order", lambda: replace(REQUEST, shapes=REQUEST.shapes[::-1]), "sort them by max_model_len"),
]


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_wrong_value_is_refused_with_its_field_and_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_classes_of_equal_length_are_allowed() -> None:
    halves = (replace(SHORT, share=0.5), replace(SHORT, share=0.5, turns=9.0))
    assert replace(WORKLOAD, classes=halves).classes == halves
