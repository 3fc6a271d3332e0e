"""Trajectories on disk: what is written reads back equal, and what breaks the schema is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config.sealed_line import sealed
from libra.trajectory import (
    Trajectory,
    TrajectoryFormatError,
    Turn,
    dump_trajectory,
    parse_trajectory,
    read_trajectories,
    read_workload,
    truncate,
    write_trajectories,
)
from libra.trajectory.record import LONGEST

SAMPLE = Path(__file__).parents[1] / "data" / "trajectories.jsonl"

tokens = st.integers(min_value=0, max_value=2**40)
seconds = st.none() | st.floats(min_value=0, max_value=LONGEST)
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


def test_lines_with_and_without_checksums_are_read_from_one_file(tmp_path: Path) -> None:
    path, plain = tmp_path / "log.jsonl", dump_trajectory(SHORT).encode()
    path.write_bytes(plain + b"\n" + sealed(plain) + b"\n" + plain + b"\n")
    assert list(read_trajectories(path)) == [SHORT] * 3
    path.write_bytes(plain + b"\n" + sealed(plain).replace(b'"prompt_tokens":', b'"prompt_tokens":1') + b"\n")
    with pytest.raises(TrajectoryFormatError, match=r"log\.jsonl:2: the line does not match its checksum; remove"):
        list(read_trajectories(path))


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
    "optional field with a typo": (
        broken(lambda r: r["turns"][1].update(tool_second=1)),
        "'tool_second' .*tool_seconds",
    ),
    "unknown field beside a wrong one": (broken(lambda r: r.update(model="m", prompt_tokens=-1)), "prompt_tokens"),
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
    "seconds beyond belief": (broken(lambda r: r["turns"][0].update(tool_seconds=1e300)), "tool_seconds"),
    "endless seconds": (broken(lambda r: r["turns"][0].update(tool_seconds=float("inf"))), "tool_seconds"),
    "reward that is no number": (broken(lambda r: r.update(reward=float("nan"))), "reward"),
    "start that is no number": (broken(lambda r: r.update(started_at=float("nan"))), "started_at"),
    "tool without a status": (broken(lambda r: r["turns"][0].update(status=None)), "turns.0: .*tool and status"),
    "finished on a tool call": (broken(ends_on_a_tool), "turns: a finished trajectory"),
    "finished without a turn": (broken(lambda r: r.update(turns=[])), "turns: a finished trajectory"),
    "blank line": ("", "not JSON "),
    "half a line": (json.dumps(valid())[:-1], "not JSON "),
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


def test_fields_of_other_systems_are_ignored() -> None:
    extended = {**valid(), "model": "m", "usage": {"cost": [1]}}
    extended["turns"] = [{**turn, "logprobs": [0.5]} for turn in extended["turns"]]
    assert parse_trajectory(json.dumps(extended), "here") == parse_trajectory(json.dumps(valid()), "here")


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


def episode(prompt: int, turns: list[tuple[int, int, int | None]], finished: bool = True) -> Trajectory:
    """Turns as (generated, returned, context or None); the last one calls no tool where the episode is finished."""
    made = [Turn(g, "tool", "ok", r, 1.0, c) for g, r, c in turns]
    if finished:
        generated, _, context = turns[-1]
        made[-1] = Turn(generated, None, None, 0, None, context)
    return Trajectory("a", "p", "t", prompt, tuple(made), 1.0, 0, finished)


def ended_by_an_engine(prompt: int, turns: list[tuple[int, int]], limit: int) -> list[int]:
    """Tokens of each turn when an engine of `limit` tokens generates one after the other."""
    context, made = prompt, []
    for generated, returned in turns:
        if context >= limit:
            break
        made.append(0)
        while made[-1] < generated and context < limit:
            made[-1] += 1
            context += 1
        if made[-1] < generated or context + returned > limit:
            break
        context += returned
    return made


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 15), st.integers(0, 15)), min_size=1, max_size=5),
    st.integers(21, 60),
    st.booleans(),
)
def test_a_trajectory_is_cut_where_an_engine_would_have_ended_it(
    prompt: int, turns: list[tuple[int, int]], limit: int, finished: bool
) -> None:
    if finished:
        turns = [*turns[:-1], (turns[-1][0], 0)]
    whole = episode(prompt, [(g, r, None) for g, r in turns], finished)
    cut = truncate(whole, limit)
    if whole.peak_context <= limit:
        assert cut is whole
    else:
        assert [turn.generated_tokens for turn in cut.turns] == ended_by_an_engine(prompt, turns, limit)
        assert cut.turns[:-1] == whole.turns[: len(cut.turns) - 1]
        assert (cut.finished, cut.prompt_tokens, cut.reward) == (True, prompt, 1.0)


@settings(deadline=None)
@given(trajectories(), st.integers(1, 2**41))
def test_a_cut_trajectory_is_valid_and_fits(trajectory: Trajectory, limit: int) -> None:
    cut = truncate(trajectory, limit)
    assert cut.peak_context <= limit
    assert cut.generated_tokens <= trajectory.generated_tokens
    assert parse_trajectory(dump_trajectory(cut), "cut") == cut
    assert truncate(cut, limit) is cut


# prompt, turns, limit -> prompt, turns as (generated, context or None)
CUTS = {
    "in a later turn": (10, [(5, 5, None), (50, 0, None)], 40, 10, [(5, None), (20, None)]),
    "in a tool return": (10, [(5, 50, None), (5, 0, None)], 40, 10, [(5, None)]),
    "at the end of a return": (10, [(5, 25, None), (5, 0, None)], 40, 10, [(5, None)]),
    "in the first turn": (10, [(50, 0, None)], 40, 10, [(30, None)]),
    "in the prompt": (100, [(5, 5, None), (5, 0, None)], 40, 35, [(5, None)]),
    "in a recorded prompt": (0, [(5, 5, 100), (5, 0, None)], 40, 0, [(5, 35)]),
    "a turn as long as the limit": (100, [(99, 0, None)], 40, 0, [(40, None)]),
    "after compaction": (10, [(20, 0, None), (5, 0, 3), (90, 0, 10)], 40, 10, [(20, None), (5, 3), (30, 10)]),
    "where the record jumps": (10, [(5, 0, None), (5, 0, 400)], 40, 10, [(5, None)]),
}


@pytest.mark.parametrize(("prompt", "turns", "limit", "cut_prompt", "cut_turns"), CUTS.values(), ids=CUTS)
def test_where_a_trajectory_is_cut(
    prompt: int,
    turns: list[tuple[int, int, int | None]],
    limit: int,
    cut_prompt: int,
    cut_turns: list[tuple[int, int | None]],
) -> None:
    cut = truncate(episode(prompt, turns), limit)
    assert cut.prompt_tokens == cut_prompt
    assert [(turn.generated_tokens, turn.context_tokens) for turn in cut.turns] == cut_turns
    assert (cut.turns[-1].tool, cut.turns[-1].returned_tokens, cut.turns[-1].tool_seconds) == (None, 0, None)


def test_an_episode_that_has_not_begun_is_cut_in_its_prompt() -> None:
    waiting = Trajectory("a", "p", "t", 100, (), None, 0, False)
    assert truncate(waiting, 40) == Trajectory("a", "p", "t", 40, (), None, 0, False)


def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_context is 0; an engine holds 1 token or more"):
        truncate(episode(1, [(1, 0, None)]), 0)


LONG, SHORT, RUNNING = episode(10, [(50, 0, None)]), episode(10, [(5, 0, None)]), episode(10, [(5, 5, None)], False)


def test_a_workload_is_read_whole_and_cut_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_trajectories(path, [SHORT, RUNNING, LONG])
    assert list(read_workload(path, 60)) == [SHORT, RUNNING, LONG]
    assert list(read_workload(path, 40, truncate_context=True)) == [SHORT, RUNNING, truncate(LONG, 40)]
    reader = read_workload(path, 40)
    assert [next(reader), next(reader)] == [SHORT, RUNNING]
    with pytest.raises(TrajectoryFormatError, match=r"log\.jsonl:3: a context of 60 tokens, .* --truncate-context"):
        next(reader)


@pytest.mark.parametrize(
    ("written", "message"),
    [([], "there is no trajectory; give a log with"), ([RUNNING] * 3, "all 3 trajectories are unfinished; give a log")],
    ids=["empty", "unfinished"],
)
def test_a_workload_without_a_finished_trajectory_is_refused(
    tmp_path: Path, written: list[Trajectory], message: str
) -> None:
    path = tmp_path / "log.jsonl"
    write_trajectories(path, written)
    with pytest.raises(TrajectoryFormatError, match=message):
        list(read_workload(path, 60))
