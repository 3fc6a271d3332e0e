"""A process of another user at every socket, port, page, store and directory of a run.

Invariant: it tries each by the system's own calls, without a line of Libra, and knows every name and address. Only root
can start a process of another user; without that nothing here is run, and the rows say so.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.rows import Row, never
from libra.backends.weights.grid import Grid
from libra.lend.backend.device_page import LendingError
from libra.lend.backend.serving_token import ServingToken
from libra.lend.weights.wire import Hello, pack
from tests.fakes.servers import Server, emulate, http, route, started

ATTACK = "another user"
_READ, _ENDED, _TAKEN = (
    *("what a stranger read, set or was answered", "processes that a stranger ended"),
    "pages prepared by a stranger that were taken",
)

# Tries each, and prints what came of it: "refused", or what was read, in hexadecimal.
_TRIES = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)

def tried(kind, where, sent):
    if kind == "read":
        with open(where, "rb") as file:
            return file.read(20)
    if kind == "write":
        os.close(os.open(where, os.O_WRONLY))
        return b"opened"
    if kind == "make":
        with open(where, "xb") as file:
            file.write(bytes(4096))
        os.chmod(where, 0o666)
    if kind == "link":
        os.symlink(sent, where)
        return b""
    if kind == "list":
        return repr([os.readlink(f"{where}/{it}") for it in os.listdir(where)]).encode()
    if kind in ("unix", "tcp", "http"):
        with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as one:
            one.settimeout(20)
            one.connect(where if kind == "unix" else ("127.0.0.1", where))
            one.sendall(bytes.fromhex(sent))
            if kind != "http":
                one.shutdown(socket.SHUT_WR)
            return one.recv(40)
    return b""

for kind, where, sent in json.loads(sys.stdin.read()):
    try:
        print(tried(kind, where, sent).hex())
    except OSError as error:
        print("refused")
"""

Try = tuple[str, Any, str]


def attack_as_stranger(say: Callable[[str], None]) -> Iterator[Row]:
    """Start what listens or lies about, and try all of it as another user."""
    if os.geteuid() != 0:
        why = "not run: only root can start a process of another user"
        yield from (Row(ATTACK, what, math.nan, "", note=why) for what in (_READ, _ENDED, _TAKEN))
        return
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shared-") as shared, ExitStack() as stack:
        folder = Path(shared)
        folder.chmod(0o755)
        servers, tries = _started(folder, stack)
        answers = _as_stranger(tries)
        wrong = [
            f"{kind} {str(where)[-60:]}: {answer}"
            for (kind, where, _), answer in zip(tries, answers, strict=True)
            if not _kept_out(kind, answer)
        ]
        say(f"{len(tries)} tries of another user")
        yield never(ATTACK, _READ, wrong, f"{len(tries)} tries at {len(servers)} processes")
        ended = [name for name, server in servers.items() if not server.alive]
        yield never(ATTACK, _ENDED, ended, f"{len(servers)}: {', '.join(servers)}")
        yield never(ATTACK, _TAKEN, *_prepared(folder))


def _kept_out(kind: str, answer: str) -> bool:
    """Whether access was denied. HTTP has to ask for its token; other ports and sockets may close without a word."""
    if kind == "http":
        return answer != "refused" and bytes.fromhex(answer).startswith(b"HTTP/1.1 401")
    return answer == "refused" or (kind in ("unix", "tcp") and not answer)


def _started(folder: Path, stack: ExitStack) -> tuple[dict[str, Server], list[Try]]:
    """Processes, and what a stranger tries."""
    servers: dict[str, Server] = {}
    tries: list[Try] = []
    for kind in ("agent", "metrics", "weights", "rendezvous"):
        here = folder / kind
        here.mkdir(0o755)
        servers[kind] = stack.enter_context(started("benchmarks.soak.attack.listening", kind, here))
    token = folder / "token"
    token.touch(0o600)
    token.write_text("gateway-token\n", encoding="utf-8")
    engine = stack.enter_context(started(*emulate(folder / "engine.yaml", "--port", 0, "--token-file", token)))
    keyed = route(folder / "gateway.yaml", [engine], "--token-file", token)
    servers |= {"emulated engine": engine, "gateway": stack.enter_context(started(*keyed))}

    def tried(kind: str, where: object, sent: bytes = b"") -> None:
        tries.append((kind, where if isinstance(where, int) else str(where), sent.hex()))

    agent = servers["agent"].said
    tried("unix", agent["socket"], b"\0\0\0\4junk")
    for kind in ("read", "write"):
        for path in (agent["device"], token, folder / "metrics" / "token"):
            tried(kind, path)
    for server in servers.values():
        tried("list", f"/proc/{server.process.pid}/fd")
        tried("read", f"/proc/{server.process.pid}/environ")
    tried("make", folder / "agent" / "made")
    for name in ("gateway", "emulated engine", "metrics"):
        for asked in _requests():
            tried("http", servers[name].port, asked)
    grid = Grid(1 << 22, "bfloat16")
    for shown in ("", "0" * 32):
        tried("tcp", servers["weights"].port, pack(Hello(shown, grid, "", [(-1, 4)], [(1, 4)])))
    for call in (["a/0", 0.0, b"mine"], ["a/0", 0.0]):
        body = msgspec.msgpack.encode(call)
        for shown in ("", "0" * 32, "x" * 5000):
            tried("tcp", servers["rendezvous"].port, shown.encode() + struct.pack("!I", len(body)) + body)
    return servers, tries


def _requests() -> Iterator[bytes]:
    """A request of each kind, without a token and with another one."""
    body = b'{"prompt": [1], "max_tokens": 1}'
    posts = ("/v1/completions", "/trajectories/t/finish", "/trajectories/t/forget")
    for path, sent in (*((path, body) for path in posts), ("/metrics", b""), ("/engines", b"")):
        yield http(path, sent)
        yield http(path, sent, "Authorization: Bearer wrong")


def _as_stranger(tries: list[Try]) -> list[str]:
    command = [sys.executable, "-S", "-c", _TRIES]
    done = subprocess.run(command, input=json.dumps(tries), capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.split("\n")[:-1]


def _prepared(folder: Path) -> tuple[list[str], str]:
    """Pages and links that a stranger makes before an owner starts, of which none is taken."""
    anyone, victim = folder / "anyone", folder / "victim"
    anyone.mkdir()
    anyone.chmod(0o1777)
    made: list[Try] = [("make", str(anyone / "page"), ""), ("link", str(anyone / "link"), str(victim))]
    _as_stranger(made)
    taken = list[str]()
    for _, path, _ in made:
        try:
            ServingToken(Path(path)).close()
            taken.append(path)
        except LendingError:
            pass
    if victim.exists():
        taken.append("a file was made through the link")
    return taken, f"{len(made)}"
