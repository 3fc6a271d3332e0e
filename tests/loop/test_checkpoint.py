"""A checkpoint is there whole or not at all, the one before stays until it is, and a run goes on from it as it was."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pytest
from fakes.small_run import episode, rows

from libra.backends.protocols import Trainer
from libra.config.sealed_line import unsealed
from libra.config.yaml_file import ConfigError
from libra.exec.journal import JournalReplay
from libra.exec.pool import make_pool
from libra.exec.protocols import WorkerLostError
from libra.loop.checkpoint import (
    FORMAT,
    Recorded,
    RunState,
    allocation_in_force,
    can_be_resumed,
    cut_back,
    latest_checkpoint,
    missing_trajectories,
    save_checkpoint,
)
from libra.loop.recorder import Recorder
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import TRAIN, Duty, Role
from libra.records.files import DiskError
from libra.records.manifest import seal
from libra.records.schema import Evaluation, PeriodRecord, RecordFormatError, StepRecord

STATE = RunState(3, 12.5, {"seen": 7}, {"policy": "some"}, Evaluation("start", 0, 8, 0.25, 0.5, 2.0))


class Core:
    """Writes its weights, or does what the test says instead."""

    def __init__(self, instead: Callable[[Path], None] | None = None) -> None:
        self._instead = instead

    async def save(self, directory: Path, optimiser: bool) -> None:
        assert optimiser
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text("weights")
        if self._instead is not None:
            self._instead(directory)


def save(directory: Path, state: RunState = STATE, instead: Callable[[Path], None] | None = None) -> Path:
    return asyncio.run(save_checkpoint(directory, cast(Trainer, Core(instead)), state))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert latest_checkpoint(tmp_path) == (path, STATE)
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "checkpoint-4.part").mkdir()  # a controller was killed while it wrote this one
    (tmp_path / "checkpoint-5.damaged").mkdir()
    save(tmp_path, replace(STATE, step=9))
    save(tmp_path, replace(STATE, step=12))
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-9"]
    assert latest_checkpoint(tmp_path)[1].step == 12


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [cut_short, flip, Path.unlink, replace_by_link, replace_by_fifo]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    before, newest = save(tmp_path), save(tmp_path, replace(STATE, step=9))
    if (damage, name) == (replace_by_link, "manifest.json"):
        pytest.skip("the manifest itself may be elsewhere: it has a checksum")
    damage(newest / name)
    assert latest_checkpoint(tmp_path) == (before, STATE)
    damage(before / name)
    with pytest.raises(
        ConfigError, match=r"has no complete checkpoint \(.*checkpoint-9/.*\); start again with --overw"
    ):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint-999", "checkpoint-foo", "checkpoint-", "checkpoint-9999999999999999"])
def test_a_directory_of_that_name_hides_no_good_one(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == (path, STATE)
    assert can_be_resumed(tmp_path)


def test_a_checkpoint_that_is_not_of_its_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path).rename(tmp_path / "checkpoint-7")
    with pytest.raises(ConfigError, match="its state is of step 3"):
        latest_checkpoint(tmp_path)


def test_a_part_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-3.part")
    with pytest.raises(ConfigError, match="has no checkpoint to resume from; start again with --overwrite"):
        latest_checkpoint(tmp_path)


def full(directory: Path) -> None:
    raise DiskError(directory, OSError(28, "No space left on device"))


def gone(directory: Path) -> None:
    raise WorkerLostError("worker core-0 went away during SaveCheckpoint")


def no_place_for_the_state(directory: Path) -> None:
    (directory / "state.json").mkdir()


@pytest.mark.parametrize(
    ("instead", "error", "message"),
    [
        (full, DiskError, r"checkpoint-6\.part cannot be written \(No space left on device\): free some"),
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
    state.write_text(state.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    seal(state.parent)
    with pytest.raises(ConfigError, match=f"format 1, but this version of libra reads format {FORMAT}"):
        latest_checkpoint(tmp_path)


# --- what an interrupted run left --------------------------------------------------------------------------------


STEP = StepRecord(
    step=1, time=2.0, version=1, step_seconds=2.0, generate_seconds=1.0, train_seconds=1.0, exchange_seconds=0.0,
    publish_seconds=0.1, load_seconds=0.1, wait_seconds=0.5,
    checkpoint_seconds=0.0, held_seconds=0.0, redone_seconds=0.0, reward_mean=0.5, groups=1, groups_without_signal=0,
    trajectories=2, generated_tokens=5, trained_tokens=5, staleness_mean=0.0, staleness_max=0, staleness=(2,),
    behaviour_weight_mean=1.0, prox_gap_mean=0.0, clip_share=0.0, grad_norm=1.0, context_p50=1.0, context_p90=1.0,
    context_p99=1.0, turns_mean=1.0, predicted_seconds=None, allocation="", roles={}, device_seconds={},
)  # fmt: skip
PERIOD = PeriodRecord(0, 1, 2, "", 2.0, 2.0, "rollout", False)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, 0.0)
    yield made
    made.close()


def test_a_run_is_cut_back_to_the_last_step_that_will_not_be_made_again(recorder: Recorder) -> None:
    directory = recorder.directory
    for step in range(1, 5):
        recorder.step(replace(STEP, step=step, time=2.0 * step))
    recorder.period(PERIOD)
    recorder.period(replace(PERIOD, period=1, first_step=3, last_step=4))
    with open(directory / "events.jsonl", "a") as events:
        events.write('{"time": 1.0, "ki')  # the disk was full
    assert cut_back(directory, 3) == Recorded(step=3, time=6.0, periods=1)
    assert [row["step"] for row in rows(directory, "metrics")] == [1, 2, 3]
    assert [row["period"] for row in rows(directory, "periods")] == [0]
    assert rows(directory, "events") == []
    assert cut_back(directory, 0) == Recorded()


def test_torn_lines_are_left_out_and_told_of(recorder: Recorder) -> None:
    directory = recorder.directory
    for step in (1, 2):
        recorder.step(replace(STEP, step=step, time=2.0 * step))
    recorder.event("warning", None, "one")
    finished = [episode(0, index) for index in range(2)]
    recorder.episode(finished[0])
    torn = b'{"id": "g0\0\0\0\n' + b"\0\xff\n" + b'{"ste{"step": 1}\n'
    for name in ("metrics", "events", "trajectories"):
        path = directory / f"{name}.jsonl"
        path.write_bytes(torn + path.read_bytes())
    assert cut_back(directory, 2) == Recorded(
        2, 4.0, 0, tuple(f"{name}.jsonl: 3 torn lines are left out" for name in ("metrics", "events", "trajectories"))
    )
    assert [row["step"] for row in rows(directory, "metrics")] == [1, 2]
    assert [row["text"] for row in rows(directory, "events")] == ["one"]
    assert missing_trajectories(directory, finished) == finished[1:]
    assert cut_back(directory, 2) == Recorded(2, 4.0, 0)


@pytest.mark.parametrize("name", ["metrics", "periods", "events", "trajectories"])
def test_a_record_that_was_changed_is_refused_by_file_and_line(recorder: Recorder, name: str) -> None:
    for number in (1, 2, 3):
        recorder.step(replace(STEP, step=number, time=2.0 * number))
        recorder.period(replace(PERIOD, period=number))
        recorder.event("warning", None, f"number {number}")
        recorder.episode(episode(0, number))
    path = recorder.directory / f"{name}.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    changed = second[:20] + second[20:].replace(b"2", b"1")  # still a record, though another one
    assert changed != second and json.loads(changed)
    path.write_bytes(first + changed + third)
    with pytest.raises(RecordFormatError, match=rf"{name}\.jsonl:2: the line does not match its checksum; remove"):
        cut_back(recorder.directory, 3)
    assert path.read_bytes() == first + changed + third


def test_records_of_before_they_had_checksums_are_read(recorder: Recorder) -> None:
    recorder.step(STEP)
    recorder.episode(episode(0, 0))
    for name in ("metrics", "trajectories"):
        path = recorder.directory / f"{name}.jsonl"
        path.write_bytes(unsealed(path.read_bytes().rstrip()) + b"\n")
    assert cut_back(recorder.directory, STEP.step).step == STEP.step
    assert missing_trajectories(recorder.directory, [episode(0, 0)]) == []


def test_what_is_cut_back_is_on_disk_before_it_takes_its_name(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.step(STEP)
    synced = list[int]()
    monkeypatch.setattr("os.fsync", synced.append)
    cut_back(recorder.directory, 1)
    assert len(synced) == 3
    assert not any(recorder.directory.glob("*.part"))


def test_an_episode_that_finished_at_the_last_moment_is_written_once(recorder: Recorder) -> None:
    finished = [episode(0, index) for index in range(3)]
    for each in finished[:2]:
        recorder.episode(each)
    assert missing_trajectories(recorder.directory, finished) == finished[2:]


HOLDS = {"short": 40, "middle": 100, "long": 100}
WORKERS = make_pool(1, 1, 2).all()
SHORT, MIDDLE, LONG = (Duty(Role.ROLLOUT, shape) for shape in HOLDS)
FIRST = Allocation(1, (Bucket("short", 2, 0, 40), Bucket("long", 1, 40, 100)))
OTHER = Allocation(1, (Bucket("short", 2, 0, 30), Bucket("middle", 1, 30, 100)))


def left(*duties: Duty, plans: tuple[Allocation, ...] = (FIRST,)) -> JournalReplay:
    worked = {worker.id: duty for worker, duty in zip(WORKERS, (TRAIN, *duties), strict=False)}
    return JournalReplay(7, MappingProxyType({}), MappingProxyType({}), MappingProxyType(worked), plans)


def allocation(replicas: int, *buckets: tuple[str, int, int]) -> Allocation:
    made: list[Bucket] = []
    for shape, engines, up_to in buckets:
        made.append(Bucket(shape, engines, made[-1].up_to if made else 0, up_to))
    return Allocation(replicas, tuple(made))


CASES = [
    ("as it was", left(SHORT, SHORT, LONG), FIRST),
    ("a plan that was applied", left(TRAIN, SHORT, LONG), allocation(2, ("short", 1, 40), ("long", 1, 100))),
    (
        "in the middle of one: both kinds of engines for the longest contexts become one",
        left(SHORT, MIDDLE, LONG, plans=(OTHER, FIRST)),
        allocation(1, ("short", 1, 30), ("middle", 2, 100)),
    ),
    (
        "a slot that was lost in an earlier plan does what it did, and has a bucket again",
        left(SHORT, SHORT, LONG, plans=(allocation(1, ("short", 2, 100)),)),
        allocation(1, ("short", 2, 40), ("long", 1, 100)),
    ),
    ("nobody knows what all did", left(SHORT, SHORT), None),
    ("there are other shapes now", left(SHORT, SHORT, Duty(Role.ROLLOUT, "huge")), None),
    ("nobody holds the longest contexts now", left(SHORT, SHORT, SHORT), None),
]


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_lent_engines_are_as_many_as_there_are_lenders_whoever_was_away(joined: int) -> None:
    pool, lent = make_pool(1, 1, 2, lent=2, lent_shape="lent").all(), Duty(Role.ROLLOUT, "lent")
    with_lent = allocation(1, ("short", 2, 20), ("lent", 2, 40), ("long", 1, 100))
    without = allocation(1, ("short", 2, 20), ("long", 1, 100))
    duties = (TRAIN, SHORT, SHORT, LONG, *joined * (lent,))
    worked = {worker.id: duty for worker, duty in zip(pool, duties, strict=False)}
    plan = with_lent if joined else without
    before = JournalReplay(7, MappingProxyType({}), MappingProxyType({}), MappingProxyType(worked), (plan,))
    assert allocation_in_force(before, pool, {**HOLDS, "lent": 40}) == plan


@pytest.mark.parametrize(("before", "wanted"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_the_allocation_in_force(before: JournalReplay, wanted: Allocation | None) -> None:
    assert allocation_in_force(before, WORKERS, HOLDS) == wanted
