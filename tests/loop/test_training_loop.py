"""A run that is killed anywhere goes on where it was: no trajectory is lost, none is trained on twice."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.sessions import (
    CHECKPOINT_EVERY,
    PER_STEP,
    SIZE,
    STALENESS,
    STEPS,
    MadePeriods,
    Session,
    sit,
    sit_until_killed,
)
from fakes.small_run import rows

from libra.backends.grpo.membership import CoreLostError
from libra.config.yaml_file import ConfigError
from libra.exec.journal import read_journal
from libra.loop.checkpoint import latest_checkpoint, read_interrupted
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.episode_file import History
from libra.loop.rollout import Rollout
from libra.loop.training_loop import TrainingLoop
from libra.records.causes import Cause
from libra.records.files import DiskError
from libra.records.schema import StepRecord, read_records
from libra.trajectory.log_file import read_trajectories

EVERYBODY = sorted(f"g{group}-{index}" for group in range(STEPS * PER_STEP) for index in range(SIZE))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No threads and no disk: the order of events is the same each time."""

    async def here(verb: Callable[..., Any], *arguments: Any) -> Any:
        return verb(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield


def require_whole(directory: Path, last: Session) -> None:
    """The run is over, and its files tell of every trajectory once."""
    assert last.training.step == STEPS
    assert last.groups.started * SIZE == len(EVERYBODY)
    assert sorted(t.id for t in read_trajectories(directory / "trajectories.jsonl")) == EVERYBODY
    assert sorted(last.observations.tracker.seen) == EVERYBODY  # the statistics have seen each once
    trained = [sample for batch in last.core.trained for sample in batch]
    assert len(set(trained)) == len(trained)  # those of groups without signal are not sent
    steps = list(read_records(StepRecord, directory / "metrics.jsonl"))
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert all(0 <= step.staleness_max <= STALENESS for step in steps)
    assert all(step.trajectories == PER_STEP * SIZE for step in steps)
    list(read_journal(directory / "journal.jsonl"))


def test_a_run_that_is_not_disturbed(tmp_path: Path) -> None:
    session = sit(tmp_path, resume=False, seed=1)
    require_whole(tmp_path, session)
    shown = [int(step) for step in re.findall(rf" step (\d+)/{STEPS} ", session.shown.getvalue())]
    assert shown[-STEPS:] == list(range(1, STEPS + 1))
    assert latest_checkpoint(tmp_path)[1].step == STEPS - STEPS % 2


@pytest.mark.parametrize("seed", range(25))
def test_killed_anywhere_and_resumed(tmp_path: Path, seed: int) -> None:
    """As often as it takes, each time somewhere else. Before its first checkpoint a run begins again from nothing."""
    chance = random.Random(seed)
    directory = tmp_path / "0"
    directory.mkdir()
    kills, resume = 0, False
    while sit_until_killed(directory, tmp_path / str(kills + 1), resume, seed + kills, chance.randrange(60)):
        kills += 1
        resume = any((tmp_path / str(kills)).glob("checkpoint-*[0-9]/state.json"))
        directory = tmp_path / str(kills)
        if not resume:
            directory = tmp_path / f"{kills} again"
            directory.mkdir()
    resume = any(directory.glob("checkpoint-*[0-9]/state.json"))
    require_whole(directory, sit(directory, resume, seed))
    assert kills


def test_steps_that_are_replayed_are_made_of_the_same_trajectories(tmp_path: Path) -> None:
    """Killed with as many steps after the checkpoint as there can be, and with groups half finished."""
    for rounds in range(40, 400):
        run, left = tmp_path / f"run-{rounds}", tmp_path / f"left-{rounds}"
        run.mkdir()
        assert sit_until_killed(run, left, False, 7, rounds)
        steps = [step.step for step in read_records(StepRecord, left / "metrics.jsonl")]
        if any(left.glob("checkpoint-2/state.json")) and steps[-1:] == [3]:
            break
    metrics = (left / "metrics.jsonl").read_text()
    sampled = [t.id for t in read_trajectories(left / "trajectories.jsonl")]
    session = sit(left, resume=True, seed=8)
    require_whole(left, session)
    assert (left / "metrics.jsonl").read_text().startswith(metrics)  # what was measured stays
    after = [t.id for t in read_trajectories(left / "trajectories.jsonl")]
    assert after[: len(sampled)] == sampled  # nothing that had finished was generated again
    [resumed] = [event["text"] for event in rows(left, "events") if event["kind"] == "resumed"]
    assert resumed.startswith("replayed steps 3 to ")


def test_a_core_trainer_that_is_lost_between_two_steps_ends_the_run(tmp_path: Path) -> None:
    session = Session(tmp_path, resume=False, seed=1)
    session.core.lost = True
    with pytest.raises(CoreLostError, match="core trainer core-0 is gone"):
        asyncio.run(session.training.run())
    session.close()


def test_a_failure_while_a_checkpoint_is_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for progress then, and nothing else may come that would wake who waits later."""
    session = Session(tmp_path, resume=False, seed=1)

    async def hanging(rollout: Rollout, *_: Any) -> Episode:
        return await asyncio.get_running_loop().create_future()

    async def next_step(training: TrainingLoop) -> None:
        training.groups._failure = RuntimeError("an episode broke")
        training.groups.progress.set()
        await asyncio.wait_for(training._one_step(0.0), 2.0)

    monkeypatch.setattr(Rollout, "episode", hanging)
    with pytest.raises(RuntimeError, match="an episode broke"):
        asyncio.run(next_step(session.training))
    session.close()


def test_a_checkpoint_that_has_to_wait_is_held_up_and_not_yet_written(tmp_path: Path) -> None:
    session = Session(tmp_path, resume=False, seed=1)
    training, trainers = session.training, session.training.trainers
    held: list[asyncio.Task[None]] = []

    async def hold() -> None:
        async with trainers.boundary:
            await asyncio.sleep(0.1)

    async def between() -> None:
        if not held:
            held.append(asyncio.create_task(hold()))  # as a joiner that is at the boundary after the first step
            await asyncio.sleep(0)
        await training._checkpoint()

    training._between_steps = between  # type: ignore[method-assign]
    asyncio.run(training.run())
    session.close()
    first, second, third, *_ = read_records(StepRecord, tmp_path / "metrics.jsonl")
    assert first.held_seconds == third.held_seconds == 0.0
    assert 0.1 <= second.held_seconds < second.step_seconds
    assert second.checkpoint_seconds <= second.step_seconds - second.held_seconds
    assert second.wait_seconds >= 0.0
    assert second.device_seconds["core-0"][Cause.BOUNDARY] == pytest.approx(second.held_seconds, abs=0.01)
    assert second.device_seconds["core-0"][Cause.CHECKPOINTING] <= second.checkpoint_seconds + 0.01
    event = next(row for row in rows(tmp_path, "events") if row["kind"] == "checkpoint")
    assert event["seconds"] == second.checkpoint_seconds


def test_no_checkpoint_is_written_once_an_episode_could_not_be(tmp_path: Path) -> None:
    """The disk is full for one moment, in which a checkpoint waits for the step boundary."""
    session = Session(tmp_path, resume=False, seed=1)
    training, trainers = session.training, session.training.trainers
    holding: list[asyncio.Task[None]] = []

    async def hold() -> None:
        refused, write = asyncio.Event(), session.recorder.episode

        def refuse(episode: Episode) -> None:
            session.recorder.episode = write  # type: ignore[method-assign]
            refused.set()
            raise DiskError(tmp_path / "trajectories.jsonl", OSError(28, "No space left on device"))

        async with trainers.boundary:
            session.recorder.episode = refuse  # type: ignore[method-assign]
            await refused.wait()

    between = training._between_steps

    async def beside_a_joiner() -> None:
        if training.step == 2 * CHECKPOINT_EVERY:
            holding.append(asyncio.create_task(hold()))
            await asyncio.sleep(0)
        await between()

    training._between_steps = beside_a_joiner  # type: ignore[method-assign]
    with pytest.raises(DiskError, match="No space left"):
        asyncio.run(training.run())
    session.close()
    require_whole(tmp_path, sit(tmp_path, resume=True, seed=2))


def test_a_loss_before_the_first_step_is_steered_around_before_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path, resume=False, seed=1)
    controller = session.training.controller

    def mended() -> None:
        assert session.training.step == 0
        raise RuntimeError("steered")

    monkeypatch.setattr(controller, "urgent", True)
    monkeypatch.setattr(controller, "at_boundary", mended)

    async def hanging(rollout: Rollout, *_: Any) -> Episode:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Rollout, "episode", hanging)
    with pytest.raises(RuntimeError, match="steered"):
        asyncio.run(asyncio.wait_for(session.training.run(), 20.0))
    session.close()


def test_what_was_generated_before_is_not_of_a_step_that_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path, resume=False, seed=1)
    monkeypatch.setattr(Rollout, "generated_tokens", 1000)  # by the check before the first step

    async def look(training: TrainingLoop) -> None:
        assert training._generated == 1000
        assert list(training.observations.counters._seen) == [1]
        raise RuntimeError("looked")

    monkeypatch.setattr(TrainingLoop, "_replay_steps", look)
    with pytest.raises(RuntimeError, match="looked"):
        asyncio.run(session.training.run())
    session.close()


def killed_with_an_older_group(directory: Path) -> tuple[Path, History]:
    """What a session left that was killed while it had a group from before the last version."""
    for rounds in range(40, 400):
        run, left = directory / f"run-{rounds}", directory / f"left-{rounds}"
        run.mkdir()
        sit_until_killed(run, left, False, 3, rounds)
        if any(left.glob("checkpoint-*[0-9]/state.json")):
            history = read_interrupted(left).history
            if any(group.started_at < history.version for group in history.groups):
                return left, history
    raise AssertionError("no session was killed with such a group")


def test_groups_that_can_no_more_be_trained_on_in_time_are_refused(tmp_path: Path) -> None:
    """As with a file that allows less staleness than the one that the run was started with."""
    left, _ = killed_with_an_older_group(tmp_path)
    session = Session(left, resume=True, seed=1)
    session.training.groups._admission.max_staleness = 0
    with pytest.raises(ConfigError, match="resume with the file that the run was started with"):
        asyncio.run(session.training.run())
    session.close()


def test_a_group_is_due_when_its_staleness_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was under way when its run was interrupted."""
    left, history = killed_with_an_older_group(tmp_path)
    steps_until_due: dict[str, int] = {}
    episode = Rollout.episode

    started_at = {f"g{group.number}": group.started_at for group in history.groups}

    async def noted(rollout: Rollout, asked: EpisodeRequest) -> Episode:
        group = asked.id.split("-")[0]
        steps_until_due[group] = round((asked.due - rollout._now()) / 1000)
        assert asked.version == started_at.get(group, asked.version)  # which no older weights may make
        return await episode(rollout, asked)

    monkeypatch.setattr(MadePeriods, "predicted_seconds", 1000.0)
    monkeypatch.setattr(Rollout, "episode", noted)
    sit(left, resume=True, seed=1)
    for group in history.groups:
        if len(group.episodes) < SIZE:
            used = history.version - group.started_at
            assert steps_until_due.pop(f"g{group.number}") == 1 + STALENESS - used
    assert set(steps_until_due.values()) == {1 + STALENESS}


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from fakes.sessions import Session
from libra.records.files import DiskError

directory, room = Path(sys.argv[1]), int(sys.argv[2])

async def run(session):
    task = asyncio.create_task(session.training.run())
    while not task.done() and not any(directory.glob("checkpoint-*[0-9]/state.json")):
        await asyncio.sleep(0)
    size = (directory / sys.argv[3]).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
    await task

try:
    asyncio.run(run(Session(directory, resume=False, seed=5)))
except DiskError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("room", "grown"),
    [(0, "trajectories"), (1500, "trajectories"), (0, "metrics"), (0, "journal")],
)
def test_a_full_disk_ends_the_run_and_costs_nothing_that_it_had(tmp_path: Path, room: int, grown: str) -> None:
    """A limit on the size of files, a little more than what one of them has, stands in for a full disk."""
    said = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(room), f"{grown}.jsonl"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(str(tmp_path)) and "cannot be written (File too large): raise the limit" in said, said
    assert not any(tmp_path.glob("*.part"))
    require_whole(tmp_path, sit(tmp_path, resume=True, seed=6))
