"""A checkpoint is there whole or not at all, and the one before stays until it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from libra.backends.grpo.trainers import Trainers
from libra.backends.transport.messages import Acknowledged, Message
from libra.backends.transport.trainer_messages import SaveCheckpoint
from libra.config.yaml_file import ConfigError
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.loop.checkpoint import RunState, latest_checkpoint, save_checkpoint
from libra.records.files import DiskError
from libra.records.schema import Evaluation

STATE = RunState(3, 12.5, {"seen": 7}, {"policy": "some"}, Evaluation("start", 0, 8, 0.25, 0.5, 2.0))


class Core:
    """Writes its weights, or does what the test says instead."""

    def __init__(self, instead: Callable[[Path], None] | None = None) -> None:
        self._instead = instead

    async def ask_core(self, message: Message, reply: type[Message]) -> Message:
        assert isinstance(message, SaveCheckpoint) and message.optimiser
        directory = Path(message.directory)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text("weights")
        if self._instead is not None:
            self._instead(directory)
        return Acknowledged()


def save(directory: Path, state: RunState = STATE, instead: Callable[[Path], None] | None = None) -> Path:
    return asyncio.run(save_checkpoint(directory, cast(Trainers, Core(instead)), state))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert latest_checkpoint(tmp_path) == (path, STATE)
    assert names(path) == ["model.safetensors", "state.json"]


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "checkpoint-4.part").mkdir()  # a controller was killed while it wrote this one
    save(tmp_path, replace(STATE, step=12))
    assert names(tmp_path) == ["checkpoint-12"]
    assert latest_checkpoint(tmp_path)[1].step == 12


def test_a_part_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-3.part")
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from; start again with --overwrite"):
        latest_checkpoint(tmp_path)


def full(directory: Path) -> None:
    raise WorkerFailedError("worker core-0: SafetensorError: No space left on device")


def gone(directory: Path) -> None:
    raise WorkerLostError("worker core-0 went away during SaveCheckpoint")


def no_place_for_the_state(directory: Path) -> None:
    (directory / "state.json").mkdir()


@pytest.mark.parametrize(
    ("instead", "error", "message"),
    [
        (full, DiskError, r"checkpoint-6\.part cannot be written \(worker core-0: .*No space left.*\): free some"),
        (gone, WorkerLostError, "went away"),
        (no_place_for_the_state, DiskError, r"checkpoint-6\.part/state\.json cannot be written \(Is a directory\)"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, instead: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    save(tmp_path)
    with pytest.raises(error, match=message):
        save(tmp_path, replace(STATE, step=6), instead)
    assert names(tmp_path) == ["checkpoint-3"]
    assert latest_checkpoint(tmp_path)[1] == STATE


def test_another_format_is_refused(tmp_path: Path) -> None:
    state = save(tmp_path) / "state.json"
    state.write_text(state.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(ConfigError, match="is of another format; start again with --overwrite"):
        latest_checkpoint(tmp_path)
