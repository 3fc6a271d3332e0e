"""Verdicts of the attack: pass, failure and neither."""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from msgspec.structs import replace

from benchmarks.soak.attack.commands import MOST_BYTES, MOST_SECONDS, Ended
from benchmarks.soak.attack.strangers import _kept_out, attack_as_stranger
from tests.fakes.servers import answering
from tests.oracles.damage import KINDS, Damage, drawn

REFUSED = Ended(2, "libra: f: no\n", "", 0.1, 10**6)


SLOW = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Health.asked += 1
        self.send_response(200 if Health.asked > 2 and self.path == "/health" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_a_server_of_others_is_there_once_it_is_healthy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    with answering([sys.executable, "-c", SLOW, str(port)], base), urlopen(f"{base}/health") as answer:
        assert answer.status == 200
    with pytest.raises(URLError):
        urlopen(f"{base}/health")


def test_a_server_of_others_that_ends_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match="ended with status 3"),
        answering(["sh", "-c", "exit 3"], "http://127.0.0.1:1"),
    ):
        pass


def changed(**fields: Any) -> Ended:
    return replace(REFUSED, **fields)


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (REFUSED, None),
        (changed(status=0, said="a note\nand another\n"), None),
        (changed(status=3), None),
        (changed(status=3, said="load 0.1: refused\nno load is certified\n"), None),
        (changed(status=1), "status 1"),
        (changed(status=-14), "status -14"),
        (changed(raised="KeyError()"), "KeyError"),
        (changed(said=""), "0 lines"),
        (changed(said="one\ntwo\n"), "2 lines"),
        (changed(seconds=MOST_SECONDS), "5.0 s"),
        (changed(peak=MOST_BYTES), "500 MB"),
    ],
)
def test_a_command_reads_its_input_or_refuses_it_in_a_line(ended: Ended, says: str | None) -> None:
    assert ended.wrong is None if says is None else says in (ended.wrong or "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_damage_again(tmp_path: Path, kind: str) -> None:
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_bytes(b'{"a": 1, "b": [2, 3]}\n{"a": 4}\n')
        drawn(random.Random(7), [kind])(path)
        found.append(path.read_bytes() if path.is_file() else (path.is_dir(), path.is_fifo(), path.is_symlink()))
    assert found[0] == found[1] != b'{"a": 1, "b": [2, 3]}\n{"a": 4}\n'


def test_an_empty_file_can_be_damaged(tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / kind
        path.touch()
        Damage(kind, 0.5, 3)(path)


@pytest.mark.parametrize(
    ("kind", "answer", "out"),
    [
        ("read", "refused", True),
        ("read", "", False),
        ("read", b"secret".hex(), False),
        ("make", "", False),
        ("unix", "", True),
        ("tcp", "refused", True),
        ("tcp", b"\0\0\0\1".hex(), False),
        ("http", b"HTTP/1.1 401 Unauthorized".hex(), True),
        ("http", b"HTTP/1.1 200 OK".hex(), False),
        ("http", "refused", False),  # it was not asked
        ("http", "", False),
    ],
)
def test_a_stranger_is_kept_out_or_not(kind: str, answer: str, out: bool) -> None:
    assert _kept_out(kind, answer) is out


def test_what_cannot_be_run_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = list(attack_as_stranger(lambda text: None))
    assert {it.met for it in found} == {None} and "only root" in found[0].note
