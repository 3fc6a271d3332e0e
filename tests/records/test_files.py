"""Lines are whole or not there, wherever a kill or a full disk cuts them off."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.records.files import DiskError, LineFile, drop_partial_line, whole_lines, write_whole, writing

LINES = [b"one", b"", b"a longer third line", b"four"]
WHOLE = b"".join(line + b"\n" for line in LINES)


def appended(path: Path, *lines: bytes) -> None:
    file = LineFile(path)
    for line in lines:
        file.append(line)
    file.close()


@settings(max_examples=50, deadline=None)
@example(cut=0)
@example(cut=len(WHOLE))
@given(cut=st.integers(0, len(WHOLE)))
def test_cut_anywhere_whole_lines_are_kept_and_more_can_be_written(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines"
    path.write_bytes(WHOLE[:cut])
    kept = LINES[: WHOLE[:cut].count(b"\n")]
    assert whole_lines(path) == kept
    appended(path, b"next")
    assert whole_lines(path) == [*kept, b"next"]


@pytest.mark.parametrize("partial", [0, 1, 1 << 16, (1 << 16) + 1, 200_000])
@pytest.mark.parametrize("before", [b"", b"\n", b"x" * 70_000 + b"\n"])
def test_a_partial_line_of_any_length_is_dropped(before: bytes, partial: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before + b"y" * partial)
    drop_partial_line(path)
    assert path.read_bytes() == before


def test_no_file_is_no_error(tmp_path: Path) -> None:
    drop_partial_line(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_line_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.append(b"one")
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    file.close()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device): free some space on its disk"),
        (errno.EFBIG, "File too large): raise the limit on the size of files (ulimit -f)"),
        (errno.EIO, "Input/output error): free some space on its disk, or make it writable"),
    ],
)
def test_an_error_names_the_file_and_the_remedy(number: int, remedy: str) -> None:
    with pytest.raises(DiskError) as raised, writing(Path("runs/r/journal.jsonl")):
        raise OSError(number, os.strerror(number))
    assert str(raised.value) == f"runs/r/journal.jsonl cannot be written ({remedy}"


LIMITED = """
import resource, sys
from pathlib import Path
from libra.records.files import DiskError
from libra.records.files import LineFile

path, limit = Path(sys.argv[1]), 50
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
file = LineFile(path)
try:
    for number in range(100):
        file.append(f"line {number:02d}".encode())
except DiskError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append(b"there is room again")
"""


def test_what_does_not_fit_leaves_whole_lines_and_the_file_can_be_gone_on_with(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: a part of the last line fits."""
    path = tmp_path / "lines"
    said = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert (
        said.stdout == f"{path} cannot be written (File too large): raise the limit on the size of files (ulimit -f)\n"
    )
    assert whole_lines(path) == [*(f"line {number:02d}".encode() for number in range(6)), b"there is room again"]


def test_a_file_is_not_written_through_what_is_there_already(tmp_path: Path) -> None:
    path, other = tmp_path / "state.json", tmp_path / "other"
    other.write_bytes(b"precious")
    for link in (os.symlink, os.link):
        link(other, tmp_path / "state.json.part")
        write_whole(path, "mine")
        assert other.read_bytes() == b"precious" and path.read_bytes() == b"mine" and not path.is_symlink()
        assert not path.samefile(other)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="lines cannot be written"):
        LineFile(tmp_path / "no directory" / "lines")
