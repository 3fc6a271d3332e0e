"""One client's requests through Libra's gateway and through vllm-router, over the same engines: the same answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_router", reason="vllm-router is not here: make test-integrations")

from serve.processes import EXAMPLES, ended, start

SESSION = {"X-Session-ID": "s1"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
TOKENS = {"model": "m", "prompt": [1] * 20, "max_tokens": 8}
SCRIPT: list[tuple[str, str, Any, dict[str, str]]] = [
    ("GET", "/v1/models", None, {}),
    ("POST", "/v1/completions", TOKENS, SESSION),
    ("POST", "/v1/completions", {**TOKENS, "prompt": [1] * 40}, SESSION),
    ("POST", "/v1/completions", {**TOKENS, "prompt": "hello there"}, {}),
    ("POST", "/v1/chat/completions", CHAT, SESSION),
    ("POST", "/inference/v1/generate", {"token_ids": [1] * 20, "sampling_params": {"max_tokens": 4}}, SESSION),
    ("POST", "/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 4}, SESSION),
    ("POST", "/v1/messages", CHAT, SESSION),
    ("POST", "/tokenize", {"model": "m", "prompt": "hi"}, {}),
    ("POST", "/finish_session?session_id=s1", None, {}),
    ("POST", "/finish_session?session_id=nobody", None, {}),
    ("GET", "/list_workers", None, {}),
]
STREAMED = [("/v1/completions", TOKENS), ("/v1/chat/completions", CHAT)]
REFUSED: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/finish_session", None, SESSION),
    ("POST", "/v1/completions", b'{"prompt"', {}),
    ("POST", "/v1/completions", {**TOKENS, "prompt": [1] * 200_000}, {}),
    ("GET", "/nothing", None, {}),
]
_OWN = ("text", "content", "token_ids", "id", "request_id", "created", "created_at", "cached_tokens")  # of one request


def call(base: str, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of Libra's gateway and of vllm-router."""
    log: Path = tmp_path_factory.mktemp("router") / "log"
    with ended() as processes, log.open("w") as out:
        emulated, said = start("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "50")
        processes.append(emulated)
        urls = list(said["engines"].values())
        gateway, ours = start("route", *(word for url in urls for word in ("--engine", url)))
        processes.append(gateway)
        port = free_port()
        command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--worker-urls", *(url.removesuffix("/v1") for url in urls)]
        processes.append(subprocess.Popen(command, stdout=out, stderr=out, text=True))
        theirs, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                if call(theirs, "GET", "/health", None, {})[0] == 200:
                    break
            except OSError:
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
        yield ours["base"], theirs


def shape(value: Any) -> Any:
    """An answer without what is of one request to one engine."""
    if isinstance(value, dict):
        return {
            key: type(each).__name__ if key in _OWN and not isinstance(each, dict) else shape(each)
            for key, each in value.items()
        }
    return [shape(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("step", SCRIPT, ids=[f"{number} {step[1]}" for number, step in enumerate(SCRIPT)])
def test_status_and_body_are_the_same(routers: tuple[str, str], step: tuple[str, str, Any, dict[str, str]]) -> None:
    (status, ours), (expected, theirs) = (call(base, *step) for base in routers)
    assert status == expected
    told, wanted = shape(json.loads(ours)), shape(json.loads(theirs))
    if step[1].startswith("/finish_session"):
        assert isinstance(told.pop("turns"), int)  # what we add
    for listed in (told, wanted):
        if "urls" in listed:
            listed["urls"].sort()  # vllm-router lists them in any order
    assert told == wanted


@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_streams_begin_and_end_the_same(routers: tuple[str, str], path: str, body: dict[str, Any]) -> None:
    found = []
    for base in routers:
        status, raw = call(base, "POST", path, {**body, "stream": True}, SESSION)
        events = [line.removeprefix(b"data: ") for line in raw.splitlines() if line]
        kinds = {json.loads(event)["object"] for event in events[:-1]}
        found.append((status, kinds, events[-1], json.loads(events[-2])["choices"][0]["finish_reason"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("step", REFUSED, ids=[step[1] for step in REFUSED])
def test_what_is_refused_has_the_same_status(
    routers: tuple[str, str], step: tuple[str, str, Any, dict[str, str]]
) -> None:
    ours, theirs = (call(base, *step)[0] for base in routers)
    assert ours == theirs and ours >= 400
