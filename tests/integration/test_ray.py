"""Runs on a Ray cluster of several nodes, one of which is lost, and on one that is started for the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from arithmetic import LOGPROB_GAP
from simulated_cluster import SimulatedCluster, simulated_cluster
from small_runs import SmallRuns
from test_small_run import all_gone, processes_of, wait_for

from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.cost.sources.files import save_profile
from libra.trajectory import read_trajectories

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]

STEPS = 12

# Every episode uses a calculator, which takes its time while a file is there: nothing is trained on meanwhile.
HELD = """
import asyncio
from dataclasses import dataclass
from pathlib import Path
from libra.environments.calculator import Calculator
from libra.environments.protocol import ToolCall

@dataclass(frozen=True, slots=True)
class Held(Calculator):
    deadline: float = 300.0
    max_turns: int = 2
    hold: str = ""

    def parse(self, text: str) -> ToolCall:
        return ToolCall("calculator", "1+1")

    async def calculate(self, argument: str) -> str:
        while Path(self.hold).exists():
            await asyncio.sleep(0.1)
        return await Calculator.calculate(self, argument)
"""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # of Ray; they try for a minute to tell of their node's death


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(1, 1, 1) as made:
        yield made


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """What these engines cost, about: these tests are not about measuring."""
    path = tmp_path / "profile.json"
    engine = EngineCost(0.008, 0.0002, 0.0, 1e-5, 0.001)
    save_profile(
        path, DeviceProfile("some", "some", engine, TrainCost(0.03, 5e-5, 0.01), SwitchCost(2.0, 2.0, 0.01), 0.1)
    )
    return str(path)


def workers_of(run: SmallRuns) -> dict[str, psutil.Process]:
    """The latest process of every worker; the simulated nodes are on this machine."""
    found = {}
    for row in run.rows("journal"):
        if row["kind"] == "worker":
            try:
                found[row["worker"]] = psutil.Process(row["pid"])
            except psutil.NoSuchProcess:
                found.pop(row["worker"], None)
    return found


def test_a_run_goes_on_without_a_node_and_takes_its_slots_back(
    cluster: SimulatedCluster, small_runs: SmallRuns, profile: str
) -> None:
    """Node 0 has core-0 and rollout-1, node 1 has hybrid-0, which joins the training from there, node 2 rollout-0."""
    hold = small_runs.directory / "hold"
    (small_runs.directory / "held.py").write_text(HELD)
    process = small_runs.start(
        "--json", "--launcher", "ray", "--ray-address", cluster.address, "--allocation", "static",
        warm_up__steps=1, environment__heldout_prompts=4,
        training__steps=STEPS, planner__calibration=profile, environment__kind="held:Held",
        environment__options={"operands": [2, 4], "hold": str(hold)},
    )  # fmt: skip
    wait_for(lambda: len(small_runs.rows("metrics")) >= 3, "the third step", process)
    assert "train 2" in small_runs.rows("metrics")[0]["allocation"]
    workers = workers_of(small_runs)
    assert len(workers) == 4
    fork_servers = {worker.parent() for worker in workers.values()}
    assert len(fork_servers) == 3
    lost = workers["hybrid-0"].parent()
    victim = next(number for number in range(3) if cluster.holds(number, lost))
    hold.touch()
    cluster.lose_node(victim)
    wait_for(lambda: "slot_back" in [row["kind"] for row in small_runs.rows("events")], "another node", process)
    hold.unlink()

    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["finished"] and summary["steps"] == STEPS
    assert summary["trajectories_started"] == summary["trajectories_trained"] == STEPS * 16
    assert summary["logprob_gap"] < LOGPROB_GAP[small_runs.precision]
    trained = [t.id for t in read_trajectories(small_runs.run_directory / "trajectories.jsonl")]
    assert len(set(trained)) == len(trained) == STEPS * 16
    assert [row["step"] for row in small_runs.rows("metrics")] == list(range(1, STEPS + 1))
    assert summary["lost_workers"] == ["hybrid-0"]
    assert [row["worker"] for row in small_runs.rows("events") if row["kind"] == "slot_back"] == ["hybrid-0"]
    processes = [row for row in small_runs.rows("journal") if row["kind"] == "worker" and row["worker"] == "hybrid-0"]
    assert len(processes) >= 2  # it was started again, where Ray found room
    assert small_runs.rows("metrics")[-1]["roles"]["hybrid-0"] == "train"
    assert all_gone([*workers.values(), *(n for n in fork_servers if n is not None), *workers_of(small_runs).values()])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_cluster_outlives_the_controller_that_started_it(
    small_runs: SmallRuns, profile: str, end: signal.Signals
) -> None:
    process = small_runs.start("--launcher", "ray", planner__calibration=profile)
    fork_server = small_runs.run_directory / "logs" / "fork-server-0.log"
    wait_for(fork_server.exists, "the start of a node", process)
    running: dict[str, list[psutil.Process]] = {}
    for each in processes_of(small_runs, process)[1:]:
        with suppress(psutil.Error):  # it has ended already
            for connection in each.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
            running.setdefault(" ".join(each.cmdline()), []).append(each)
    names = " ".join(running)
    assert "gcs_server" in names and "raylet" in names and "libra.backends.launch.fork_server" in names
    process.send_signal(end)
    small_runs.finish(process)
    patient = AGENTS if end == signal.SIGKILL else ()
    assert all_gone([each for name, found in running.items() if not name.startswith(patient) for each in found])
