"""One controller at a time in a run directory, however the one before ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from libra.config.yaml_file import ConfigError
from libra.loop.run_directory import locked

HOLDER = """
import sys
from pathlib import Path
from libra.loop.run_directory import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_controller_holds_its_directory_no_longer(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refused = f"process {holder.pid} is running in .*runs/one; wait for it, stop it"
        with pytest.raises(ConfigError, match=refused), locked(run):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked(run):
        pass
