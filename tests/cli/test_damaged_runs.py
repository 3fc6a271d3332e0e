"""`libra run --resume` of directories that something has damaged: one line and a status, never a traceback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import BASE, changed, libra, write
from click.testing import Result
from fakes.sessions import sit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.config.run import load_config
from libra.loop.recorder import RECORDS
from libra.records.run_lock import LOCK
from tests.fakes.stopped_run import STOPPED, read_and_stop
from tests.oracles.damage import KINDS, STRANGE, Damage, damage_run

EXAMPLES = 60
DAMAGES = st.builds(Damage, st.sampled_from(KINDS), st.floats(0, 1), st.integers(0, 255))


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

    monkeypatch.setattr("libra.loop.run.run", read_and_stop)

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
    assert_told(resume(lambda run: damage_run(run, damages, strange)))


@pytest.mark.parametrize("name", RECORDS)
def test_a_missing_record_is_named(resume: Callable[[Callable[[Path], None]], Result], name: str) -> None:
    result = resume(lambda run: (run / f"{name}.jsonl").unlink())
    assert_told(result)
    assert f"{name}.jsonl is missing; restore it, or start again with --overwrite" in result.stderr


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
@pytest.mark.parametrize("byte", [0, 1])  # a link leads nowhere, or to a file that may not be written
def test_a_lock_that_is_no_file_is_named(
    resume: Callable[[Callable[[Path], None]], Result], kind: str, byte: int
) -> None:
    def damage(run: Path) -> None:
        (run / LOCK).touch()
        Damage(kind, 0.0, byte)(run / LOCK)

    result = resume(damage)
    assert_told(result)
    assert "lock is not a regular file; remove it" in result.stderr
