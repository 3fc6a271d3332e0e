"""Libra's servers as processes, as a user starts them.

Invariant: a server answers by the time that it is yielded, and has ended when the block is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import yaml

from libra.backends.launch.worker import die_with

LONGEST = 16_384  # tokens of a context
_PATIENCE, _PAUSE = 60.0, 0.1  # seconds


@dataclass(slots=True)
class Server:
    """A process, and what it said of itself. `words`: its command, to start it again."""

    words: tuple[str, ...]
    process: subprocess.Popen[str]
    said: dict[str, Any]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def port(self) -> int:
        return int(self.said["port"] if "port" in self.said else self.said["base"].rpartition(":")[2])

    @property
    def megabytes(self) -> float:
        """Memory of the process and of those that it started."""
        process = psutil.Process(self.process.pid)
        return float(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 1e6)

    def end(self) -> None:
        """A second time does nothing."""
        self.process.kill()
        self.process.wait()


def start(*words: object, files: int | None = None, soft: bool = False) -> Server:
    """Start `python -m WORDS`. `files`: its limit of open files, soft and hard; or `soft` alone, as a user's shell."""
    command = [sys.executable, "-m", *map(str, words)]
    if files is not None:
        command = ["bash", "-c", f'ulimit {"-Sn" if soft else "-n"} {files} && exec "$@"', "bash", *command]
    process = _process(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"{' '.join(map(str, words))} ended with status {process.wait()}")
    return Server(tuple(map(str, words)), process, json.loads(line))


@contextmanager
def started(*words: object, files: int | None = None) -> Iterator[Server]:
    server = start(*words, files=files)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def answering(command: Sequence[str], base: str) -> Iterator[None]:
    """A program of others, which does not say when it is ready."""
    process = _process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(process, base)
        yield
    finally:
        process.kill()
        process.wait()


def _process(command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """A process that outlives no attack."""
    ours = os.getpid()
    return subprocess.Popen(command, preexec_fn=lambda: die_with(ours), **more)


def wait_until_healthy(process: subprocess.Popen[Any], base: str) -> None:
    """Until `GET base/health` answers with status 200: a router's, as soon as an engine of it does. Raises RuntimeError
    if the process ends before."""
    until = time.monotonic() + _PATIENCE
    while not _is_healthy(base):
        if process.poll() is not None:
            raise RuntimeError(f"the server of {base} ended with status {process.returncode}")
        if time.monotonic() > until:
            raise RuntimeError(f"{base} is not healthy after {_PATIENCE:g} s")
        time.sleep(_PAUSE)


def _is_healthy(base: str) -> bool:
    try:
        with urlopen(f"{base}/health", timeout=_PATIENCE) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def http(path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as it is sent: with a body a POST, else a GET."""
    verb = "POST" if body else "GET"
    lines = (f"{verb} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def emulate(file: Path, *options: object, **more: object) -> tuple[object, ...]:
    """The words that emulate the engine of `file`, which is written; `more` are its keys."""
    engine = {"name": "e", "model": "Qwen/Qwen3-14B", "gpu": "A800", "profile": "roofline", "max_model_len": LONGEST}
    content = {"engines": [{**engine, "max_num_seqs": 256, **more}], "route": "least-loaded"}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return ("libra.cli.app", "emulate", file, "--json", *options)


def route(file: Path, engines: Sequence[Server], *options: object) -> tuple[object, ...]:
    """The words that route to these emulated engines by `file`, which is written."""
    urls = (next(iter(server.said["engines"].values())) for server in engines)
    described = [{"name": f"e{number}", "url": url, "max_model_len": LONGEST} for number, url in enumerate(urls)]
    return gateway(file, described, *options, route="least-loaded", turn_tokens=64, engine_timeout_seconds=3.0)


def gateway(
    file: Path, engines: Sequence[Mapping[str, object]], *options: object, **keys: object
) -> tuple[object, ...]:
    """The words that route to described engines by `file`, which is written with these keys."""
    file.write_text(yaml.safe_dump({"engines": list(engines), **keys}), encoding="utf-8")
    return ("libra.cli.app", "route", file, "--port", 0, "--json", *options)
