"""A run that borrows the device of somebody's vLLM server from the agent beside it, which is killed: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arithmetic import LOGPROB_GAP
from fakes.small_run import PROFILE
from oracles.small_loan import ROOMY, write_loan
from small_runs import SmallRuns

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig
from libra.cost.sources.files import save_profile
from libra.trajectory import read_trajectories

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
STEPS = 60

# Rewards of any model vary, so that each step changes the weights.
GRADED = """
from libra.environments.calculator import Calculator

class Graded(Calculator):
    def reward(self, prompt, text):
        return sum(character.isdigit() for character in text) / max(1, len(text))
"""

SERVE = """
import sys, threading, time
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

engine = LLMEngine.from_engine_args(EngineArgs(
    model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20, block_size=32, dtype="float32", enforce_eager=True,
    disable_log_stats=True, async_scheduling=False, scheduler_cls="libra.lend.backend.scheduler.LendingScheduler"))
print("ready", flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
served = 0
while not ended.wait(0.5):
    for number in range(2):
        engine.add_request(f"{served}-{number}", {"prompt_token_ids": [4 + number] * 20},
                           SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    served += 2
print(served, flush=True)
"""


class Agent:
    """`libra lend serve` as a process."""

    def __init__(self, directory: Path, number: int) -> None:
        self._out, self._err = (directory / f"agent-{number}.{kind}" for kind in ("out", "err"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "libra.cli.app", "lend", "serve", str(directory / "loan.yaml")),
                    *("--json", "--period", "0.2", "--logs", str(directory / f"logs-{number}")),
                ],
                stdout=out,
                stderr=err,
            )

    @property
    def ready(self) -> bool:
        return "the borrower is ready" in self._err.read_text()

    @property
    def tokens(self) -> int:
        """That the engine has computed in the run's turns, as it said last."""
        return sum(json.loads(line)["tokens"] for line in self._out.read_text().splitlines() if line.endswith("}"))


def wait_for(condition: Callable[[], Any], *processes: subprocess.Popen[Any]) -> None:
    """Until it holds. The end of a process, or of six minutes, is a failure."""
    ends = time.monotonic() + 360
    while not condition():
        assert time.monotonic() < ends and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def test_a_run_borrows_from_an_agent_that_comes_late_is_killed_and_comes_back(
    tmp_path: Path, small_runs: SmallRuns, cache: Path
) -> None:
    pytest.importorskip("vllm")
    write_tiny_model(tmp_path / "chat", ModelConfig(), "abc", 256)
    (tmp_path / "graded.py").write_text(GRADED)
    began = time.time()
    save_profile(tmp_path / "costs.json", PROFILE)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "chat")],
        env={**os.environ, **WORKER_ENVIRONMENT, "LIBRA_LEND_DEVICE": str(tmp_path / "device")},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    run = small_runs.start(
        *("--json", "--allocation", "static"),
        environment__kind="graded:Graded",
        training__steps=STEPS,
        training__precision="fp32",
        planner={"calibration": str(tmp_path / "costs.json"), "period": 4},
        cluster={"slots": 2, "core": 1, "hybrid": 0, "rollout": 1, "share": 0.4},
        start={
            "replicas": 1,
            "buckets": [
                {"shape": "lent", "engines": 1, "up_to": 40},
                {"shape": "long", "engines": 1, "up_to": 192},
            ],
        },
        lending={
            "agents": [str(tmp_path / "device.agent")],
            "engine": {"max_model_len": 64, "max_num_seqs": 16, "kv_tokens": 1024},
        },
    )
    processes: list[subprocess.Popen[Any]] = [server, run]

    def said(words: str) -> int:
        return sum(words in row["text"] for row in small_runs.rows("events"))

    def agent(number: int) -> Agent:
        """One from which the run, which stands still until it is ready, borrows by now."""
        found = Agent(tmp_path, number)
        processes.append(found.process)
        wait_for(lambda: found.ready, found.process, server)
        run.send_signal(signal.SIGCONT)
        wait_for(lambda: found.tokens > 100, run, found.process, server)
        return found

    try:
        assert server.stdout is not None
        wait_for(lambda: small_runs.rows("metrics"), run, server)
        run.send_signal(signal.SIGSTOP)  # it could be over before the next process has started
        while (line := server.stdout.readline()) != "ready\n":  # vLLM may print before
            assert line
        [warmed] = (path.parent for path in cache.glob("**/warm/*/model.safetensors") if path.stat().st_mtime > began)
        engine = {"max_model_len": 64, "max_num_seqs": 16, "kv_cache": "2 MiB"}
        rollout = {"model": str(warmed), **engine}
        write_loan(tmp_path / "loan.yaml", ROOMY, tmp_path / "chat", rollout, device="device", quiet=0.2)
        assert said("lends nothing yet, and is queried again: no agent answers") == 1
        first = agent(1)
        first.process.kill()
        first.process.wait()
        wait_for(lambda: said("; its slot is idle"), run, server)
        run.send_signal(signal.SIGSTOP)
        agent(2)
        status, out, err = small_runs.finish(run, 360)
        assert status == 0, err[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    summary = json.loads(out)
    assert summary["finished"] and summary["lost_workers"] == ["lent-0"]
    assert said("lent-0 borrows beside") == 2
    assert summary["trajectories_started"] == summary["trajectories_trained"] == STEPS * 16
    trained = [it.id for it in read_trajectories(small_runs.run_directory / "trajectories.jsonl")]
    assert len(set(trained)) == len(trained) == STEPS * 16
    assert summary["logprob_gap"] < LOGPROB_GAP["fp32"]
    steps = small_runs.rows("metrics")
    # Tokens sampled under other weights than the trainer's are less likely to it than to whoever sampled them.
    assert any(row["behaviour_weight_mean"] != 1 for row in steps)
    assert all(row["behaviour_weight_mean"] == pytest.approx(1, abs=0.05) for row in steps)
    assert all(row["staleness_max"] <= 1 for row in steps)
