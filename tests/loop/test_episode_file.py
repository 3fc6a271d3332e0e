"""What is on file of episodes is the state of the run, wherever it ended."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.small_run import episode
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config.sealed_line import sealed
from libra.loop.episode import Episode
from libra.loop.episode_file import EpisodeFile, EpisodeFileError, EpisodeGroup, History, TakenBatch, read_history
from libra.records.files import DiskError, LineFile


class Run:
    """A run that writes, and the state that it would have to be resumed in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = EpisodeFile(directory, 0, ())
        self.version = 0
        self.checkpoint = 0
        self.groups: dict[int, EpisodeGroup] = {}
        self.batches: list[TakenBatch] = []
        self.finished: list[Episode] = []

    def start(self, group: int) -> None:
        self.groups[group] = EpisodeGroup(group, self.version, {})
        self.file.started(group, self.version)

    def finish(self, group: int, index: int) -> None:
        done = episode(group, index, self.version)
        started = self.groups[group]
        self.groups[group] = EpisodeGroup(group, started.started_at, {**started.episodes, index: done})
        self.finished.append(done)
        self.file.finished(group, index, done)

    def take(self, *groups: int) -> None:
        self.version += 1
        self.file.taken(self.version, groups)
        self.batches.append(TakenBatch(self.version, tuple(self.groups.pop(group) for group in groups)))

    def save(self, killed: bool = False) -> None:
        self.file.begin_segment(self.version)
        asyncio.run(self.file.sync())
        if not killed:
            self.checkpoint, self.batches, self.finished = self.version, [], []
            self.file.forget_older()

    def wanted(self) -> History:
        return History(self.checkpoint, tuple(self.batches), tuple(self.groups.values()), tuple(self.finished))

    def go_on(self) -> None:
        """The controller is killed, and the run resumed."""
        self.file.close()
        history = read_history(self.directory, self.checkpoint)
        assert history == self.wanted()
        self.file = EpisodeFile(self.directory, self.checkpoint, history.groups)

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("episodes-*.jsonl"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.file.close()


def test_a_run_from_its_start(run: Run) -> None:
    run.start(0)
    run.start(1)
    run.finish(1, 0)
    run.finish(0, 1)
    run.finish(1, 1)
    run.take(1)
    run.finish(0, 0)
    run.go_on()
    history = read_history(run.directory, 0)
    assert history.version == 1
    assert [list(group.episodes) for group in history.batches[0].groups] == [[0, 1]]
    assert [list(group.episodes) for group in history.groups] == [[1, 0]]  # in the order in which they finished
    assert history.finished[0] == episode(1, 0)  # to the last bit


def test_a_group_without_an_episode_is_under_way_too(run: Run) -> None:
    run.start(0)
    run.go_on()
    assert read_history(run.directory, 0).groups == (EpisodeGroup(0, 0, {}),)


def test_a_checkpoint_forgets_what_it_was_trained_on(run: Run) -> None:
    for group in range(3):
        run.start(group)
        run.finish(group, 0)
    run.take(0)
    run.take(2)
    run.save()
    run.finish(1, 1)
    run.go_on()
    history = read_history(run.directory, 2)
    assert (history.step, history.version, history.batches) == (2, 2, ())
    assert [list(group.episodes) for group in history.groups] == [[0, 1]]
    assert [found.trajectory.id for found in history.finished] == ["g1-1"]  # the other one is in the checkpoint


def test_a_segment_that_cannot_be_begun_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start(0)

    def full(file: LineFile, line: bytes) -> None:
        raise DiskError(file.path, OSError(28, "No space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        with pytest.raises(DiskError):
            run.file.begin_segment(0)
    run.finish(0, 0)  # an episode that ends while the run does
    run.go_on()


def test_segments_go_when_neither_checkpoint_needs_them(run: Run) -> None:
    run.start(0)
    run.finish(0, 0)
    run.save()
    assert run.segments() == ["episodes-00000.jsonl", "episodes-00001.jsonl"]  # group 0 is in the first
    run.take(0)
    run.start(1)
    run.save()
    assert run.segments() == [f"episodes-0000{number}.jsonl" for number in range(3)]
    run.take(1)
    run.save()
    assert run.segments() == [f"episodes-0000{number}.jsonl" for number in (1, 2, 3)]
    run.save()
    assert run.segments() == [f"episodes-0000{number}.jsonl" for number in (3, 4)]


def test_a_run_goes_on_from_the_checkpoint_before(run: Run) -> None:
    run.start(0)
    run.finish(0, 0)
    run.start(1)
    run.take(0)
    run.save()
    run.finish(1, 0)
    run.take(1)
    before, newest = run.checkpoint, run.checkpoint + 1
    run.save()
    history = read_history(run.directory, before)
    assert (history.step, history.version) == (before, newest)
    assert [[group.number for group in batch.groups] for batch in history.batches] == [[1]]


def test_a_checkpoint_that_was_never_complete_changes_nothing(run: Run) -> None:
    run.start(0)
    run.finish(0, 0)
    run.take(0)
    run.start(1)
    run.save(killed=True)
    run.finish(1, 0)
    run.go_on()
    run.save()  # at the same step once more, and this time it is complete
    run.finish(1, 1)
    run.go_on()


actions = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_any_run_is_resumed_in_the_state_that_it_was_in(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    run = Run(directory)
    started = 0
    for action, which in actions:
        groups = list(run.groups)
        match action:
            case 0 | 1:
                run.start(started)
                started += 1
            case 2 | 3 if groups:
                group = groups[which % len(groups)]
                run.finish(group, len(run.groups[group].episodes))
            case 4 if groups:
                run.take(groups[which % len(groups)])
            case 5 if run.version > run.checkpoint:
                run.save(killed=which == 0)
            case 6:
                run.go_on()
            case _:
                pass
    run.go_on()
    run.file.close()
    shutil.rmtree(directory)


def test_cut_off_anywhere_a_beginning_of_the_run_is_left(run: Run) -> None:
    """What a run that was resumed from a shorter file goes on with is what it had at that moment."""
    moments = [run.wanted()]
    ends = [size(run)]
    for verb in (
        lambda: run.start(0),
        lambda: run.finish(0, 0),
        lambda: run.start(1),
        lambda: run.take(0),
        lambda: run.finish(1, 0),
    ):
        verb()
        moments.append(run.wanted())
        ends.append(size(run))
    whole = (run.directory / "episodes-00000.jsonl").read_bytes()
    draw = random.Random(0)
    for cut in [*ends, *(draw.randrange(ends[0], len(whole)) for _ in range(40))]:
        (run.directory / "episodes-00000.jsonl").write_bytes(whole[:cut])
        assert read_history(run.directory, 0) == moments[sum(end <= cut for end in ends) - 1]


def size(run: Run) -> int:
    return (run.directory / "episodes-00000.jsonl").stat().st_size


def test_a_segment_that_was_cut_off_in_its_first_line_is_made_anew(run: Run) -> None:
    run.start(0)
    run.save(killed=True)
    run.file.close()
    (run.directory / "episodes-00001.jsonl").write_bytes(b'{"kind":"segm')
    assert read_history(run.directory, 0) == run.wanted()
    run.file = EpisodeFile(run.directory, 0, tuple(run.groups.values()))
    assert run.segments() == ["episodes-00000.jsonl"]
    run.save()
    run.go_on()


HEAD = sealed(b'{"kind":"segment","step":0,"groups":[]}')
STARTED = sealed(b'{"kind":"started","group":0,"version":0}', HEAD)
STARTED_TWICE = sealed(b'{"kind":"started","group":0,"version":0}', STARTED)
TAKEN = b'{"kind":"taken","version":%d,"groups":%b}'
DAMAGES = [
    ([b"nonsense"], "2: .*the file is damaged"),
    (
        [STARTED.replace(b'"version":0', b'"version":1')],
        "2: the line does not match its checksum.*; the file is damaged",
    ),
    ([STARTED, STARTED], "3: the line does not match its checksum, or does not follow the line before; the file is"),
    ([STARTED_TWICE], "2: the line does not match its checksum, or does not follow the line before; the file is"),
    ([sealed(TAKEN % (2, b"[]"), HEAD)], "2: version 2 does not follow 0; the file is damaged"),
    ([sealed(TAKEN % (1, b"[3]"), HEAD)], "2: a batch of group 3, which was not started, or was trained on"),
    ([STARTED, STARTED_TWICE], "3: group 0 was started before"),
]


@pytest.mark.parametrize(("lines", "message"), DAMAGES)
def test_what_cannot_have_happened_is_refused_by_file_and_line(
    lines: list[bytes], message: str, tmp_path: Path
) -> None:
    (tmp_path / "episodes-00000.jsonl").write_bytes(b"\n".join([HEAD, *lines, b""]))
    with pytest.raises(EpisodeFileError, match=rf"episodes-00000\.jsonl:{message}"):
        read_history(tmp_path, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda run: run.file.finished(5, 0, episode(5, 0)), "an episode of group 5, which was not started"),
        (lambda run: run.file.finished(0, 0, episode(0, 0)), "episode 0 of group 0 finished before"),
        (
            lambda run: run.file.finished(0, 1, episode(0, 1, version=1)),
            "g0-1 is of version 1, which no earlier step made",
        ),
    ],
)
def test_an_episode_that_cannot_be_is_refused(run: Run, wrong: object, message: str) -> None:
    run.start(0)
    run.finish(0, 0)
    wrong(run)  # type: ignore[operator]
    with pytest.raises(EpisodeFileError, match=message):
        read_history(run.directory, 0)


def test_a_file_that_does_not_begin_with_its_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "episodes-00000.jsonl").write_bytes(sealed(b'{"kind":"started","group":0,"version":0}') + b"\n")
    with pytest.raises(EpisodeFileError, match=r"episodes-00000\.jsonl:1: not the head of a segment"):
        read_history(tmp_path, 0)


def test_a_run_without_files_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFileError, match=r"no episodes-\*\.jsonl begins at step 50, that of its checkpoint"):
        read_history(tmp_path, 50)


def test_a_full_disk_loses_nothing_that_was_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start(0)
    run.finish(0, 0)

    def full(self: LineFile, line: bytes) -> None:
        raise DiskError(self.path, OSError(28, "No space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        with pytest.raises(DiskError, match=r"episodes-00000\.jsonl cannot be written \(No space left on device\)"):
            run.file.finished(0, 1, episode(0, 1))
    run.go_on()
