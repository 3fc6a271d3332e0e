"""`libra report`: the page of any run directory, whatever ended the run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.calls import BASE, assert_refused, libra, write
from fakes.made_run import write_run

HOLDER = """
import sys, time
from pathlib import Path
from libra.loop.run_directory import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run that was killed: no summary, no page, and a line that was never finished."""
    directory = write_run(tmp_path / "run-7").directory
    (directory / "summary.json").unlink()
    with open(directory / "metrics.jsonl", "ab") as metrics:
        metrics.write(b'{"step": 121, "tim')
    return directory


def test_a_killed_run_has_a_page(run: Path) -> None:
    done = libra("report", run)
    assert (done.exit_code, done.stdout) == (0, f"report: {run / 'report.html'}\n")
    page = (run / "report.html").read_text()
    assert "The last line of metrics.jsonl was cut off and is left out." in page
    assert "Interrupted, or still running" in page


def test_the_page_goes_where_it_is_asked_to(run: Path, tmp_path: Path) -> None:
    assert libra("report", run, "--output", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").exists()
    assert not (run / "report.html").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert_refused(libra("report", tmp_path / "none"), f"{tmp_path / 'none'}: no such directory")
    assert_refused(libra("report", tmp_path), f"{tmp_path}: not the directory of a run")
    assert not any(tmp_path.iterdir())


def test_a_fifo_in_place_of_the_lock_is_not_waited_for(run: Path) -> None:
    (run / "lock").unlink(missing_ok=True)
    os.mkfifo(run / "lock")
    assert libra("report", run).exit_code == 0


def test_damage_before_the_last_line_is_one_line_that_names_it(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    lines[4] = lines[4][:40]
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert_refused(libra("report", run), f"{run / 'metrics.jsonl'}:5: ")


@pytest.mark.parametrize("seed", range(16))
def test_a_damaged_directory_is_never_a_traceback(run: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(sorted(path for path in run.iterdir() if path.suffix in (".json", ".jsonl")))
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    match seed % 4:
        case 0:
            content[at] = rng.randrange(256)
        case 1:
            del content[at : at + rng.randrange(1, 200)]
        case 2:
            content[at:at] = rng.randbytes(20)
        case _:
            content = bytearray(rng.choice([b"", b"[]", b"null", b"7", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe"]))
    path.write_bytes(content)
    done = libra("report", run)
    if done.exit_code != 0:
        assert_refused(done, str(run))


def test_a_live_run_is_named_first(run: Path) -> None:
    """The process that was killed leaves its lock file, which means nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = libra("report", run)
        assert done.exit_code == 0
        assert f"note: process {holder.pid} is still running in {run}" in done.stderr
        config = write(run.parent / "run.yaml", {**BASE, "name": run.name, "directory": str(run.parent)})
        for option in ("--resume", "--overwrite", "--allocation=static"):
            assert_refused(libra("run", config, option), f"name: process {holder.pid} is running in {run}; wait for it")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert "is running" not in libra("report", run).stderr
    assert_refused(libra("run", config, "--resume"), "has no checkpoint")
