"""`libra route` as a process, in front of `libra emulate` as another."""

from __future__ import annotations

import json
import resource
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve.processes import EXAMPLES, ended, start
from typer.testing import CliRunner

from libra.cli.app import app
from libra.trajectory import read_trajectories


def post(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as response:
        return json.load(response)


def test_turns_are_routed_logged_and_remembered(tmp_path: Path) -> None:
    described = yaml.safe_load((EXAMPLES / "gateway.yaml").read_text(encoding="utf-8"))
    file, log, state = tmp_path / "gateway.yaml", tmp_path / "log.jsonl", tmp_path / "state.json"
    options = ["--learn-from", str(EXAMPLES / "trajectories.jsonl"), "--log", str(log), "--state", str(state)]
    with ended() as processes:
        emulated, engines = start("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "50")
        processes.append(emulated)
        for engine in described["engines"]:
            engine["url"] = engines["engines"][engine["name"]]
        file.write_text(yaml.safe_dump(described), encoding="utf-8")
        for number in range(2):  # the second time what the first one knew is read
            router, said = start("route", str(file), *options)
            processes.append(router)
            assert (said["healthy"], said["engines"]) == (2, 2)
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


@pytest.mark.parametrize(
    "state",
    ['{"policy": "other"}', "[1]", "null", "7", "{", "\udcff", '{"policy": "cmlfq", "format": 1}', "[" * 100_000],
)
def test_a_state_that_is_none_is_refused_in_one_line(tmp_path: Path, state: str) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(state.encode("utf-8", errors="surrogateescape"))
    result = CliRunner().invoke(app, ["route", str(EXAMPLES / "gateway.yaml"), "--state", str(file)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "no state of the policy cmlfq" in result.stderr and "remove it to start anew" in result.stderr


@pytest.mark.parametrize(("command", "file"), [("route", "gateway.yaml"), ("emulate", "engines.yaml")])
def test_a_port_that_is_taken_is_named(command: str, file: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [command, str(EXAMPLES / file), "--port", str(port)])
    assert result.exit_code == 2
    assert result.stderr == f"libra: 127.0.0.1:{port}: address already in use\n"
