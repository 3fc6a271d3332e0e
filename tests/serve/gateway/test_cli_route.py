"""`libra route` as a process, in front of `libra emulate` as another."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from libra.trajectory import read_trajectories

EXAMPLES = Path(__file__).parents[3] / "examples"
LIBRA = [sys.executable, "-c", "from libra.cli.app import main; main()"]


def started(*words: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = subprocess.Popen(
        ["bash", "-c", 'ulimit -Sn 256 && exec "$@"', "bash", *LIBRA, *words, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def post(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as response:
        return json.load(response)


def test_turns_are_routed_logged_and_remembered(tmp_path: Path) -> None:
    emulated, engines = started("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "50")
    described = yaml.safe_load((EXAMPLES / "gateway.yaml").read_text(encoding="utf-8"))
    for engine in described["engines"]:
        engine["url"] = engines["engines"][engine["name"]]
    file, log, state = tmp_path / "gateway.yaml", tmp_path / "log.jsonl", tmp_path / "state.json"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    options = ["--learn-from", str(EXAMPLES / "trajectories.jsonl"), "--log", str(log), "--state", str(state)]
    processes = [emulated]
    try:
        for number in range(2):  # the second time what the first one knew is read
            router, said = started("route", str(file), *options)
            processes.append(router)
            assert (said["well"], said["engines"]) == (2, 2)
            few, most = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            assert few == most  # each turn in flight has two sockets
            body = {"prompt": [1] * 20, "max_tokens": 8, "libra": {"trajectory": f"t{number}", "prompt": "p"}}
            assert post(f"{said['v1']}/completions", body)["usage"]["completion_tokens"] == 8
            assert post(f"{said['base']}/trajectories/t{number}/finish", {"reward": 1.0})["reward"] == 1.0
            router.send_signal(signal.SIGTERM)
            assert router.wait(timeout=30) == 0
            assert [it.id for it in read_trajectories(log)] == [f"t{it}" for it in range(number + 1)]
            assert json.loads(state.read_text(encoding="utf-8"))["policy"] == "cmlfq"
            options = options[2:]
        state.write_text('{"policy": "other"}', encoding="utf-8")
        done = subprocess.run([*LIBRA, "route", str(file), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "no state of the policy cmlfq" in done.stderr and "remove it to start anew" in done.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()
