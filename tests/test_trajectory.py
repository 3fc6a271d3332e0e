"""Trajectories on disk: what is written reads back equal, and what breaks the schema is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.trajectory import (
    Trajectory,
    TrajectoryFormatError,
    Turn,
    dump_trajectory,
    parse_trajectory,
    read_trajectories,
    write_trajectories,
)

SAMPLE = Path(__file__).parent / "data" / "trajectories.jsonl"

tokens = st.integers(min_value=0, max_value=2**40)
seconds = st.none() | st.floats(min_value=0, allow_infinity=False)
statuses = st.sampled_from(["ok", "error", "timeout", "unknown"])
tool_turns = st.builds(Turn, tokens, st.text(), statuses, tokens, seconds, st.none() | tokens)
last_turns = st.builds(Turn, tokens, st.none(), st.none(), st.just(0), st.none(), st.none() | tokens)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    finished = draw(st.booleans())
    turns = draw(st.lists(tool_turns, max_size=4))
    return Trajectory(
        id=draw(st.text()),
        prompt_id=draw(st.text()),
        task=draw(st.text()),
        prompt_tokens=draw(tokens),
        turns=(*turns, draw(last_turns)) if finished else tuple(turns),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        policy_version=draw(st.integers(min_value=0)),
        finished=finished,
        started_at=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    )


@settings(deadline=None)
@given(trajectories())
def test_a_dumped_trajectory_parses_equal(trajectory: Trajectory) -> None:
    line = dump_trajectory(trajectory)
    assert "\n" not in line
    assert parse_trajectory(line, "dump:1") == trajectory


@settings(deadline=None)
@given(st.lists(trajectories(), max_size=5))
def test_a_written_file_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write_trajectories(path, written)
    assert list(read_trajectories(path)) == written


def test_the_sample_is_what_dump_writes_up_to_the_order_of_keys() -> None:
    for line in SAMPLE.read_text(encoding="utf-8").splitlines():
        assert json.loads(dump_trajectory(parse_trajectory(line, "sample"))) == json.loads(line)


def valid() -> dict[str, Any]:
    return {
        "id": "a",
        "prompt_id": "p",
        "task": "t",
        "prompt_tokens": 10,
        "turns": [
            {"generated_tokens": 5, "tool": "shell", "status": "ok", "returned_tokens": 3, "tool_seconds": 1.0},
            {"generated_tokens": 7, "tool": None, "status": None, "returned_tokens": 0, "tool_seconds": None},
        ],
        "reward": 1.0,
        "policy_version": 0,
        "finished": True,
    }


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    record = valid()
    change(record)
    return json.dumps(record)


def ends_on_a_tool(record: dict[str, Any]) -> None:
    record["turns"][-1].update(tool="shell", status="ok")


REFUSED = {
    "unknown key": (broken(lambda r: r.update(rewards=1.0)), "rewards"),
    "unknown key of a turn": (broken(lambda r: r["turns"][1].update(tokens=1)), "turns.1.tokens"),
    "text for a count": (broken(lambda r: r.update(prompt_tokens="10")), "prompt_tokens"),
    "fraction for a count": (broken(lambda r: r["turns"][0].update(generated_tokens=1.5)), "turns.0.generated_tokens"),
    "boolean for a count": (broken(lambda r: r["turns"][0].update(returned_tokens=True)), "turns.0.returned_tokens"),
    "number for finished": (broken(lambda r: r.update(finished=1)), "finished"),
    "status that does not exist": (broken(lambda r: r["turns"][0].update(status="failed")), "turns.0.status"),
    "missing field": (broken(lambda r: r.pop("policy_version")), "policy_version"),
    "missing field of a turn": (broken(lambda r: r["turns"][1].pop("tool")), "turns.1.tool"),
    "negative prompt": (broken(lambda r: r.update(prompt_tokens=-1)), "prompt_tokens"),
    "negative generated": (broken(lambda r: r["turns"][1].update(generated_tokens=-1)), "turns.1: .*generated_tokens"),
    "negative returned": (broken(lambda r: r["turns"][0].update(returned_tokens=-1)), "turns.0: .*returned_tokens"),
    "negative context": (broken(lambda r: r["turns"][1].update(context_tokens=-1)), "turns.1: .*context_tokens"),
    "negative seconds": (broken(lambda r: r["turns"][0].update(tool_seconds=-0.5)), "turns.0: .*tool_seconds"),
    "seconds that are no number": (broken(lambda r: r["turns"][0].update(tool_seconds=float("nan"))), "tool_seconds"),
    "endless seconds": (broken(lambda r: r["turns"][0].update(tool_seconds=float("inf"))), "tool_seconds"),
    "reward that is no number": (broken(lambda r: r.update(reward=float("nan"))), "reward"),
    "start that is no number": (broken(lambda r: r.update(started_at=float("nan"))), "started_at"),
    "tool without a status": (broken(lambda r: r["turns"][0].update(status=None)), "turns.0: .*tool and status"),
    "finished on a tool call": (broken(ends_on_a_tool), "turns: a finished trajectory"),
    "finished without a turn": (broken(lambda r: r.update(turns=[])), "turns: a finished trajectory"),
    "blank line": ("", "line: Invalid JSON"),
    "half a line": (json.dumps(valid())[:-1], "line: Invalid JSON"),
    "not an object": ("[]", "line"),
}


@pytest.mark.parametrize(("line", "field"), REFUSED.values(), ids=REFUSED)
def test_a_line_that_breaks_the_schema_is_refused_by_file_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(valid())}\n{line}\n{json.dumps(valid())}\n", encoding="utf-8")
    reader = read_trajectories(path)
    assert next(reader).id == "a"
    with pytest.raises(TrajectoryFormatError, match=rf"log\.jsonl:2: .*{field}"):
        next(reader)


def test_the_valid_line_of_the_table_is_valid() -> None:
    assert parse_trajectory(json.dumps(valid()), "here").turns[1].generated_tokens == 7


# prompt, turns as (generated, returned, context or None) -> contexts, final context, peak context
CONTEXTS = {
    "running sum": (10, [(5, 3, None), (7, 0, None)], (10, 18), 25, 25),
    "compaction": (10, [(50, 40, None), (7, 2, 20), (1, 0, None)], (10, 20, 29), 30, 100),
    "no turn": (10, [], (), 10, 10),
}


@pytest.mark.parametrize(("prompt", "turns", "contexts", "final", "peak"), CONTEXTS.values(), ids=CONTEXTS)
def test_contexts(
    prompt: int, turns: list[tuple[int, int, int | None]], contexts: tuple[int, ...], final: int, peak: int
) -> None:
    trajectory = Trajectory(
        id="a",
        prompt_id="p",
        task="t",
        prompt_tokens=prompt,
        turns=tuple(Turn(g, "tool", "ok", r, context_tokens=c) for g, r, c in turns),
        reward=None,
        policy_version=0,
        finished=False,
    )
    assert trajectory.contexts() == contexts
    assert trajectory.final_context == final
    assert trajectory.peak_context == peak
    assert trajectory.generated_tokens == sum(g for g, _, _ in turns)
