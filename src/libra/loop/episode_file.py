"""Finished episodes on disk, and the step that trained on each, for resuming a run.

Invariant: the files record, in order, the start version of each group, the tokens, log-probs and versions of each
finished episode, and the groups of each batch. The run writes an episode before it counts it, and a batch before it
trains on it. A resumed run starts from a checkpoint and takes the later batches again, from the same episodes in the
same order; the remaining groups are in flight as before. A batch earlier in the file makes each version that an episode
has.

Every line goes to the operating system at once, so it survives a crash of the controller. `sync`, once per step and off
the event loop, makes it survive a crash of the machine. Each line of a file has a checksum that includes the previous
line. Every checkpoint begins a new segment. When the checkpoint is complete, the segments that neither this checkpoint
nor the previous one needs are deleted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from libra.config.sealed_line import unsealed
from libra.loop.episode import Episode
from libra.records.files import ChainedFile, LineFile, drop_partial_line, whole_lines

_NAME = "episodes-{:05d}.jsonl"
_PATTERN = "episodes-*.jsonl"
_NUMBERED = re.compile(r"episodes-(\d{5,9})\.jsonl")


class EpisodeFileError(ValueError):
    """A history of episodes that cannot be resumed. The message names file and line."""


class _Line(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class _Segment(_Line, frozen=True, tag="segment"):
    """The first line of a file: the steps made before it, and the groups in flight with their start versions."""

    step: int
    groups: tuple[tuple[int, int], ...]


class _Started(_Line, frozen=True, tag="started"):
    group: int
    version: int


class _Finished(_Line, frozen=True, tag="finished"):
    group: int
    index: int  # in the group
    episode: Episode


class _Taken(_Line, frozen=True, tag="taken"):
    version: int  # of the weights that the batch makes
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """The finished episodes of one prompt, in the order in which they finished. Keys are indices in the group."""

    number: int
    started_at: int  # version
    episodes: Mapping[int, Episode]


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """The groups that version `version` was trained on, oldest first."""

    version: int
    groups: tuple[EpisodeGroup, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Batches and episodes after the checkpoint of `step`. Lines that were not yet on disk at a crash are missing."""

    step: int
    batches: tuple[TakenBatch, ...] = ()  # in the order of their versions
    groups: tuple[EpisodeGroup, ...] = ()  # in progress at the end, oldest first
    finished: tuple[Episode, ...] = ()  # after the checkpoint, in order; they are in `batches` or `groups`

    @property
    def version(self) -> int:
        """The weight version that the last batch makes."""
        return self.step + len(self.batches)


class EpisodeFile:
    """Writes the files. Methods raise `DiskError` if a write fails."""

    def __init__(self, directory: Path, step: int, groups: Sequence[EpisodeGroup]) -> None:
        """Continue the last file of the directory, or begin the first; `groups` are in flight."""
        self._directory = directory
        segments = _segments(directory)
        if segments and _is_empty(self._path(segments[-1])):  # a crash came before its first line was whole
            self._path(segments.pop()).unlink()
        first, self._number = (segments[0], segments[-1]) if segments else (0, 0)
        self._started_in = {group.number: (group.started_at, first) for group in groups}
        self._needed = first  # the oldest segment that the newest checkpoint needs
        self._needed_before = first  # the oldest segment that the previous checkpoint needs
        self._unsynced: list[ChainedFile] = []
        self._file = ChainedFile(self._path(self._number))
        if not segments:
            self._append(_Segment(step, ()))

    def started(self, group: int, version: int) -> None:
        """Record that a group starts while engines hold `version`."""
        self._started_in[group] = (version, self._number)
        self._append(_Started(group, version))

    def finished(self, group: int, index: int, episode: Episode) -> None:
        self._append(_Finished(group, index, episode))

    def taken(self, version: int, groups: Sequence[int]) -> None:
        """Record that the batch for `version` takes these groups."""
        self._append(_Taken(version, tuple(groups)))
        for group in groups:
            del self._started_in[group]

    def begin_segment(self, step: int) -> None:
        """Begin a segment for a checkpoint of `step`, later than any complete one. The checkpoint covers everything
        written before the segment, and nothing in it."""
        number = self._number + 1
        file = ChainedFile(self._path(number))
        try:  # a segment without a head must get no further lines
            file.append(msgspec.json.encode(_Segment(step, self._under_way())))
        except BaseException:
            file.close()
            raise
        self._unsynced.append(self._file)
        self._file, self._number = file, number
        self._needed = min([number, *(segment for _, segment in self._started_in.values())])

    def forget_older(self) -> None:
        """Delete the segments that neither the current checkpoint nor the previous one needs. Call it when the
        checkpoint of this segment is complete."""
        for number in _segments(self._directory):
            if number < self._needed_before:
                self._path(number).unlink()
        self._needed_before = self._needed

    async def sync(self) -> None:
        """Force all lines written so far to disk."""
        older, self._unsynced = self._unsynced, []
        await asyncio.to_thread(_sync, [*older, self._file])
        for file in older:
            file.close()

    def close(self) -> None:
        for file in (*self._unsynced, self._file):
            file.close()

    def _under_way(self) -> tuple[tuple[int, int], ...]:
        return tuple((group, version) for group, (version, _) in self._started_in.items())

    def _append(self, line: _Line) -> None:
        self._file.append(msgspec.json.encode(line))

    def _path(self, number: int) -> Path:
        return self._directory / _NAME.format(number)


def read_history(directory: Path, step: int) -> History:
    """Read the history of a run after its checkpoint of `step`. Raises `EpisodeFileError`."""
    segments = _segments(directory)
    heads = {number: head for number in segments if (head := _head(directory / _NAME.format(number))) is not None}
    own = [number for number, head in heads.items() if head.step == step]
    if not own:
        raise EpisodeFileError(
            f"{directory}: no {_PATTERN} begins at step {step}, that of its checkpoint; start again with --overwrite"
        )
    begins = own[-1]  # several segments of a step mean that the earlier checkpoints of this step failed
    fold = _Fold(step, heads[begins].groups)
    for number in segments:
        path = directory / _NAME.format(number)
        for line_number, line in _read(path):
            try:
                if number < begins:
                    fold.before_checkpoint(line)
                else:
                    fold.after_checkpoint(line)
            except ValueError as error:
                raise EpisodeFileError(
                    f"{path}:{line_number}: {error}; the file is damaged, start again with --overwrite"
                ) from None
    return fold.history()


class _Fold:
    """Accumulates the history, line by line."""

    def __init__(self, step: int, groups: Sequence[tuple[int, int]]) -> None:
        self._step = step
        self._started = dict(groups)  # group -> version
        self._episodes: dict[int, dict[int, Episode]] = {group: {} for group in self._started}
        self._batches: list[TakenBatch] = []
        self._finished: list[Episode] = []

    def before_checkpoint(self, line: _Line) -> None:
        """Add an episode of a group in flight at the checkpoint. Other groups were trained on before it."""
        if isinstance(line, _Finished) and line.group in self._started:
            self._add(line)

    def after_checkpoint(self, line: _Line) -> None:
        match line:
            case _Started():
                if line.group in self._started:
                    raise ValueError(f"group {line.group} was started before")
                self._started[line.group] = line.version
                self._episodes[line.group] = {}
            case _Finished():
                self._add(line)
                self._finished.append(line.episode)
                newest = max(line.episode.versions)
                if newest > self._version:
                    raise ValueError(f"{line.episode.trajectory.id} is of version {newest}, which no earlier step made")
            case _Taken():
                if line.version != self._version + 1:
                    raise ValueError(f"version {line.version} does not follow {self._version}")
                self._batches.append(TakenBatch(line.version, tuple(self._take(group) for group in line.groups)))
            case _:
                pass  # the head of a segment repeats known facts

    def history(self) -> History:
        under_way = tuple(self._take(group) for group in list(self._started))
        return History(self._step, tuple(self._batches), under_way, tuple(self._finished))

    @property
    def _version(self) -> int:
        return self._step + len(self._batches)

    def _add(self, line: _Finished) -> None:
        if line.group not in self._started:
            raise ValueError(f"an episode of group {line.group}, which was not started, or was trained on before")
        if line.index in self._episodes[line.group]:
            raise ValueError(f"episode {line.index} of group {line.group} finished before")
        self._episodes[line.group][line.index] = line.episode

    def _take(self, group: int) -> EpisodeGroup:
        if group not in self._started:
            raise ValueError(f"a batch of group {group}, which was not started, or was trained on before")
        return EpisodeGroup(group, self._started.pop(group), self._episodes.pop(group))


def _sync(files: Sequence[LineFile]) -> None:
    for file in files:
        file.sync()


def _is_empty(path: Path) -> bool:
    drop_partial_line(path)
    return path.stat().st_size == 0


def _segments(directory: Path) -> list[int]:
    return sorted(int(found[1]) for path in directory.iterdir() if (found := _NUMBERED.fullmatch(path.name)))


def _head(path: Path) -> _Segment | None:
    """The first line of a segment; None if the run was killed before the line was whole."""
    for _, line in _read(path):
        if not isinstance(line, _Segment):
            raise EpisodeFileError(f"{path}:1: not the head of a segment; the file is damaged")
        return line
    return None


_decoder = msgspec.json.Decoder(_Segment | _Started | _Finished | _Taken)


def _read(path: Path) -> Iterator[tuple[int, _Line]]:
    try:
        lines = whole_lines(path)
    except OSError as error:
        raise EpisodeFileError(f"{path}: {error.strerror}; start again with --overwrite") from None
    for number, (before, text) in enumerate(pairwise([b"", *lines]), start=1):
        try:
            yield number, _decoder.decode(unsealed(text, before))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise EpisodeFileError(
                f"{path}:{number}: {error}; the file is damaged, start again with --overwrite"
            ) from None
