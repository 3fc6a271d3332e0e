"""Several gateways behind nginx and behind Envoy, by the examples' files: sessions stay, and outlive a gateway."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from aiohttp import ClientError, ClientSession
from serve.processes import EXAMPLES, ended, start

from libra.trajectory import read_trajectories

SESSIONS, TURNS = 40, 5


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def nginx(program: str, folder: Path, port: int, gateways: Sequence[str]) -> list[str]:
    """The command that starts it, with its file written."""
    servers = "".join(f"server {gateway} max_fails=1 fail_timeout=2s;\n" for gateway in gateways)
    text = (EXAMPLES / "nginx.conf").read_text(encoding="utf-8")
    text = re.sub(r"(\s*server 127\.0\.0\.1:\d+ .*;)+", "\n" + servers, text)
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{port}").replace("/tmp/libra-nginx", f"{folder}/nginx")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(text.replace("http {\n", "http {\n" + own), encoding="utf-8")
    command = [program, "-p", str(folder), "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf")]
    return [*command, "-g", "daemon off; master_process off;"]


def envoy(program: str, folder: Path, port: int, gateways: Sequence[str]) -> list[str]:
    """The same."""
    described = yaml.safe_load((EXAMPLES / "envoy.yaml").read_text(encoding="utf-8"))
    [listener], [cluster] = (described["static_resources"][kind] for kind in ("listeners", "clusters"))
    listener["address"]["socket_address"]["port_value"] = port
    [locality] = cluster["load_assignment"]["endpoints"]
    ports = (int(gateway.rpartition(":")[2]) for gateway in gateways)
    addresses = ({"socket_address": {"address": "127.0.0.1", "port_value": each}} for each in ports)
    locality["lb_endpoints"] = [{"endpoint": {"address": address}} for address in addresses]
    (folder / "envoy.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    options = ["--disable-hot-restart", "--concurrency", "1", "--log-path", str(folder / "envoy.log")]
    return [program, "-c", str(folder / "envoy.yaml"), *options]


Balancer = Callable[[Path, int, Sequence[str]], list[str]]


@pytest.fixture(params=[nginx, envoy], ids=["nginx", "envoy"])
def balancer(request: pytest.FixtureRequest) -> Balancer:
    name = request.param.__name__
    program = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{name} is not here")
    return partial(request.param, program)


@contextmanager
def behind(
    balancer: Balancer, folder: Path, gateways: int
) -> Iterator[tuple[str, list[subprocess.Popen[str]], list[Path]]]:
    """Address of the balancer, the gateways' processes and their logs."""
    described = yaml.safe_load((EXAMPLES / "gateway.yaml").read_text(encoding="utf-8"))
    with ended() as processes:
        emulated, engines = start("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "50")
        processes.append(emulated)
        for engine in described["engines"]:
            engine["url"] = engines["engines"][engine["name"]]
        file = folder / "gateway.yaml"
        file.write_text(yaml.safe_dump(described), encoding="utf-8")
        routers, addresses, logs = [], [], []
        for number in range(gateways):
            logs.append(folder / f"log-{number}.jsonl")
            router, said = start("route", str(file), "--shared", "--log", str(logs[-1]))
            processes.append(router)
            routers.append(router)
            addresses.append(said["base"].removeprefix("http://"))
        port = free_port()
        processes.append(subprocess.Popen(balancer(folder, port, addresses), text=True))
        yield f"http://127.0.0.1:{port}", routers, logs


async def play(base: str, client: ClientSession, id: str) -> int:
    """A session of some turns, each repeated until it is answered; the attempts."""
    headers, prompt, attempts = {"X-Session-ID": id}, [1] * 20, 0
    for _ in range(TURNS):
        while True:
            attempts += 1
            try:
                body = {"prompt": prompt, "max_tokens": 8}
                async with client.post(f"{base}/v1/completions", json=body, headers=headers) as answer:
                    if answer.status == 200:
                        break
            except ClientError:
                continue
        prompt = prompt + [1] * 10
    async with client.post(f"{base}/finish_session", params={"session_id": id}) as answer:
        assert answer.status == 200
    return attempts


async def reachable(base: str, client: ClientSession) -> None:
    while True:
        try:
            async with client.get(f"{base}/health") as answer:
                if answer.status == 200:
                    return
        except ClientError:
            await asyncio.sleep(0.05)


def test_both_files_hash_the_session_and_have_the_same_gateways() -> None:
    text = (EXAMPLES / "nginx.conf").read_text(encoding="utf-8")
    assert "hash $session consistent" in text and "map $http_x_session_id $session" in text
    resources = yaml.safe_load((EXAMPLES / "envoy.yaml").read_text(encoding="utf-8"))["static_resources"]
    [manager] = resources["listeners"][0]["filter_chains"][0]["filters"]
    [host] = manager["typed_config"]["route_config"]["virtual_hosts"]
    assert host["routes"][0]["route"]["hash_policy"][0]["header"] == {"header_name": "x-session-id"}
    [locality] = resources["clusters"][0]["load_assignment"]["endpoints"]
    addresses = [it["endpoint"]["address"]["socket_address"] for it in locality["lb_endpoints"]]
    ports = [int(port) for port in re.findall(r"server 127\.0\.0\.1:(\d+)", text)]
    assert [it["port_value"] for it in addresses] == ports


@pytest.mark.integration
@pytest.mark.parametrize("gateways", [2, 4])
async def test_each_session_is_whole_at_one_gateway(balancer: Balancer, tmp_path: Path, gateways: int) -> None:
    with behind(balancer, tmp_path, gateways) as (base, _, logs):
        async with ClientSession() as client:
            await reachable(base, client)
            attempts = await asyncio.gather(*(play(base, client, f"s{number}") for number in range(SESSIONS)))
        assert attempts == [TURNS] * SESSIONS
        kept = [list(read_trajectories(log)) for log in logs]
    assert all(kept)  # each has some
    whole = [each for log in kept for each in log]
    assert {each.id for each in whole} == {f"s{number}" for number in range(SESSIONS)} and len(whole) == SESSIONS
    assert {len(each.turns) for each in whole} == {TURNS}


@pytest.mark.integration
async def test_a_killed_gateway_loses_no_session_that_its_client_repeats(balancer: Balancer, tmp_path: Path) -> None:
    with behind(balancer, tmp_path, 2) as (base, routers, logs):
        async with ClientSession() as client:
            await reachable(base, client)
            playing = [asyncio.create_task(play(base, client, f"s{number}")) for number in range(SESSIONS)]
            await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            routers[0].kill()
            attempts = await asyncio.gather(*playing)
            assert min(attempts) >= TURNS  # each turn of each session was answered
            ids = {f"s{number}" for number in range(SESSIONS)}
            lost = ids - _kept(logs)  # by the gateway that held them when it was killed
            await asyncio.gather(*(play(base, client, id) for id in lost))
    assert len(lost) < SESSIONS and _kept(logs) == ids


def _kept(logs: list[Path]) -> set[str]:
    return {each.id for log in logs for each in read_trajectories(log)}
