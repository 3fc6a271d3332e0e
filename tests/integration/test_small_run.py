"""Whole runs: to the end, through the loss of a worker or of the controller, and through Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from arithmetic import LOGPROB_GAP
from small_runs import SMALL_RUN, SmallRuns

from libra.exec.journal import read_journal, replay
from libra.exec.pool import make_pool
from libra.loop.checkpoint import allocation_in_force
from libra.trajectory import read_trajectories
from tests.oracles.run_accounts import Sizes, journal_wrong, steps_wrong, unreadable
from tests.oracles.run_files import read_rows
from tests.oracles.shared_memory import shared_files, unused_shared_files

pytestmark = pytest.mark.integration


def wait_for(condition: object, what: str, process: subprocess.Popen[str], seconds: float = 300) -> None:
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


def test_a_run_ends_with_everything_accounted_for(small_runs: SmallRuns, cache: Path) -> None:
    before = shared_files()
    process = small_runs.start("--json")
    wait_for(lambda: len(small_runs.rows("metrics")) >= 2, "the second step", process)
    running = processes_of(small_runs, process)
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    assert all_gone(running)
    assert not unused_shared_files(before)
    assert not small_runs.left()
    assert not list(cache.rglob("modelinfos"))  # no engine had a process started that looks at the model

    summary = json.loads(out)
    assert summary["lost_workers"] == []
    assert summary["logprob_gap"] < LOGPROB_GAP[small_runs.precision]

    steps = small_runs.rows("metrics")
    assert all(row["staleness_max"] <= 1 for row in steps)
    assert any(row["staleness_max"] == 1 for row in steps)  # asynchronous, not lock-step
    for row in steps:  # every second of every worker
        spent = [sum(causes.values()) for causes in row["device_seconds"].values()]
        assert spent == [pytest.approx(row["step_seconds"])] * 4
    assert {"generating", "computing", "loading", "starting", "evaluating"} <= set(summary["device_seconds"])
    assert "devices: " in err and " % generating" in err
    trained = list(read_trajectories(small_runs.run_directory / "trajectories.jsonl"))
    assert len({trajectory.id for trajectory in trained}) == len(trained) == 8 * 16
    assert all(trajectory.finished for trajectory in trained)
    assert {turn.status for t in trained for turn in t.turns} <= {"ok", "error", "timeout", None}

    assert not list(steps_wrong(steps, summary, Sizes(8, groups=4, samples=4, staleness=1)))
    assert not list(journal_wrong(read_rows(small_runs.run_directory / "journal.jsonl"), 8))
    assert not list(unreadable(small_runs.run_directory))

    periods = small_runs.rows("periods")
    assert periods[0]["first_step"] == 1 and periods[-1]["last_step"] == 8
    for row in small_runs.rows("decisions"):
        # The best for lengths that are somewhat off as well need not be the best for those that are expected.
        assert row["solver_status"] == "optimal" or 0 < row["solver_gap"] < 0.5
    page = (small_runs.run_directory / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert json.loads((small_runs.run_directory / "timeline.json").read_text())
    assert (small_runs.run_directory / "model" / "model.safetensors").is_file()


def timeline(run: SmallRuns) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((run.run_directory / "timeline.json").read_text())
    return events


def test_static_allocation_keeps_the_initial_split(small_runs: SmallRuns) -> None:
    status, _, err = small_runs.finish(small_runs.start("--allocation", "static"))
    assert status == 0, err[-3000:]
    assert small_runs.rows("decisions") == []
    assert len({row["allocation"] for row in small_runs.rows("metrics")}) == 1


@pytest.mark.parametrize("allocation", ["adaptive", "static"])
def test_a_killed_engine_is_started_again_and_costs_no_trajectory(small_runs: SmallRuns, allocation: str) -> None:
    process = small_runs.start("--json", "--allocation", allocation, training__steps=30)
    wait_for(lambda: len(small_runs.rows("metrics")) >= 2, "the second step", process)
    workers = {row["worker"]: row["pid"] for row in small_runs.rows("journal") if row["kind"] == "worker"}
    os.kill(workers["rollout-1"], signal.SIGKILL)
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["finished"] and summary["lost_workers"] == ["rollout-1"]
    assert summary["trajectories_started"] == summary["trajectories_trained"] == 30 * 16
    trained = [t.id for t in read_trajectories(small_runs.run_directory / "trajectories.jsonl")]
    assert len(set(trained)) == len(trained) == 30 * 16
    assert small_runs.rows("metrics")[-1]["roles"]["rollout-1"].startswith("rollout:")
    assert len([row for row in small_runs.rows("journal") if row.get("worker") == "rollout-1" and "pid" in row]) >= 2
    lost = [row["device_seconds"]["rollout-1"] for row in small_runs.rows("metrics")]
    assert any("failed" in causes for causes in lost) and any("starting" in causes for causes in lost)
    page = (small_runs.run_directory / "report.html").read_text()
    assert "rollout-1 was lost" in page and "its slot is idle" in page
    moves = [event["args"] for event in timeline(small_runs) if event.get("args", {}).get("outcome")]
    assert all(move["outcome"] == "done" and move["seconds"] > 0 for move in moves)
    assert {"idle", "train"} & {move["from"] for move in moves}


def test_a_run_whose_replicas_are_sharded_over_two_processes_survives_the_loss_of_one(small_runs: SmallRuns) -> None:
    process = small_runs.start("--json", training__steps=20, training__processes=2, training__sharding="fsdp2")
    wait_for(lambda: len(small_runs.rows("metrics")) >= 2, "the second step", process)
    pids = {row["worker"]: row["pid"] for row in small_runs.rows("journal") if row["kind"] == "worker"}
    leaders = {worker: psutil.Process(pid) for worker, pid in pids.items()}
    [peer] = leaders["hybrid-0"].children()
    assert len(leaders["core-0"].children()) == 1 and not leaders["rollout-0"].children()
    peer.kill()
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    assert all_gone([peer, leaders["hybrid-0"]])
    summary = json.loads(out)
    assert summary["finished"] and summary["lost_workers"] == ["hybrid-0"]
    assert summary["trajectories_started"] == summary["trajectories_trained"] == 20 * 16
    assert summary["logprob_gap"] < LOGPROB_GAP[small_runs.precision]
    assert "process 1 of the replica has ended" in (small_runs.run_directory / "logs" / "hybrid-0.log").read_text()
    assert (small_runs.run_directory / "model" / "model.safetensors").is_file()


def test_ctrl_c_leaves_nothing_behind_and_the_run_can_be_resumed(small_runs: SmallRuns) -> None:
    before = shared_files()
    process = small_runs.start(training__steps=1000)  # it cannot have ended before it is told to
    wait_for(lambda: any(small_runs.run_directory.glob("checkpoint-*[0-9]/state.json")), "a checkpoint", process)
    running = processes_of(small_runs, process)
    process.send_signal(signal.SIGINT)
    status, _, err = small_runs.finish(process)
    assert status == 130 and "--resume" in err
    assert all_gone(running)
    assert not unused_shared_files(before)
    assert not small_runs.left()
    assert (small_runs.run_directory / "report.html").is_file()

    steps = len(small_runs.rows("metrics")) + 2
    status, out, err = small_runs.finish(small_runs.start("--resume", "--json", training__steps=steps))
    assert status == 0, err[-3000:]
    assert [row["step"] for row in small_runs.rows("metrics")] == list(range(1, steps + 1))
    assert json.loads(out)["steps"] == steps


def finished_episodes(run: SmallRuns) -> dict[str, str]:
    """The whole lines of `trajectories.jsonl`, by id."""
    *lines, _ = (run.run_directory / "trajectories.jsonl").read_text().split("\n")
    return {json.loads(line)["id"]: line for line in lines}


def test_a_killed_controller_takes_its_workers_with_it_and_its_run_goes_on(small_runs: SmallRuns) -> None:
    process = small_runs.start(training__steps=10)
    # Beyond the checkpoint of step 3, with some steps to be made again.
    wait_for(lambda: len(small_runs.rows("metrics")) >= 5, "the fifth step", process)
    workers = processes_of(small_runs, process)[1:]
    assert len(workers) >= 5  # the fork server and four workers
    process.kill()
    process.communicate()
    assert all_gone(workers)
    before = finished_episodes(small_runs)
    measured = (small_runs.run_directory / "metrics.jsonl").read_text().rpartition("\n")[0]
    holds = {name: shape["max_model_len"] for name, shape in SMALL_RUN["engines"].items()}
    last = replay(read_journal(small_runs.run_directory / "journal.jsonl"))
    allocation = allocation_in_force(last, make_pool(1, 1, 2).all(), holds)

    process = small_runs.start("--resume", "--json", training__steps=10)
    events = len(small_runs.rows("events"))
    wait_for(
        lambda: any(row["kind"] == "step" for row in journal_of_the_last_session(small_runs)),
        "the first step of the resumed run",
        process,
    )
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["finished"] and summary["steps"] == 10
    assert summary["trajectories_started"] == summary["trajectories_trained"] == 10 * 16
    assert [row["step"] for row in small_runs.rows("metrics")] == list(range(1, 11))
    assert (small_runs.run_directory / "metrics.jsonl").read_text().startswith(measured)
    assert all(0 <= row["staleness_max"] <= 1 for row in small_runs.rows("metrics"))
    after = finished_episodes(small_runs)
    assert len(after) == len(small_runs.rows("trajectories")) == 10 * 16  # none twice
    assert {id: after[id] for id in before} == before  # nothing that had finished was generated again
    assert any(row["kind"] == "resumed" for row in small_runs.rows("events")[events:])
    plans = [row for row in journal_of_the_last_session(small_runs) if row["kind"] == "plan"]
    assert plans[0]["wanted"] == json.loads(msgspec.json.encode(allocation))  # it began with what the workers did last


def journal_of_the_last_session(run: SmallRuns) -> list[dict[str, Any]]:
    rows = run.rows("journal")
    starts = [index for index, row in enumerate(rows) if row["kind"] == "start"]
    return rows[starts[-1] :] if len(starts) > 1 else []
