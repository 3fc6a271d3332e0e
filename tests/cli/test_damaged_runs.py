"""`libra run --resume` of directories that something has damaged: one line and a status, never a traceback."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from calls import BASE, changed, libra, write
from click.testing import Result
from fakes.sessions import sit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.config.run import RunConfig, load_config
from libra.loop.checkpoint import missing_trajectories, read_interrupted
from libra.plan.problem import InfeasiblePlanError

EXAMPLES = 60
STOPPED = "stopped before it started"


@dataclass(frozen=True)
class Damage:
    """One change of a file, at a share of its length."""

    kind: str
    at: float
    byte: int

    def __call__(self, path: Path) -> None:
        content = path.read_bytes()
        place = int(self.at * len(content))
        match self.kind:
            case "flip" if content:
                place = min(place, len(content) - 1)
                path.write_bytes(
                    content[:place] + bytes([content[place] ^ (1 << self.byte % 8)]) + content[place + 1 :]
                )
            case "cut":
                path.write_bytes(content[:place])
            case "insert":
                path.write_bytes(content[:place] + bytes([self.byte]) * (1 + self.byte) + content[place:])
            case "zero":
                path.write_bytes(content[:place] + bytes(len(content) - place))
            case "lines":  # one is gone
                lines = content.splitlines(keepends=True)
                path.write_bytes(b"".join(lines[: int(self.at * len(lines))] + lines[int(self.at * len(lines)) + 1 :]))
            case "twice":
                lines = content.splitlines(keepends=True)
                path.write_bytes(b"".join(lines + lines[: int(self.at * len(lines))]))
            case "number":
                path.write_bytes(content.replace(b"1", b"9" * (1 + 20 * self.byte)))
            case "nested":
                path.write_bytes(b"[" * 100_000)
            case "no text":
                path.write_bytes(b"\xff\xfe\n" * (1 + self.byte))
            case "empty":
                path.write_bytes(b"")
            case _:
                path.unlink()
                self._instead(path)

    def _instead(self, path: Path) -> None:
        match self.kind:
            case "directory":
                path.mkdir()
            case "link":
                path.symlink_to("/etc/hostname" if self.byte % 2 else "nowhere")
            case "fifo":
                os.mkfifo(path)


KINDS = ("flip", "cut", "insert", "zero", "lines", "twice", "number", "nested", "no text", "empty", "gone", "directory")
DAMAGES = st.builds(Damage, st.sampled_from((*KINDS, "link", "fifo")), st.floats(0, 1), st.integers(0, 255))
STRANGE = ("checkpoint-999", "checkpoint-foo", "checkpoint-3.part", "episodes-foo.jsonl/", "episodes-00009.jsonl/")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run left that has made all but its last step, with the configuration that it is resumed with."""
    here = tmp_path_factory.mktemp("damaged")
    data: dict[str, Any] = changed(routing={"policy": "cmlfq-published"}, directory="runs")
    run = here / "runs" / BASE["name"]
    run.mkdir(parents=True)
    sit(run, False, 0)
    config = load_config(write(here / "run.yaml", data)).computing_in("fp32")
    (run / "config.json").write_text(config.model_dump_json())
    return here


@pytest.fixture
def resume(whole: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], Result]:
    """Resume a copy of the run that was damaged; it reads all that a session reads, and stops."""

    async def read(config: RunConfig, *_: object) -> None:
        missing_trajectories(config.run_directory, read_interrupted(config.run_directory).history.finished)
        raise InfeasiblePlanError(STOPPED)

    monkeypatch.setattr("libra.loop.run.run", read)

    def call(damage: Callable[[Path], None]) -> Result:
        with tempfile.TemporaryDirectory() as here, monkeypatch.context() as patch:
            shutil.copytree(whole, here, dirs_exist_ok=True)
            patch.chdir(here)
            damage(Path("runs", BASE["name"]))
            return libra("run", "run.yaml", "--resume")

    return call


def assert_told(result: Result) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (2, 3), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""


def test_a_whole_run_is_read(resume: Callable[[Callable[[Path], None]], Result]) -> None:
    result = resume(lambda run: None)
    assert (result.exit_code, STOPPED in result.stderr) == (3, True), result.stderr


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.floats(0, 0.999), DAMAGES), min_size=1, max_size=2), st.sampled_from((None, *STRANGE)))
def test_a_damaged_run_ends_with_a_line(
    resume: Callable[[Callable[[Path], None]], Result], damages: list[tuple[float, Damage]], strange: str | None
) -> None:
    def damage(run: Path) -> None:
        for share, change in damages:
            files = sorted(path for path in run.rglob("*") if path.is_file())
            change(files[int(share * len(files))])
        if strange is not None:
            (run / strange).mkdir(exist_ok=True)

    assert_told(resume(damage))
