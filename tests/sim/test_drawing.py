"""Drawing a workload from a log."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.sim.workload.drawing import draw
from libra.trajectory import Trajectory, Turn


def log(size: int) -> list[Trajectory]:
    turns = (Turn(5, None, None, 0),)
    return [Trajectory(f"t{i}", f"p{i // 2}", "x", 10 + i, turns, None, 0, True) for i in range(size)]


@given(size=st.integers(1, 30), count=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_as_many_as_wanted_each_as_often_as_fair(size: int, count: int, seed: int) -> None:
    drawn = draw(log(size), count, seed)
    assert drawn == draw(log(size), count, seed)
    assert len({trajectory.id for trajectory in drawn}) == len(drawn) == count
    times = Counter(trajectory.id.partition(" ")[0] for trajectory in drawn)
    if count <= size:
        assert max(times.values()) == 1
    else:
        assert len(times) == size
        assert len({trajectory.id for trajectory in drawn[:size]} & {it.id for it in log(size)}) == size
    prompts = {trajectory.id: trajectory.prompt_id for trajectory in log(size)}
    for trajectory in drawn:
        assert trajectory.prompt_id == prompts[trajectory.id.partition(" ")[0]]


def test_prompts_of_their_own_where_samples_are_made() -> None:
    drawn = draw(log(1), 3, 0, same_prompts=False)
    assert [(it.id, it.prompt_id) for it in drawn] == [
        ("t0", "p0"),
        ("t0 (drawn 2)", "p0 (drawn 2)"),
        ("t0 (drawn 3)", "p0 (drawn 3)"),
    ]


def test_the_order_is_random() -> None:
    assert draw(log(20), 20, 0) != draw(log(20), 20, 1)
    assert set(draw(log(20), 20, 0)) == set(log(20))


def test_nothing_to_draw_or_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no finished trajectory to draw from; give a log with at least one"):
        draw([], 1, 0)
    with pytest.raises(ValueError, match="count is 0; draw 1 trajectory or more"):
        draw(log(1), 0, 0)
