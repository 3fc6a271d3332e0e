"""`libra route` and `libra emulate` as processes; an engine's is killed with turns under way, and comes back."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession
from serve.collector import collector, names
from serve.processes import EXAMPLES, LIBRA, ended, one_engine, start
from typer.testing import CliRunner

from libra.cli.app import app
from libra.config.sealed_line import unsealed
from libra.route.cmlfq import CMLFQ
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.http import serving
from libra.trajectory import Trajectory, read_trajectories


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
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
            assert all(unsealed(line) for line in log.read_bytes().splitlines())
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
    assert "not a state of the policy cmlfq" in result.stderr and "give another file" in result.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize(("command", "file"), [("route", "gateway.yaml"), ("emulate", "engines.yaml")])
def test_other_machines_need_a_token(command: str, file: str, host: str) -> None:
    result = CliRunner().invoke(app, [command, str(EXAMPLES / file), "--host", host])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "--token-file" in result.stderr


def test_engines_need_no_file_and_policies_may_be_your_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    text = "from libra.route.baselines import LeastLoaded\n\n\nclass Mine(LeastLoaded):\n    NAME = 'mine'\n"
    mine.write_text(text, encoding="utf-8")
    log, state = tmp_path / "log.jsonl", tmp_path / "state.json"
    with ended() as processes:
        emulated, engines = start("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "50")
        processes.append(emulated)
        given = [word for url in engines["engines"].values() for word in ("--engine", url)]
        for number in range(2):
            router, said = start("route", *given, "--route", f"{mine}:Mine", "--log", str(log), "--state", str(state))
            processes.append(router)
            assert (said["healthy"], said["engines"]) == (2, 2)
            with urllib.request.urlopen(f"{said['base']}/plan", timeout=30) as response:
                plan = json.load(response)
            assert [engine["max_model_len"] for engine in plan["engines"]] == [16384, 16384]
            body = {"prompt": [1] * 20, "max_tokens": 8, "metadata": {"session_id": f"s{number}"}}
            post(f"{said['v1']}/completions", body)
            assert post(f"{said['base']}/finish_session?session_id=s{number}", {})["turns"] == 1
            router.send_signal(signal.SIGTERM)
            assert router.wait(timeout=30) == 0
            assert json.loads(state.read_text(encoding="utf-8"))["policy"] == "mine"
    assert [it.id for it in read_trajectories(log)] == ["s0", "s1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no engines: give FILE, or --engine http://HOST:PORT for each, or --workers-from"),
        (["--engine", "ftp://a"], "engines.0.url: must begin with http:// or https://"),
        (["--engine", "http://me:pw@a", "--engine", "http://me:pw@a"], "--engine number 2 repeats an earlier one"),
        ([str(EXAMPLES / "gateway.yaml"), "--engine", "http://a"], "--engine and FILE"),
        (["--engine", "http://a", "--route", "best"], "route: policy is 'best'; choose one of"),
        (
            ["--engine", "http://a", "--route", "none.py:Mine"],
            "route: policy is 'none.py:Mine': there is no file none.py",
        ),
        ([str(EXAMPLES / "gateway.yaml"), "--route", "best"], "route: policy is 'best'; choose one of"),
        (["--workers-from", "10.0.0.0/99"], "workers_from: '10.0.0.0/99' is not a host"),
    ],
)
def test_engines_that_make_no_gateway_are_refused_in_one_line(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["route", *words])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and says in result.stderr
    assert "pw" not in result.stderr


def test_a_full_disk_loses_no_trajectory_and_no_state(tmp_path: Path) -> None:
    """The limit on the size of files stands for a disk without space."""
    log, state, gateway = tmp_path / "log.jsonl", tmp_path / "state.json", tmp_path / "gateway.yaml"
    before = b'{"policy": "cmlfq", "format": 1}'
    with ended() as processes:
        emulated, engine = start("emulate", str(one_engine(tmp_path)), "--speed", "50")
        processes.append(emulated)
        section = {"name": "e", "url": next(iter(engine["engines"].values())), "max_model_len": 16384}
        gateway.write_text(yaml.safe_dump({"engines": [section]}), encoding="utf-8")
        router, said = start("route", str(gateway), "--log", str(log), "--state", str(state))
        processes.append(router)
        state.write_bytes(before)
        for number in range(2):
            body = {"prompt": [1] * 20, "max_tokens": 8, "libra": {"trajectory": f"t{number}", "task": "x" * 500}}
            post(f"{said['v1']}/completions", body)
        post(f"{said['base']}/trajectories/t0/finish", {})
        size = log.stat().st_size
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(f"{said['base']}/trajectories/t1/finish", {})
            error = json.load(refused.value)["error"]
            assert error["code"] == 503 and "finish it again later" in error["message"]
        assert log.stat().st_size == size
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        post(f"{said['base']}/trajectories/t1/finish", {})
        assert [it.id for it in read_trajectories(log)] == ["t0", "t1"]
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        router.send_signal(signal.SIGTERM)
        assert router.wait(timeout=30) == 2
    assert state.read_bytes() == before and not list(tmp_path.glob("*.part"))


ENGINES = EXAMPLES / "engines.yaml"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_it_is_interrupted(end: signal.Signals) -> None:
    with ended() as processes:
        process, said = start("emulate", str(ENGINES), "--speed", "50")
        processes.append(process)
        assert list(said["engines"]) == ["a100-0", "a100-1"] and said["base"].startswith("http://127.0.0.1:")
        answer = post(f"{said['engines']['a100-1']}/completions", {"prompt": [1, 2, 3], "max_tokens": 40})
        assert answer["usage"]["completion_tokens"] == 40
        process.send_signal(end)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "65536"], "--port is 65536; give 0 to 65535"),
        (["--speed", "0"], "--speed is 0; give more than 0"),
        (["--default-tokens", "0"], "--default-tokens is 0; give 1 or more"),
        (["--seed", "-1"], "--seed is -1; give 0 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["emulate", str(ENGINES), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("libra: ") and says in result.stderr


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    command = [*LIBRA, "emulate", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "none.yaml" in done.stderr


@pytest.mark.parametrize(("command", "file"), [("route", "gateway.yaml"), ("emulate", "engines.yaml")])
def test_a_port_that_is_taken_is_named(command: str, file: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [command, str(EXAMPLES / file), "--port", str(port)])
    assert result.exit_code == 2
    assert result.stderr == f"libra: 127.0.0.1:{port}: address already in use\n"


def test_a_page_needs_a_port_of_its_own() -> None:
    result = CliRunner().invoke(app, ["route", str(EXAMPLES / "gateway.yaml"), "--page", "9000"])
    assert result.exit_code == 2
    assert result.stderr == "libra: --page and --port are both 9000; give --page another port, or 0 for any\n"


TRAJECTORIES, TURNS, TOKENS = 24, 3, 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_turn_is_lost_or_counted_twice(tmp_path: Path) -> None:
    file = str(one_engine(tmp_path))
    ports = [free_port() for _ in range(2)]
    finished: list[Trajectory] = []

    async def trajectory(session: ClientSession, id: str) -> float:
        """The seconds of its longest turn."""
        longest, prompt = 0.0, [sum(map(ord, id))] * 50
        for _ in range(TURNS):
            libra = {"trajectory": id, "prompt": id, "tool": {"name": "t", "status": "ok"}}
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True, "libra": libra}
            began = time.monotonic()
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                answer = json.loads(await response.text())
            longest = max(longest, time.monotonic() - began)
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 7, 7, 7]
        async with session.post(f"/trajectories/{id}/finish") as response:
            assert response.status == 200
        return longest

    async def main() -> None:
        sections = tuple(
            UpstreamSection(name=f"e{number}", url=f"http://127.0.0.1:{port}/v1", max_model_len=16384)
            for number, port in enumerate(ports)
        )
        gateway = Gateway(GatewayConfig(engines=sections), CMLFQ(), finished.append)
        async with serving(gateway.application(), "127.0.0.1", 0) as base, ClientSession(base) as session:
            turns = [asyncio.create_task(trajectory(session, str(number))) for number in range(TRAJECTORIES)]
            while gateway.counts.turns < TRAJECTORIES // 2 or not gateway.upstreams.all["e0"].in_flight:
                await asyncio.sleep(0.01)
            processes[0].kill()
            processes[0].wait()
            longest = max(await asyncio.gather(*turns))
            assert gateway.counts.retries > 0 and gateway.counts.turns == TRAJECTORIES * TURNS
            assert [engine.id for engine in gateway.upstreams.instances] == ["e1"]
            # What was lost is asked again at once: a turn takes about a second, and twice that if it was lost.
            assert longest < 5
            again, _ = start("emulate", file, "--speed", "10", port=ports[0])
            processes.append(again)
            began = time.monotonic()
            while len(gateway.upstreams.instances) < 2:
                assert time.monotonic() - began < 5
                await asyncio.sleep(0.02)
            assert max(await asyncio.gather(*(trajectory(session, f"later {it}") for it in range(4)))) < 5
            assert gateway.upstreams.all["e0"].turns > 0

    with ended() as processes:
        processes += [start("emulate", file, "--speed", "10", port=port)[0] for port in ports]
        asyncio.run(main())
    assert sorted(it.id for it in finished) == sorted(
        [str(number) for number in range(TRAJECTORIES)] + [f"later {it}" for it in range(4)]
    )
    for it in finished:
        assert [turn.generated_tokens for turn in it.turns] == [TOKENS] * TURNS
        assert [turn.returned_tokens for turn in it.turns] == [3] * (TURNS - 1) + [0]
        assert it.contexts() == (50, 453, 856)


def test_a_router_has_a_page_and_sends_spans(tmp_path: Path) -> None:
    with ended() as processes, collector() as (spans_to, came):
        emulated, engine = start("emulate", str(one_engine(tmp_path)), "--speed", "50")
        processes.append(emulated)
        address = next(iter(engine["engines"].values()))
        router, said = start("route", "--engine", address, "--page", "0", "--otel", spans_to)
        processes.append(router)
        post(f"{said['v1']}/completions", {"prompt": [1] * 20, "max_tokens": 8, "libra": {"trajectory": "first"}})
        with urllib.request.urlopen(said["page"], timeout=60) as answer:
            page = answer.read().decode()
        assert "first" in page and "1 turn answered" in page and "1 of 1 engine" in page
        assert 'data-label="Running">0<' in page  # as the engine itself says
        router.send_signal(signal.SIGINT)
        assert router.wait(timeout=60) == 0
    assert sorted(names(came)) == ["chat", "invoke_agent"]


def test_a_page_or_a_collector_that_cannot_be_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = {
            "--otel": ("collector:4318", "--otel: not the address of a collector"),
            "--page": (port, f"127.0.0.1:{port}"),
        }
        for option, (value, says) in refused.items():
            command = [*LIBRA, "route", "--engine", "http://127.0.0.1:9", "--port", "0", option, value]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            *before, last = done.stderr.splitlines()  # with a page, engines are checked first
            assert done.returncode == 2 and says in last
            assert all(line.startswith("engine engine-0 is out of service: /health") for line in before)
            assert len(before) == (option == "--page")
