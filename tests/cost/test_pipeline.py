"""The simulated pipeline against the longest path through its operations, plain and interleaved."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import interleaved

from libra.cost.pipeline import pipeline_seconds
from libra.cost.train_memory import held_micro_batches
from libra.hardware.parallel import LayoutTable, ParallelLayout


@pytest.mark.parametrize(("stages", "count", "idle"), [(4, 8, 3 / 11), (1, 5, 0.0), (8, 1, 7 / 8), (2, 16, 1 / 17)])
def test_equal_micro_batches_leave_the_known_share_idle(stages: int, count: int, idle: float) -> None:
    seconds = pipeline_seconds([[1.0] * count] * stages, [[2.0] * count] * stages)
    assert 1 - 3 * count / seconds == pytest.approx(idle)


def longest_path(forward: list[list[float]], backward: list[list[float]]) -> float:
    """End of the last operation, from what must precede each: written from the definition, one stage list at a time."""
    stages, count = len(forward), len(forward[0])
    orders = []
    for stage in range(stages):
        warm = min(count, stages - stage)
        order = [("F", i) for i in range(warm)]
        for i in range(count - warm):
            order += [("B", i), ("F", warm + i)]
        orders.append(order + [("B", i) for i in range(count - warm, count)])

    @cache
    def end(stage: int, position: int) -> float:
        kind, micro = orders[stage][position]
        before = [0.0]
        if position > 0:
            before.append(end(stage, position - 1))
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < stages:
            before.append(end(source, orders[source].index((kind, micro))))
        return max(before) + (forward if kind == "F" else backward)[stage][micro]

    return max(end(stage, 2 * count - 1) for stage in range(stages))


times = st.floats(0, 10)


@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_unequal_micro_batches_take_the_longest_path(data: st.DataObject, stages: int, count: int) -> None:
    matrix = st.lists(st.lists(times, min_size=count, max_size=count), min_size=stages, max_size=stages)
    forward, backward = data.draw(matrix), data.draw(matrix)
    assert pipeline_seconds(forward, backward) == pytest.approx(longest_path(forward, backward), abs=1e-9)


def test_forwards_alone_fill_the_pipeline_once() -> None:
    assert pipeline_seconds([[1.0] * 6] * 3, [[0.0] * 6] * 3) == pytest.approx(6 + 2)


@pytest.mark.parametrize(("forward", "backward"), [([], []), ([[]], [[]])])
def test_an_empty_pipeline_is_refused(forward: list[list[float]], backward: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="give one or more of both"):
        pipeline_seconds(forward, backward)


def test_a_missing_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="as many forwards as backwards"):
        pipeline_seconds([[1.0, 1.0]], [[1.0]])


@given(st.data(), st.integers(1, 5), st.integers(2, 4), st.integers(1, 3))
def test_interleaved_micro_batches_take_the_longest_path(
    data: st.DataObject, devices: int, virtual: int, turns: int
) -> None:
    count, parts = turns * devices, devices * virtual
    matrix = st.lists(st.lists(times, min_size=count, max_size=count), min_size=parts, max_size=parts)
    forward, backward = data.draw(matrix), data.draw(matrix)

    def of(rank: int, part: int, micro: int, back: bool) -> float:
        return (backward if back else forward)[part * devices + rank][micro]

    wanted = interleaved.seconds(devices, virtual, count, of)
    assert pipeline_seconds(forward, backward, virtual) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("devices", "virtual", "count"), [(4, 2, 8), (8, 4, 8), (2, 5, 16)])
def test_virtual_stages_divide_what_equal_micro_batches_leave_idle(devices: int, virtual: int, count: int) -> None:
    parts = devices * virtual
    seconds = pipeline_seconds([[1.0] * count] * parts, [[2.0] * count] * parts, virtual)
    assert seconds == pytest.approx(3 * (virtual * count + devices - 1))


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_devices_hold_as_many_micro_batches_as_the_schedule_keeps(devices: int, virtual: int) -> None:
    table = LayoutTable.of([ParallelLayout(1, devices, 1, 1, 1, 4096, "none", "zero1", False, virtual)])
    ends = [interleaved.most_held(rank, devices, virtual, 4 * devices) for rank in (0, devices - 1)]
    assert np.array(held_micro_batches(table))[:, 0] == pytest.approx(ends)
    assert max(interleaved.most_held(rank, devices, virtual, 4 * devices) for rank in range(devices)) == ends[0]


def test_interleaved_micro_batches_come_in_turns() -> None:
    with pytest.raises(ValueError, match="3 micro-batches are not multiples of 2 virtual stages and 2 devices"):
        pipeline_seconds([[1.0] * 3] * 4, [[1.0] * 3] * 4, 2)
