"""How full engines were: exact where rows were merged, and as every single iteration tells it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_result import SECOND, request, simulated, small

from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Chain, Request
from libra.sim.outcome.occupancy import EngineSeries, OccupancyRecorder
from libra.sim.workload.requests import Requests


def rows(series: EngineSeries) -> list[tuple[float, float, float, float, int]]:
    starts = (series.edges[:-1] / TICKS).tolist()
    columns = (series.running, series.waiting, series.held, series.held_peak)
    return list(zip(starts, *(column.tolist() for column in columns), strict=True))


def test_two_requests_and_a_gap() -> None:
    result = simulated([request(0, 0, 6, 3), request(1, 0.5, 5, 1), request(2, 8, 4, 2)], watcher=OccupancyRecorder())
    (series,) = result.series
    assert rows(series) == [
        (0, 1, 0, 2, 2),
        (1, 2, 0, 4, 4),
        (2, 1, 0, 2, 2),
        (3, 0, 0, 0, 0),
        (8, 1, 0, 1, 1),
        (9, 1, 0, 1.5, 2),  # a block more, taken to come evenly
    ]
    assert series.edges[-1] == 10 * TICKS
    assert series.most_held == 4
    running, held = series.over(np.array([0, 2, 8, 12]) * TICKS)
    assert running.tolist() == [1.5, pytest.approx(1 / 6), 0.5]
    assert held.tolist() == [3.0, pytest.approx(1 / 3), 0.625]
    merged = series.merged(4)
    assert rows(merged) == [(0, 0.5, 0, 1, 4), (8, 1, 0, 1.25, 2)]


def test_blocks_that_come_during_a_jump_count_when_they_come() -> None:
    """36 tokens after 4: a block of 4 tokens at every fourth iteration, taken to come evenly."""
    (series,) = simulated([request(0, 0, 4, 37)], watcher=OccupancyRecorder()).series
    assert rows(series) == [(0, 1, 0, 1, 1), (1, 1, 0, pytest.approx((2 + 10) / 2, abs=0.5), 10)]


def test_pauses_are_seen() -> None:
    updates = [WeightUpdate(5 * TICKS // 2, 3 * TICKS), WeightUpdate(20 * TICKS, TICKS)]
    (series,) = simulated(
        [request(0, 0, 6, 5), request(1, 21.5, 4, 2)], watcher=OccupancyRecorder(), updates=updates
    ).series
    assert series.pauses == ((3 * TICKS, 6 * TICKS), (20 * TICKS, 21 * TICKS))
    seen = {row[0]: row[1:] for row in rows(series)}
    assert seen[3] == (1, 0, 2, 2)  # it keeps its blocks
    assert seen[6][0] == 1 and 2 <= seen[6][2] <= seen[6][3] == 3
    assert seen[20] == (0, 0, 0, 0)
    adjoining = [WeightUpdate(5 * TICKS // 2, 3 * TICKS), WeightUpdate(4 * TICKS, 2 * TICKS)]
    (series,) = simulated([request(0, 0, 6, 5)], watcher=OccupancyRecorder(), updates=adjoining).series
    assert series.pauses == ((3 * TICKS, 8 * TICKS),)  # they are one


def test_of_many_pauses_some_are_only_counted() -> None:
    updates = [WeightUpdate(2 * number * TICKS, TICKS // 2) for number in range(1, 8)]
    (series,) = simulated([request(0, 0, 6, 20)], watcher=OccupancyRecorder(most_rows=3), updates=updates).series
    assert (len(series.pauses), series.more_pauses) == (3, 4)


def test_an_engine_that_nobody_asked_has_nothing() -> None:
    (series,) = simulated([], watcher=OccupancyRecorder()).series
    assert len(series) == 0 and series.most_held == 0
    assert [part.tolist() for part in series.over(np.array([0, 5, 9]))] == [[0, 0]] * 2
    assert len(series.merged(3)) == 0


def test_mistakes_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="most_rows is 0"):
        OccupancyRecorder(most_rows=0)
    watcher = OccupancyRecorder()
    simulated([request(0, 0, 6, 3)], watcher=watcher)
    with pytest.raises(ValueError, match="at that tick or later"):
        watcher.series(0, TICKS)


asked = st.lists(
    st.tuples(
        st.integers(0, 4000),  # arrival
        st.integers(1, 30),
        st.integers(1, 30),
        st.one_of(st.none(), st.integers(0, 5000)),  # cancelled
        st.booleans(),  # shares a prompt
    ),
    min_size=1,
    max_size=25,
)


def requests_of(drawn: list[tuple[Any, ...]]) -> list[Request]:
    shared = Chain("shared")
    made = []
    for number, (arrival, prompt, output, cancel_at, shares) in enumerate(sorted(drawn, key=lambda it: it[0])):
        chain = Chain(str(number), shared, min(prompt, 8)) if shares else None
        made.append(Request(number, arrival, prompt, output, chain=chain, cancel_at=cancel_at))
    return made


@settings(max_examples=60, deadline=None)
@given(asked, st.integers(16, 40), st.integers(1, 30), st.one_of(st.none(), st.integers(1, 3000)))
def test_sums_and_peaks_are_those_of_every_single_iteration(
    drawn: list[tuple[Any, ...]], blocks: int, most_rows: int, limit: int | None
) -> None:
    config = small(kv_blocks=blocks, max_model_len=64, max_num_seqs=4)
    cost = AffineCost(40, 3, 1, 2)
    iterations: list[Iteration] = []
    watcher, coarse = OccupancyRecorder(), OccupancyRecorder(most_rows)

    def watch(engine: Any, now: int) -> None:
        watcher(engine, now)
        coarse(engine, now)

    cluster = SimCluster(
        [EngineSpec("e", config, cost)],
        Requests(lambda: iter(requests_of(drawn)), {}),
        trace=iterations.append,
        watch=watch,
        time_limit=limit,
    )
    cluster.run()
    fine, merged = watcher.series(0, cluster.now), coarse.series(0, cluster.now)
    if limit is None:
        assert fine.most_held == max((blocks - it.free_blocks for it in iterations), default=0)
        assert float((fine.held * np.diff(fine.edges)).sum()) * 2 == pytest.approx(cluster.engines[0].held_ticks)
        busy = sum((it.end - it.start) * len(it.scheduled) for it in iterations)
        assert float((fine.running * np.diff(fine.edges)).sum()) >= busy * (1 - 1e-9)  # some wait in the batch
    assert len(merged) <= max(most_rows, 4) + 1
    assert np.all(np.diff(merged.edges) > 0)
    whole = np.array([0, max(cluster.now, 1)])
    assert [part[0] for part in merged.over(whole)] == pytest.approx([part[0] for part in fine.over(whole)])
    assert merged.most_held == fine.most_held


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=20),
    st.integers(1, 7),
    st.lists(st.integers(-20, 200), min_size=2, max_size=10, unique=True),
)
def test_means_over_any_stretch_are_those_of_every_tick(
    drawn: list[tuple[int, int, int]], count: int, edges: list[int]
) -> None:
    spans, running, held = (np.array(column) for column in zip(*drawn, strict=True))
    series = EngineSeries(
        np.concatenate(([7], 7 + np.cumsum(spans))),
        running.astype(float),
        running * 2.0,
        held.astype(float),
        held.copy(),
    )
    ticks = {
        tick: values
        for start, span, *values in zip(series.edges, spans, running, held, strict=False)
        for tick in range(start, start + span)
    }
    stretches = sorted(edges)
    found = series.over(np.array(stretches))
    for low, high, mean, blocks in zip(stretches, stretches[1:], *found, strict=False):
        inside = [ticks.get(tick, [0, 0]) for tick in range(low, high)]
        assert mean == pytest.approx(sum(it[0] for it in inside) / (high - low))
        assert blocks == pytest.approx(sum(it[1] for it in inside) / (high - low))
    merged = series.merged(count)
    assert len(merged) == -(-len(series) // count)
    assert merged.edges[0] == series.edges[0] and merged.edges[-1] == series.edges[-1]
    for ours, theirs in ((merged.running, series.running), (merged.held, series.held)):
        assert (ours * np.diff(merged.edges)).sum() == pytest.approx((theirs * np.diff(series.edges)).sum())
    assert merged.most_held == series.most_held


def test_a_pipelined_engine_is_seen_as_it_is() -> None:
    """What its own account takes for the time of a batch is not the time between two looks."""
    watcher = OccupancyRecorder()
    iterations: list[Iteration] = []
    config = small(pipeline_parallel_size=2)
    cluster = SimCluster(
        [EngineSpec("e", config, SECOND)],
        Requests(lambda: iter([request(0, 0, 6, 9), request(1, 0.25, 5, 12), request(2, 3, 9, 4)]), {}),
        watch=watcher,
        trace=iterations.append,
    )
    cluster.run()
    series = watcher.series(0, cluster.now)
    assert series.most_held == max(64 - it.free_blocks for it in iterations)
    assert 0 < float(series.held.max()) <= series.most_held
    assert series.running.max() == 3.0
