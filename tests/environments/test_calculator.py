"""The arithmetic of the calculator task, and its tool."""

from __future__ import annotations

import asyncio

import pytest

from libra.environments.calculator import Calculator, apply
from libra.environments.protocol import ToolError

INSTANT = Calculator(latency=0.0)


@pytest.mark.parametrize(
    ("left", "operator", "right", "wanted"),
    [
        (12, "+", 34, 46),
        (12, "-", 34, -22),
        (-3, "*", 7, -21),
        (7, "/", 2, 3),
        (-7, "/", 2, -4),  # floor division: downwards, not towards zero
        (0, "/", 9, 0),
    ],
)
def test_apply(left: int, operator: str, right: int, wanted: int) -> None:
    assert apply(left, operator, right) == wanted


def test_apply_refuses_what_is_no_operation() -> None:
    with pytest.raises(ZeroDivisionError):
        apply(1, "/", 0)
    with pytest.raises(ValueError, match="operator '%': expected one of"):
        apply(1, "%", 2)


@pytest.mark.parametrize(
    ("argument", "returned"), [("12+34", "=46;"), ("-7/2", "=-4;"), ("5-99", "=-94;"), ("99*9", "=891;")]
)
def test_the_tool_returns_the_result(argument: str, returned: str) -> None:
    assert asyncio.run(INSTANT.calculate(argument)) == returned


@pytest.mark.parametrize(
    ("argument", "read"),
    [
        ("4/0", "=!;"),
        ("", "=?;"),
        ("12", "=?;"),
        ("12+", "=?;"),
        ("1+2+3", "=?;"),
        ("1+-2", "=?;"),
        ("1+2;", "=?;"),
        ("1234567+1", "=?;"),
        ("__import__", "=?;"),
    ],
)
def test_the_tool_raises_an_error_that_the_agent_reads(argument: str, read: str) -> None:
    with pytest.raises(ToolError) as error:
        asyncio.run(INSTANT.calculate(argument))
    assert str(error.value) == read
