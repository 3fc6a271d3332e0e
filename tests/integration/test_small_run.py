"""Whole runs: to the end, through the loss of a worker, and through Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from small_runs import SmallRuns

from libra.trajectory import read_trajectories

pytestmark = pytest.mark.integration


def shared_memory_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def wait_for(condition: object, what: str, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Poll until `condition()` holds; the run's own end or the deadline is a failure with its output."""
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() > ends:
            process.kill()
            raise AssertionError(f"{what} did not happen:\n{process.communicate()[1][-3000:]}")
        time.sleep(0.05)


def processes_of(run: SmallRuns, process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_a_run_ends_with_everything_accounted_for(small_runs: SmallRuns) -> None:
    before = shared_memory_files()
    process = small_runs.start("--json")
    wait_for(lambda: len(small_runs.rows("metrics")) >= 2, "the second step", process)
    running = processes_of(small_runs, process)
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    assert all_gone(running)
    assert shared_memory_files() == before

    summary = json.loads(out)
    assert summary["finished"] and summary["steps"] == 8 and summary["lost_workers"] == []
    assert summary["trajectories_started"] == summary["trajectories_trained"] == 8 * 16
    assert summary["trajectories_unfinished"] == 0
    assert summary["logprob_gap"] < 0.15  # bfloat16 on both sides

    steps = small_runs.rows("metrics")
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert all(row["staleness_max"] <= 1 for row in steps)
    assert any(row["staleness_max"] == 1 for row in steps)  # asynchronous, not lock-step
    trained = list(read_trajectories(small_runs.run_directory / "trajectories.jsonl"))
    assert len({trajectory.id for trajectory in trained}) == len(trained) == 8 * 16
    assert all(trajectory.finished for trajectory in trained)
    assert {turn.status for t in trained for turn in t.turns} <= {"ok", "error", "timeout", None}

    periods = small_runs.rows("periods")
    assert periods[0]["first_step"] == 1 and periods[-1]["last_step"] == 8
    assert all(row["solver_status"] == "optimal" for row in small_runs.rows("decisions"))
    page = (small_runs.run_directory / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert json.loads((small_runs.run_directory / "timeline.json").read_text())
    assert (small_runs.run_directory / "model" / "model.safetensors").is_file()


def test_static_allocation_keeps_the_initial_split(small_runs: SmallRuns) -> None:
    status, _, err = small_runs.finish(small_runs.start("--allocation", "static"))
    assert status == 0, err[-3000:]
    assert small_runs.rows("decisions") == []
    assert len({row["allocation"] for row in small_runs.rows("metrics")}) == 1


def test_a_killed_engine_costs_its_slot_and_no_trajectory(small_runs: SmallRuns) -> None:
    process = small_runs.start("--json", training__steps=12)
    wait_for(lambda: len(small_runs.rows("metrics")) >= 2, "the second step", process)
    workers = {row["worker"]: row["pid"] for row in small_runs.rows("journal") if row["kind"] == "worker"}
    os.kill(workers["rollout-1"], signal.SIGKILL)
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["finished"] and summary["lost_workers"] == ["rollout-1"]
    assert summary["trajectories_started"] == summary["trajectories_trained"] == 12 * 16
    trained = [t.id for t in read_trajectories(small_runs.run_directory / "trajectories.jsonl")]
    assert len(set(trained)) == len(trained) == 12 * 16
    assert small_runs.rows("metrics")[-1]["roles"]["rollout-1"] == "failed"
    assert "rollout-1" in (small_runs.run_directory / "report.html").read_text()


def test_ctrl_c_leaves_nothing_behind_and_the_run_can_be_resumed(small_runs: SmallRuns) -> None:
    before = shared_memory_files()
    process = small_runs.start(training__steps=10)
    wait_for(lambda: any(small_runs.run_directory.glob("checkpoint-*/state.json")), "a checkpoint", process)
    running = processes_of(small_runs, process)
    process.send_signal(signal.SIGINT)
    status, _, err = small_runs.finish(process)
    assert status == 130 and "--resume" in err
    assert all_gone(running)
    assert shared_memory_files() == before
    assert (small_runs.run_directory / "report.html").is_file()

    status, out, err = small_runs.finish(small_runs.start("--resume", "--json", training__steps=10))
    assert status == 0, err[-3000:]
    assert [row["step"] for row in small_runs.rows("metrics")] == list(range(1, 11))
    assert json.loads(out)["steps"] == 10


def test_a_killed_controller_takes_its_workers_with_it(small_runs: SmallRuns) -> None:
    process = small_runs.start()
    wait_for(lambda: len(small_runs.rows("metrics")) >= 1, "the first step", process)
    workers = processes_of(small_runs, process)[1:]
    assert len(workers) >= 5  # the nursery and four workers
    process.kill()
    process.communicate()
    assert all_gone(workers)
