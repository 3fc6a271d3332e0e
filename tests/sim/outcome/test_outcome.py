"""The numbers of simulations that are small enough to follow by hand."""

from __future__ import annotations

import gc
import json
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_result import all_ends, request, simulated, two_trajectories

from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.outcome.definitions import DEFINITIONS
from libra.sim.outcome.metrics import (
    Ending,
    EngineMetrics,
    Metrics,
    Spread,
    endings,
    engine_metrics,
    metrics_of,
    spread,
)
from libra.sim.outcome.occupancy import OccupancyRecorder
from libra.sim.outcome.result import SimulationResult, request_columns, result_of
from libra.sim.outcome.result_file import FIELDS, FORMAT, document, write_outcomes
from libra.sim.workload.caller import Caller
from libra.sim.workload.requests import Requests


def alike(value: float) -> Spread:
    return Spread(1, value, value, value, value, value)


def two(low: float, high: float) -> Spread:
    return Spread(2, (low + high) / 2, low, high, high, high)


def test_two_requests() -> None:
    """The first is computed from 0 s on, the second from 1 s on, beside its second token."""
    result = simulated([request(0, 0, 6, 3), request(1, 0.5, 5, 1)], watcher=OccupancyRecorder())
    assert metrics_of(result) == Metrics(
        requests=2,
        finished=2,
        interrupted=0,
        cancelled=0,
        refused=0,
        failed=0,
        unfinished=0,
        makespan=3.0,
        generated_tokens=4,
        prompt_tokens=11,
        generated_rate=4 / 3,
        prompt_rate=11 / 3,
        request_rate=2 / 3,
        queueing=two(0.0, 0.5),
        ttft_prefill=two(1.0, 1.5),
        ttft=two(1.0, 1.5),
        tpot=alike(1.0),  # the second one generates a single token
        latency=two(1.5, 3.0),
        trajectories=0,
        trajectories_completed=0,
        trajectory_latency=None,
        busy_share=1.0,
        paused_share=0.0,
        kv_share=(2 + 4 + 2) / (64 * 3),  # blocks of 4 tokens, each second
        kv_peak_share=4 / 64,
        cache_hit_rate=0.0,
        preemptions=0,
        iterations=3,
        events=3,
        iterations_per_event=1.0,
    )
    assert engine_metrics(result) == (
        EngineMetrics("e", 0, 2, 2, 4, 1.0, 0.0, (2 + 4 + 2) / (64 * 3), 4 / 64, 0.0, 0, 3, 3, "colocated"),
    )
    assert endings(result.requests) == ()


def test_every_end_is_counted_and_only_what_finished_has_latencies_and_rates() -> None:
    result = simulated(all_ends(), time_limit=10 * TICKS)
    metrics = metrics_of(result)
    assert result.partial
    assert (metrics.requests, metrics.finished) == (7, 1)
    assert (metrics.cancelled, metrics.refused, metrics.unfinished) == (2, 2, 2)
    assert metrics.makespan == 10.0
    assert (metrics.generated_tokens, metrics.generated_rate) == (3, 0.3)
    assert (metrics.prompt_tokens, metrics.prompt_rate) == (6, 0.6)
    assert metrics.latency == alike(3.0)
    assert metrics.busy_share == 1.0  # what was under way at the limit counts
    assert metrics.kv_peak_share is None
    assert endings(result.requests) == (
        Ending("cancelled", "its caller gave it up", 2),
        Ending("refused", "a prompt of … tokens leaves no room to generate within max_model_len …", 2),
        Ending("unfinished", "the time limit came before its arrival", 1),
        Ending("unfinished", "the time limit came first", 1),
    )


def test_columns_of_every_end() -> None:
    columns = simulated(all_ends(), time_limit=10 * TICKS).requests
    assert columns.number.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert columns.status.tolist() == [0, 3, 3, 2, 4, 2, 4]
    assert columns.engine.tolist() == [0, 0, 0, 0, 0, -1, -1]
    assert [tick / TICKS for tick in columns.finish.tolist()][:6] == [3, 0, 0, 3, -1 / TICKS, 5]
    assert columns.finish[6] == columns.scheduled[6] == columns.first_token[6] == -1
    assert columns.generated.tolist() == [3, 0, 0, 3, 9, 0, 0]  # of the one under way too
    assert columns.output.tolist() == [3, 5, 5, 50, 60, 2, 2]  # cut at the model length
    with pytest.raises(ValueError, match="read-only"):
        columns.finish[0] = 1


def test_trajectories_are_timed_from_the_first_arrival_to_the_last_finish() -> None:
    """`a` generates until 2 s, its tool returns at 4 s, and it ends at 5 s; `b` generates from 0 s to 3 s."""
    result = simulated(two_trajectories())
    metrics = metrics_of(result)
    assert (metrics.trajectories, metrics.trajectories_completed, metrics.finished) == (2, 2, 3)
    assert metrics.trajectory_latency == two(3.0, 5.0)
    assert metrics.makespan == 5.0
    assert metrics.busy_share == 4 / 5
    assert metrics.cache_hit_rate == 4 / (4 + 9 + 4)  # the one full block of a's first turn
    assert result.requests.trajectories == ("a", "b")
    assert result.requests.turn.tolist() == [0, 0, 1]


def test_a_trajectory_that_did_not_end_has_no_time() -> None:
    metrics = metrics_of(simulated(two_trajectories(), time_limit=9 * TICKS // 2))
    assert (metrics.trajectories, metrics.trajectories_completed) == (2, 1)
    assert metrics.trajectory_latency == alike(3.0)


@pytest.mark.parametrize("requests", [[], [request(0, 1, 64, 5)]], ids=["no request", "all at one instant"])
def test_what_cannot_be_is_none(requests: list[Request]) -> None:
    metrics = metrics_of(simulated(requests, watcher=OccupancyRecorder()))
    assert metrics.makespan == 0.0
    for unknown in ("generated_rate", "busy_share", "kv_share", "cache_hit_rate", "latency", "iterations_per_event"):
        assert getattr(metrics, unknown) is None
    assert metrics.kv_peak_share == 0.0


def test_a_limit_before_the_first_arrival() -> None:
    metrics = metrics_of(simulated([request(0, 5, 4, 2)], time_limit=TICKS))
    assert (metrics.unfinished, metrics.makespan, metrics.busy_share) == (1, 0.0, None)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=40))
def test_a_spread_is_exact_and_of_values_that_occurred(ticks: list[int]) -> None:
    found = spread(np.array(ticks, np.int64))
    assert found is not None
    assert found.count == len(ticks)
    assert found.mean == float(Fraction(sum(ticks), len(ticks) * TICKS))
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99), (100, found.max)):
        least = min(tick for tick in ticks if 100 * sum(other <= tick for other in ticks) >= percent * len(ticks))
        assert value == least / TICKS


def test_every_metric_is_defined_and_every_definition_is_of_a_metric() -> None:
    assert set(DEFINITIONS) == {field.name for field in fields(Metrics)}
    assert {field.name for field in fields(EngineMetrics)} - {"name", "bucket", "role"} <= set(DEFINITIONS)
    assert all(it.text.endswith(".") and it.name for it in DEFINITIONS.values())
    assert len({it.name for it in DEFINITIONS.values()}) == len(DEFINITIONS)


def test_a_document_is_the_same_for_the_same_simulation() -> None:
    def once() -> str:
        result = simulated(all_ends(), time_limit=10 * TICKS, watcher=OccupancyRecorder())
        return json.dumps(document(result), allow_nan=False)

    assert once() == once()
    read = json.loads(once())
    assert (read["format"], read["partial"], read["workload"]) == (FORMAT, True, {"name": "by hand"})
    assert read["metrics"]["latency"] == {"count": 1, "mean": 3, "p50": 3, "p90": 3, "p99": 3, "max": 3}
    assert set(read["metrics"]) == set(read["definitions"]) - {"all"}
    assert read["endings"][0] == {"status": "cancelled", "reason": "its caller gave it up", "count": 2}
    assert read["configs"][read["engines"][0]["config"]]["max_model_len"] == 64


def rows_of(result: SimulationResult, folder: Path) -> list[dict[str, Any]]:
    write_outcomes(result, folder / "requests.jsonl")
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(list(row) == list(FIELDS) for row in rows)
    return rows


def test_each_request_has_a_line(tmp_path: Path) -> None:
    rows = rows_of(simulated(all_ends(), time_limit=10 * TICKS), tmp_path)
    ends = ["finished", "refused", "refused", "cancelled", "unfinished", "cancelled", "unfinished"]
    assert [row["status"] for row in rows] == ends
    assert rows[0] == {
        "number": 0,
        "engine": "e",
        "status": "finished",
        "reason": None,
        "arrival": 0.0,
        "scheduled": 0.0,
        "prefill_end": 1.0,
        "first_token": 1.0,
        "finish": 3.0,
        "prompt_tokens": 6,
        "output_tokens": 3,
        "generated_tokens": 3,
        "cached_tokens": 0,
        "preemptions": 0,
        "trajectory": None,
        "turn": None,
    }
    assert (rows[4]["generated_tokens"], rows[4]["finish"]) == (9, None)
    assert "max_model_len 64" in rows[1]["reason"]
    assert (rows[6]["engine"], rows[6]["arrival"]) == (None, 20.0)


def test_lines_name_trajectories_and_are_made_in_parts(tmp_path: Path) -> None:
    rows = rows_of(simulated(two_trajectories()), tmp_path)
    assert [(row["trajectory"], row["turn"]) for row in rows] == [("a", 0), ("b", 0), ("a", 1)]
    many = rows_of(simulated([request(number, 0, 1, 1) for number in range(20_001)]), tmp_path)
    assert [row["number"] for row in many] == list(range(20_001))


def test_requests_that_did_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match="a request is still waiting: run the cluster"):
        request_columns([request(0, 0, 4, 2)])
    late = Request(0, 2**63, 4, 2)
    late.status = "finished"
    with pytest.raises(ValueError, match="106 days"):
        request_columns([late])


def test_a_result_holds_on_to_nothing_of_its_cluster() -> None:
    result = simulated(two_trajectories(), watcher=OccupancyRecorder())
    for found in reached(result):
        assert not isinstance(found, SimEngine | Request | SimCluster | Caller | OccupancyRecorder), found


def reached(root: object) -> list[Any]:
    """All objects that one holds on to, but for types, modules and functions."""
    seen: dict[int, object] = {}
    left = [root]
    while left:
        found = left.pop()
        if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
            seen[id(found)] = found
            left += gc.get_referents(found)
    return list(seen.values())


def test_a_time_limit_finds_what_was_held_and_what_was_given_up() -> None:
    """One engine, a tick of a second an iteration. The first is cut off, the second is given up during a pause."""
    config = EngineConfig(max_model_len=4096, kv_blocks=300, block_size=16)
    long = [Request(0, 0, 160, 2000)]
    watcher = OccupancyRecorder()
    cluster = SimCluster(
        [EngineSpec("e", config, AffineCost(TICKS))], Requests(lambda: long, {}), time_limit=1000 * TICKS, watch=watcher
    )
    cluster.run()
    found = metrics_of(result_of(cluster, watcher))
    assert found.kv_share is not None and found.kv_peak_share is not None
    assert found.kv_peak_share == pytest.approx((160 + 999) / 16 / 300, rel=0.02)
    assert found.kv_share < found.kv_peak_share
    given_up = [Request(0, 0, 16, 50, cancel_at=4 * TICKS)]
    paused = SimCluster(
        [EngineSpec("e", config, AffineCost(TICKS))],
        Requests(lambda: given_up, {}),
        time_limit=6 * TICKS,
        updates=(WeightUpdate(2 * TICKS, 10 * TICKS),),
    )
    paused.run()
    assert (given_up[0].status, given_up[0].finish) == ("cancelled", 6 * TICKS)
    assert metrics_of(result_of(paused)).paused_share == pytest.approx(4 / 6)
