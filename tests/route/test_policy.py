"""The values a policy exchanges refuse what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from libra.route.policy import InstanceView, Placement, ToolReturn, TurnRequest, View

A = InstanceView("a", bucket=0, capacity_tokens=100, load_tokens=0)

REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("negative bucket", lambda: InstanceView("a", -1, 100, 0), "bucket is -1"),
    ("no capacity", lambda: InstanceView("a", 0, 0, 0), "capacity_tokens is 0"),
    ("negative load", lambda: InstanceView("a", 0, 100, -1), "load_tokens is -1"),
    ("no speed", lambda: InstanceView("a", 0, 100, 0, float("nan")), "token_seconds is nan"),
    ("asked before anything", lambda: Placement("a", 0, False, "why", ask_again=0), "ask_again is 0"),
    ("no bucket", lambda: View((), (), 0), "limits is empty"),
    ("equal limits", lambda: View((), (100, 100), 0), "must rise strictly"),
    ("falling limits", lambda: View((), (200, 100), 0), "shortest first"),
    ("negative room", lambda: View((), (100,), -1), "turn_tokens is -1"),
    ("instance beyond the buckets", lambda: View((InstanceView("z", 1, 100, 0),), (100,), 0), "'z' is in bucket 1"),
    ("one id twice", lambda: View((A, A), (100,), 0), "'a' is listed twice"),
    ("negative context", lambda: TurnRequest("t", "p", 0, -1), "'t'"),
    ("negative prompt", lambda: TurnRequest("t", "p", -1, 0), "'t'"),
    ("negative return", lambda: ToolReturn("search", "ok", -1), "'search'"),
]


@pytest.mark.parametrize(("build", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_impossible_values_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_empty_view_is_a_view() -> None:
    assert View((), (100, 200), 10).instances == ()
