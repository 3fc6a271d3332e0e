"""What a run writes about itself can be read and gone on with, wherever it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.small_run import rows

from libra.exec.pool import Worker
from libra.exec.protocols import MoveOutcome
from libra.loop.recorder import Recorder
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role
from libra.records.causes import Cause
from libra.records.device_time import Phase
from libra.records.files import DiskError

LONG = Duty(Role.ROLLOUT, "long")
ANY = frozenset({Role.TRAIN, Role.ROLLOUT})


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, 0.0)
    yield made
    made.close()


def spans(directory: Path) -> list[dict[str, Any]]:
    """What the timeline shows as moves; the file is not finished yet."""
    events = json.loads((directory / "timeline.json").read_text() + "]")
    return [event["args"] for event in events if event["ph"] == "X" and "outcome" in event["args"]]


@pytest.mark.parametrize(
    ("moved", "kind", "text"),
    [
        (MoveOutcome(Move("w", TRAIN, LONG), 2.25, "done"), "role_change", "train -> rollout:long in 2.2 s"),
        (MoveOutcome(Move("w", LONG, LONG), 2.25, "done"), "role_change", "rollout:long again in 2.2 s"),
        (
            MoveOutcome(Move("w", TRAIN, LONG), 12.0, "undone", "out of memory"),
            "move_failed",
            "train -> rollout:long failed after 12.0 s, it is train again: out of memory",
        ),
        (
            MoveOutcome(Move("w", IDLE, LONG), 120.0, "failed", "no answer"),
            "move_failed",
            "idle -> rollout:long failed after 120.0 s, it does nothing: no answer",
        ),
    ],
)
def test_a_move_is_an_event_and_a_span(recorder: Recorder, moved: MoveOutcome, kind: str, text: str) -> None:
    recorder.moved(moved)
    [event] = rows(recorder.directory, "events")
    assert (event["kind"], event["worker"], event["text"]) == (kind, "w", text)
    assert spans(recorder.directory) == [
        {
            "worker": "w",
            "from": str(moved.move.before),
            "to": "rollout:long",
            "seconds": moved.seconds,
            "outcome": moved.outcome,
        }
    ]


def test_a_join_says_how_long_it_took_and_who_waited(recorder: Recorder) -> None:
    recorder.joined("w", 2.25, 0.0125)
    [event] = rows(recorder.directory, "events")
    assert (event["kind"], event["worker"], event["seconds"], event["held_seconds"]) == ("joined", "w", 2.25, 0.0125)
    assert event["text"] == "takes part in training 2.2 s after its start; a step waited 0.013 s for it"
    recorder.joined("w", 2.25, 0.0)
    assert rows(recorder.directory, "events")[1]["text"].endswith("; no step waited for it")


def test_the_timeline_has_a_lane_of_causes(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too short to be seen is not drawn, and counts all the same."""
    clock = recorder._started
    monkeypatch.setattr("libra.loop.recorder.time.monotonic", lambda: clock)
    recorder.meet([Worker("w", 0, ANY, Role.ROLLOUT, "long")])
    recorder.begin()
    recorder.phase(Phase.WAITING)
    for seconds, change in ((2.0, 1), (3.0, -1), (0.001, 1), (4.0, -1)):
        clock += seconds
        recorder.turns("w", change)
    clock += 1.0
    recorder.take_device_seconds(recorder.now())
    events = json.loads((recorder.directory / "timeline.json").read_text() + "]")
    [lane] = [event["pid"] for event in events if event["args"].get("name") == "where the time goes"]
    drawn = [(e["name"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == lane]
    assert drawn == [
        ("without work", 2_000_000),
        ("generating", 3_000_000),
        ("generating", 4_000_000),
        ("without work", 1_000_000),
    ]
    spent = recorder.device_seconds()["w"]
    assert spent == {Cause.GENERATING: pytest.approx(7.0), Cause.NO_WORK: pytest.approx(3.001)}


def test_a_loss_says_what_becomes_of_the_slot(recorder: Recorder) -> None:
    recorder.lost("w1", "signal 9", retired=False)
    recorder.lost("w0", "signal 9", retired=False)
    recorder.lost("w1", "signal 9", retired=True)
    assert [event["text"] for event in rows(recorder.directory, "events")] == [
        "signal 9; its slot is idle",
        "signal 9; its slot is idle",
        "signal 9; its slot lost too many workers within an hour and stays empty",
    ]
    assert list(recorder.lost_workers) == ["w1", "w0"]


def test_roles_are_named_by_what_a_worker_does(recorder: Recorder) -> None:
    for worker in (
        Worker("w0", 0, ANY, Role.ROLLOUT, "long"),
        Worker("w1", 1, ANY, Role.JOINING, "long"),
        Worker("w2", 2, ANY, Role.TRAIN),
    ):
        recorder.role(worker)
    assert recorder.roles == {"w0": "rollout:long", "w1": "joining", "w2": "train"}


def test_a_full_disk_names_the_file(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        closed = False

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    recorder.meet([Worker("w0", 0, ANY, Role.TRAIN)])  # whose time is drawn when the recorder closes
    monkeypatch.setattr("libra.loop.recorder._SPAN_SECONDS", 0.0)
    monkeypatch.setattr(recorder._timeline._trace, "_file", Full())
    with pytest.raises(DiskError, match=r"timeline\.json cannot be written \(No space left on device\)"):
        recorder.lost("w0", "signal 9", retired=False)
    with pytest.raises(DiskError, match=r"timeline\.json"):
        recorder.close()
    with pytest.raises(ValueError, match="closed file"):
        recorder._files["events"].append(b"{}")  # it was closed all the same
    assert rows(recorder.directory, "events")[0]["worker"] == "w0"
    monkeypatch.undo()
