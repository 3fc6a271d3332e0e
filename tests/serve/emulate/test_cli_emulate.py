"""`libra emulate` as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from serve.processes import EXAMPLES, LIBRA, ended, start

ENGINES = EXAMPLES / "engines.yaml"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_it_is_interrupted(end: signal.Signals) -> None:
    with ended() as processes:
        process, said = start("emulate", str(ENGINES), "--speed", "50")
        processes.append(process)
        assert list(said["engines"]) == ["a100-0", "a100-1"] and said["base"].startswith("http://127.0.0.1:")
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 40}).encode()
        with urllib.request.urlopen(f"{said['engines']['a100-1']}/completions", body, timeout=30) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 40
        process.send_signal(end)
        assert process.wait(timeout=30) == 0


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ([str(ENGINES), "--port", str(taken.getsockname()[1])], "address already in use"),
            ([str(ENGINES), "--port", "65536"], "--port is 65536; give 0 to 65535"),
            ([str(ENGINES), "--speed", "0"], "--speed is 0; give more than 0"),
            ([str(ENGINES), "--default-tokens", "0"], "--default-tokens is 0; give 1 or more"),
            ([str(ENGINES), "--seed", "-1"], "--seed is -1; give 0 or more"),
            ([str(tmp_path / "none.yaml")], "none.yaml"),
        ]
        for options, says in cases:
            done = subprocess.run(
                [*LIBRA, "emulate", *options], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 2 and done.stdout == ""
            assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("libra: ") and says in done.stderr
