"""What a soak says of a run's files: nothing where all is well, and something wherever one thing is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.accounts import accounts
from tests.oracles.run_accounts import Sizes
from tests.oracles.run_files import Row, Segments, Tail

SIZES = Sizes(steps=4, groups=2, samples=2, staleness=1)
IDLE, TRAIN = {"role": "idle", "shape": None}, {"role": "train", "shape": None}
Rows = dict[str, list[Row]]


def episode(group: int, index: int, version: int) -> Row:
    id, reward = f"g{group}-{index}", float(index)
    generated = 2 + group
    turns = [
        {"generated_tokens": 1, "tool": "t", "status": ("ok", "error", "timeout")[group % 3]},
        {"generated_tokens": 1, "tool": None, "status": None},
    ]
    return {
        "trajectory": {"id": id, "reward": reward, "turns": turns},
        "tokens": [1] * (1 + generated),
        "generated": [False] + [True] * generated,
        "logprobs": [0.0] + [-1.0] * generated,
        "versions": [-1] + [version] * generated,
        "reward": reward,
    }


def made_run() -> Rows:
    """Four steps in two sessions; the second begins at the checkpoint of step 2 and makes step 3 again."""
    segments: dict[str, list[Row]] = {"episodes-00000": [{"kind": "segment", "step": 0, "groups": []}]}
    signal = {"groups": SIZES.groups, "groups_without_signal": 0}
    out, metrics, trajectories = segments["episodes-00000"], [], []
    for step in range(1, SIZES.steps + 1):
        for group in (2 * step - 2, 2 * step - 1):
            out.append({"kind": "started", "group": group, "version": step - 1})
            for index in range(SIZES.samples):
                made = episode(group, index, step - 1)
                out.append({"kind": "finished", "group": group, "index": index, "episode": made})
                trajectories.append(dict(made["trajectory"]))
        out.append({"kind": "taken", "version": step, "groups": [2 * step - 2, 2 * step - 1]})
        tokens = sum(len(row["episode"]["tokens"]) for row in out[-7:] if row["kind"] == "finished")
        metrics.append({"step": step, "trained_tokens": tokens, "reward_mean": 0.5, **signal})
        if step == 2:
            out = segments["episodes-00001"] = [{"kind": "segment", "step": 2, "groups": []}]
    total = SIZES.steps * SIZES.groups * SIZES.samples
    join: list[Row] = [
        {"kind": "plan", "wanted": {}, "before": None},
        {"kind": "intend", "worker": "core-0", "before": IDLE, "after": TRAIN},
        {"kind": "worker", "worker": "core-0", "pid": 7},
        {"kind": "done", "worker": "core-0", "seconds": 1.0},
        {"kind": "applied"},
    ]
    steps = [{"kind": "step", "version": step} for step in range(SIZES.steps + 1)]
    journal = [
        {"kind": "start", "version": 0},
        *join,
        *steps[1:3],
        {"kind": "checkpoint", "step": 2},
        {"kind": "lost", "worker": "core-0", "why": "gone", "retired": False},
        *join[:3],
        {"kind": "failed", "worker": "core-0", "seconds": 1.0, "why": "gone", "retired": False},
        {"kind": "dropped", "why": "core-0"},
        *join,
        steps[3],
        join[0],
        {"kind": "start", "version": 2},
        *join,
        *steps[3:],
        {"kind": "end", "step": 4},
    ]
    summary = {
        "finished": True,
        "steps": SIZES.steps,
        "trajectories_started": total,
        "trajectories_trained": total,
        "trajectories_unfinished": 0,
    }
    return {**segments, "metrics": metrics, "trajectories": trajectories, "journal": journal, "summary": [summary]}


def wrong(directory: Path, rows: Rows, sizes: Sizes = SIZES) -> set[str]:
    """The names of the checks that do not hold, by their first words."""
    run, kept = directory / "run", directory / "kept"
    run.mkdir()
    for name, lines in rows.items():
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.jsonl").rename(run / "summary.json")
    for name in ("timeline", "profile", "config"):
        (run / f"{name}.json").write_text("{}")
    (run / "report.html").write_text("<svg>")
    Segments(run, kept).look()
    return {check.metric for check in accounts(run, kept, sizes) if not check.met}


ONCE = "every trajectory is started, finished and trained once"
STEPS = "the run made the steps of its configuration"
TRAINED = "each step trained on its trajectories"
RECORDED = "trajectories.jsonl has each finished trajectory once"
VERSIONS = "tokens are of versions between the start of their group and its step"
JOURNAL = "the journal is consistent"


def drop(name: str, **wanted: Any) -> Callable[[Rows], None]:
    """Leave out the first row that has these values."""

    def change(rows: Rows) -> None:
        rows[name].remove(find(rows[name], wanted))

    return change


def repeat(name: str, **wanted: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[name].append(find(rows[name], wanted))

    return change


def put(name: str, key: str, value: Any, **wanted: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        find(rows[name], wanted)[key] = value

    return change


def find(rows: list[Row], wanted: Row) -> Row:
    return next(row for row in rows if wanted.items() <= row.items())


FIRST, SECOND = "episodes-00000", "episodes-00001"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows: None, set()),
        (repeat(SECOND, kind="finished", group=4, index=0), {ONCE}),
        (drop(SECOND, kind="finished", group=4, index=1), {ONCE, TRAINED, RECORDED}),
        (repeat(FIRST, kind="started", group=3), {ONCE}),
        (put(FIRST, "groups", [0, 0], kind="taken", version=1), {ONCE, TRAINED}),
        (put(SECOND, "groups", [1, 5], kind="taken", version=3), {ONCE}),
        (put(SECOND, "groups", [4], kind="taken", version=3), {ONCE, TRAINED}),
        (drop(SECOND, kind="taken", version=4), {ONCE, TRAINED}),
        (put(SECOND, "version", 3, kind="taken", version=4), {ONCE, TRAINED, VERSIONS}),
        (put(SECOND, "version", 0, kind="started", group=6), {ONCE}),
        (lambda rows: rows[FIRST].clear(), {ONCE, TRAINED, RECORDED}),
        (lambda rows: rows[SECOND][2]["episode"].update(versions=[-1] + [3] * 6), {VERSIONS}),
        (lambda rows: rows[SECOND][2]["episode"].update(versions=[-1, 2]), {VERSIONS}),
        (lambda rows: rows[SECOND][2]["episode"].update(tokens=[1, 2, 3, 4]), {VERSIONS}),
        (put("metrics", "trained_tokens", 9, step=2), {TRAINED}),
        (put("metrics", "trained_tokens", 99, step=2), {TRAINED}),
        (put("metrics", "groups", 3, step=2), {TRAINED}),
        (put("metrics", "groups_without_signal", 1, step=2), {TRAINED}),
        (put("metrics", "reward_mean", 0.25, step=2), {TRAINED}),
        (drop("metrics", step=2), {STEPS}),
        (repeat("metrics", step=2), {STEPS}),
        (put("summary", "trajectories_unfinished", 1, finished=True), {STEPS}),
        (repeat("trajectories", id="g3-1"), {RECORDED}),
        (drop("trajectories", id="g3-1"), {RECORDED}),
        (put("trajectories", "reward", 0.5, id="g3-1"), {RECORDED}),
        (drop("journal", kind="end"), {JOURNAL}),
        (drop("journal", kind="lost"), {JOURNAL}),
        (drop("journal", kind="failed"), {JOURNAL}),
        (drop("journal", kind="applied"), {JOURNAL}),
        (drop("journal", kind="intend"), {JOURNAL}),
        (drop("journal", kind="step", version=2), {JOURNAL}),
        (put("journal", "version", 3, kind="start", version=2), {JOURNAL}),
        (put("journal", "version", 1, kind="start", version=2), {JOURNAL}),
    ],
)
def test_one_thing_that_is_wrong_is_found(tmp_path: Path, change: Callable[[Rows], None], found: set[str]) -> None:
    rows = made_run()
    change(rows)
    assert wrong(tmp_path, rows) == found


def test_no_engine_may_have_older_weights_than_an_episode_had_before(tmp_path: Path) -> None:
    rows = made_run()
    rows[SECOND][1]["version"] = 1  # it began before the last publication
    rows[SECOND][2]["episode"].update(versions=[-1, 2, 2, 1, 1, 1, 2])
    assert wrong(tmp_path, rows) == {VERSIONS}


def test_a_file_that_is_no_json_is_found(tmp_path: Path) -> None:
    assert wrong(tmp_path, made_run()) == set()
    run = tmp_path / "run"
    for name, text in (("events", '{"a": 1}\n{"b"\n'), ("routing", '{"a": 1}')):
        (run / f"{name}.jsonl").write_text(text)
    (run / "report.html").write_text("")
    [check] = [check for check in accounts(run, tmp_path / "kept", SIZES) if not check.met]
    assert check.metric == "every line of every file can be read"
    assert all(name in check.note for name in ("events.jsonl", "routing.jsonl", "report.html"))


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.rows() == [{"a": 1}]
    assert tail.rows() == []
    with open(path, "r+") as file:  # what a kill cut off is dropped, and others follow
        file.truncate(9)
        file.seek(9)
        file.write('{"b": 2}\n{"c": 3}\n')
    assert tail.rows() == [{"b": 2}, {"c": 3}]


def test_segments_outlive_the_run_that_deletes_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    segments = Segments(run, tmp_path / "kept")
    path = run / "episodes-00000.jsonl"
    path.write_text("")
    segments.look()
    path.unlink()
    path.write_text("begun again\n")
    segments.look()
    with open(path, "a") as file:
        file.write("later\n")
    segments.look()
    path.unlink()
    assert sorted(kept.read_text() for kept in (tmp_path / "kept").iterdir()) == ["", "begun again\nlater\n"]
