"""Real engines on their own clocks, with the smallest model: what is measured is consistent with what was asked."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.fidelity.fit import fit_prices
from benchmarks.fidelity.measured import Measured, read_measured
from benchmarks.fidelity.prediction import replay_difference
from libra.backends.launch.fork_server import WORKER_ENVIRONMENT

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
NAMES = ("multi-turn", "preemption", "two-engines")
MEASURE = """
import sys
from pathlib import Path
from benchmarks.fidelity.calibration import Grid
from benchmarks.fidelity.measure import measure_all
from benchmarks.fidelity.models import write_model
from benchmarks.fidelity.workloads import read_workloads

directory, names = Path(sys.argv[1]), sys.argv[2:]
write_model(directory / "tiny", "tiny")
workloads = [workload for workload in read_workloads() if workload.name in names]
measure_all(directory / "tiny", workloads, repeats=2, rounds=2).write(directory / "measured.json.gz")
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    pytest.importorskip("vllm")
    directory = tmp_path_factory.mktemp("fidelity")
    subprocess.run(
        [sys.executable, "-c", MEASURE, str(directory), *NAMES],
        cwd=REPOSITORY,
        env={**os.environ, **WORKER_ENVIRONMENT},
        check=True,
        timeout=300,
    )
    return read_measured(directory / "measured.json.gz")


def test_everything_was_served_and_every_token_computed_in_a_step(measured: Measured) -> None:
    assert [workload.name for workload, _ in measured.runs] == list(NAMES)
    for _, repeats in measured.runs:
        for run in repeats:
            for one in run.outcomes:
                assert one.arrival < one.first_token <= one.finish
            # The first token comes from prefill, and after a preemption another one may.
            decoded = sum(step.decodes for step in run.steps)
            after_first = sum(one.output_tokens - 1 for one in run.outcomes)
            assert after_first - sum(one.preemptions for one in run.outcomes) <= decoded <= after_first
            assert sum(step.finished for step in run.steps) == len(run.outcomes)
            assert sum(step.added for step in run.steps) == len(run.outcomes)
            assert sum(step.preempted for step in run.steps) == sum(one.preemptions for one in run.outcomes)
            assert sum(step.added_tokens for step in run.steps) == sum(one.prompt_tokens for one in run.outcomes)


def test_an_engines_clock_is_its_steps_and_the_time_without_work(measured: Measured) -> None:
    for workload, repeats in measured.runs:
        for run in repeats:
            for number in range(workload.engines):
                steps = [step for step in run.steps if step.engine == number]
                ends = [step.begin + step.adding + step.duration for step in steps]
                finishes = {one.finish for one in run.outcomes if one.engine == number}
                assert finishes <= set(ends)
                arrivals = {one.arrival for one in run.outcomes if one.engine == number}
                for end, following in zip(ends, steps[1:], strict=False):
                    assert following.begin == end or (following.begin > end and following.begin in arrivals)


def test_at_measured_times_the_simulator_takes_the_same_steps(measured: Measured) -> None:
    for workload, repeats in measured.runs:
        for run in repeats:
            assert replay_difference(workload, run) is None


def test_mechanisms_that_a_workload_is_for_take_place(measured: Measured) -> None:
    by_name = {workload.name: repeats[0].outcomes for workload, repeats in measured.runs}
    assert sum(one.preemptions for one in by_name["preemption"]) > 0
    assert sum(one.cached_tokens for one in by_name["multi-turn"]) > 0
    assert {one.engine for one in by_name["two-engines"]} == {0, 1}
    routed = sorted(by_name["two-engines"], key=lambda one: (one.arrival, one.number))
    assert all(one.engine != other.engine for one, other in pairwise(routed))


def test_rounds_of_calibration_are_alike_and_have_prices(measured: Measured) -> None:
    from benchmarks.fidelity.calibration import Grid  # late: it imports vLLM

    grid = Grid()
    assert len(measured.calibration) == 2
    decodes = {step.decodes for step in measured.calibration[0] if not step.chunks}
    assert set(grid.batches) <= decodes
    chunks = {step.chunks[0] for step in measured.calibration[0] if len(step.chunks) == 1 and not step.decodes}
    assert {(chunk, prefix) for chunk in grid.chunks for prefix in grid.prefixes} <= chunks
    prices = fit_prices(measured.calibration)
    assert 0 < prices.tokens[0] < prices.tokens[-1]
