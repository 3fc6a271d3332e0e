"""Formats of logs: each is recognised by its shape, and read with the numbers that it records and notes on the rest."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from libra.trajectory import Trajectory, TrajectoryFormatError, read_trajectories, write_trajectories
from libra.trajectory.log_file import LogNote
from libra.trajectory.logs.catalogue import FORMATS, first_entry, format_of
from libra.trajectory.logs.count import CharacterCount
from libra.trajectory.logs.format import LogReading
from tests.trajectory.logs.samples import AZURE, INSPECT, SAMPLES, SWE_AGENT, TALK, TRL, inspect_archive

OWN = Path(__file__).parents[2] / "data" / "trajectories.jsonl"
PAGE = (Path(__file__).parents[3] / "docs" / "logs.md").read_text(encoding="utf-8")


def write(folder: Path, content: bytes) -> Path:
    path = folder / "log"  # the name says nothing
    path.write_bytes(content)
    return path


def read(folder: Path, content: bytes) -> tuple[list[Trajectory], list[str]]:
    notes: list[str] = []
    path = write(folder, content)
    return list(read_trajectories(path, notes.append)), [note.removeprefix(f"{path}: ") for note in notes]


def test_each_format_has_a_sample() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_the_shape_of_one_format(tmp_path: Path, name: str) -> None:
    entry = first_entry(write(tmp_path, SAMPLES[name]))
    assert entry is not None
    assert [it.name for it in FORMATS.values() if it.is_one(entry)] == [name]


def test_the_page_lists_every_format() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (trajectories|requests) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(it.name, it.written_by, it.holds, it.silent_on) for it in FORMATS.values()]


def test_the_format_on_the_page_reads_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = re.findall(r"^`(\{.+\})`:$", PAGE, re.MULTILINE)
    [code] = re.findall(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 35
    (tmp_path / "mine.jsonl").write_text(line + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "logs.md", "exec"), {})
    final_context = CharacterCount()("When?") + 20 + 300 + 40
    assert capsys.readouterr().out.splitlines()[0] == f"{final_context} 1.0"


def test_logs_of_libra_have_the_shape_of_no_format() -> None:
    entry = first_entry(OWN)
    assert entry is not None
    assert format_of(entry) is None


# Of each trajectory: prompt, (context, generated, tool, status, seconds) of each turn, reward, version, finished.
Row = tuple[int, list[tuple[int, int, str | None, str | None, float | None]], float | None, int, bool]
LAST = (None, None, None)
EXPECTED: dict[str, list[Row]] = {
    "azure": [(700, [(700, 30, *LAST)], None, 0, True), (900, [(900, 12, *LAST)], None, 0, True)],
    "burstgpt": [
        (80, [(80, 8, *LAST)], None, 0, True),
        (50, [(50, 20, "user", "ok", 3.0), (100, 30, *LAST)], None, 0, True),
    ],
    "vidur": [(300, [(300, 40, *LAST)], None, 0, True), (310, [(310, 41, *LAST)], None, 0, True)],
    "mooncake": [(1000 + n, [(1000 + n, 20, *LAST)], None, 0, True) for n in range(3)],
    "vllm-bench": [(100, [(100, 20, *LAST)], None, 0, True), (50, [(50, 7, *LAST)], None, 0, True)],
    "verifiers-traces": [(60, [(60, 15, "search", "unknown", 2.5), (95, 10, *LAST)], 1.0, 0, True)],
    "inspect": [(40, [(40, 9, "bash", "timeout", 2.5), (60, 8, *LAST)], 1.0, 0, True)],
    "weka": [
        (
            1000,
            [(1000, 50, "tool", "unknown", 3.0), (1200, 60, "user", "unknown", 53.0), (900, 5, *LAST)],
            None,
            0,
            True,
        ),
        (200, [(200, 10, *LAST)], None, 0, True),
    ],
    "copilot": [
        (500, [(500, 20, "read_file", "ok", 3.0), (640, 30, "user", "ok", 60.0), (700, 40, *LAST)], None, 0, True)
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_counts_that_a_log_records_are_read(tmp_path: Path, name: str) -> None:
    found, notes = read(tmp_path, SAMPLES[name])
    assert [row(it) for it in found] == EXPECTED[name]
    assert notes[0].startswith(f"read as {name}, which lacks the following")


def row(trajectory: Trajectory) -> Row:
    turns = [
        (context, turn.generated_tokens, turn.tool, turn.status, turn.tool_seconds)
        for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True)
    ]
    return trajectory.prompt_tokens, turns, trajectory.reward, trajectory.policy_version, trajectory.finished


def test_times_of_requests_are_seconds(tmp_path: Path) -> None:
    for name, arrivals in {"mooncake": [0, 0.5, 1.0], "vidur": [0.5, 1.25], "burstgpt": [11, 10]}.items():
        assert [it.started_at for it in read(tmp_path, SAMPLES[name])[0]] == arrivals
    first, second = (it.started_at for it in read(tmp_path, AZURE)[0])
    assert first is not None and second is not None
    assert second - first == 2.5


# Texts without tokens: sums that the log records hold exactly, texts divide them.
def test_the_usage_of_a_chat_is_that_of_its_last_call(tmp_path: Path) -> None:
    found, notes = read(tmp_path, SAMPLES["openai"])
    assert [(it.contexts()[-1], it.turns[-1].generated_tokens) for it in found] == [(90, 12), (91, 12)]
    assert [turn.tool for turn in found[0].turns] == ["search", None]
    assert found[0].prompt_id == found[1].prompt_id
    assert any(note.startswith("episodes whose usage is taken as the last call's") for note in notes)


@pytest.mark.parametrize(("name", "sent", "received"), [("verifiers", 160, 25), ("swe-agent", 420, 50)])
def test_sums_over_all_calls_hold(tmp_path: Path, name: str, sent: int, received: int) -> None:
    for trajectory in read(tmp_path, SAMPLES[name])[0]:
        assert len(trajectory.turns) == 2
        assert sum(trajectory.contexts()) == sent
        assert trajectory.generated_tokens == received


def test_sums_too_small_for_their_turns_are_told(tmp_path: Path) -> None:
    episode = json.loads(SWE_AGENT)
    episode["info"]["model_stats"] = {"tokens_sent": 3, "tokens_received": 50}
    found, notes = read(tmp_path, json.dumps(episode).encode())
    assert found[0].generated_tokens == 50
    assert any(note.startswith("episodes whose recorded prompt tokens are too few") for note in notes)


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_decoded_text_is_divided_at_tool_responses(tmp_path: Path, name: str) -> None:
    found, notes = read(tmp_path, SAMPLES[name])
    call, answer = found[0].turns
    returned = "<|im_end|>\n<|im_start|>user\n<tool_response>\nhigh water 05:12\n</tool_response><|im_end|>\n"
    assert call.tool == "search"
    assert call.returned_tokens == CharacterCount()(returned + "<|im_start|>assistant\n")
    assert answer.generated_tokens == CharacterCount()("At 05:12.")
    assert found[0].policy_version == {"verl": 7, "trl": 12}[name]
    assert any("tokens are estimated (4 characters a token), without a chat template" in note for note in notes)


def test_rewards(tmp_path: Path) -> None:
    assert [it.reward for it in read(tmp_path, SAMPLES["verl"])[0]] == [0, 0.5]
    assert [it.reward for it in read(tmp_path, SAMPLES["verifiers"])[0]] == [0, 0.5, 1]
    trl, notes = read(tmp_path, TRL)
    assert trl[0].reward == 0.75
    assert "rewards added up without their weights (brief, right): 2" in notes


def test_groups_share_the_name_of_their_prompt(tmp_path: Path) -> None:
    assert [it.prompt_id for it in read(tmp_path, SAMPLES["verifiers"])[0]] == ["0", "0", "1"]
    verl = read(tmp_path, SAMPLES["verl"])[0]
    assert verl[0].prompt_id != verl[1].prompt_id


def test_parallel_tools_return_together(tmp_path: Path) -> None:
    output = "call<tool_response>a</tool_response>\n<tool_response>b</tool_response>\nassistant\nend"
    found, _ = read(tmp_path, json.dumps({"input": "q", "output": output, "score": 1, "step": 0}).encode())
    assert [turn.tool for turn in found[0].turns] == ["tool", None]


def test_an_answer_that_ends_with_a_tool_is_unfinished(tmp_path: Path) -> None:
    found, _ = read(tmp_path, json.dumps({"messages": TALK[:4]}).encode())
    assert not found[0].finished


def test_blocks_of_anthropics_messages_are_read(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "When?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "u1", "name": "tides", "input": {"at": "Brest"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "u1", "is_error": True, "content": "no such port"}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "?"}]},
    ]
    found, _ = read(tmp_path, json.dumps({"messages": messages}).encode())
    call, answer = found[0].turns
    assert (call.tool, call.status, call.returned_tokens) == ("tides", "error", CharacterCount()("no such port"))
    assert answer.generated_tokens == CharacterCount()("Hm.?")


def test_images_are_told(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A boat."}]
    _, notes = read(tmp_path, json.dumps({"messages": messages}).encode())
    assert "parts of messages without text (images, audio) whose tokens are left out: 1" in notes


def test_definitions_of_tools_are_part_of_the_prompt(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    plain, _ = read(tmp_path, json.dumps({"messages": TALK}).encode())
    found, _ = read(tmp_path, json.dumps({"messages": TALK, "tools": tools}).encode())
    assert found[0].prompt_tokens == plain[0].prompt_tokens + CharacterCount()(json.dumps(tools))


def test_messages_of_mini_swe_agent_return_from_bash(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Mend a.py."},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "a.py"},
        {"role": "assistant", "content": "submit"},
    ]
    found, notes = read(tmp_path, json.dumps({"messages": messages, "info": {"exit_status": "Submitted"}}).encode())
    assert notes[0].startswith("read as swe-agent")
    assert [turn.tool for turn in found[0].turns] == ["bash", None]
    assert found[0].finished


def test_rollouts_without_an_example_are_of_verifiers_and_steps_of_trl(tmp_path: Path) -> None:
    row = {"prompt": TALK[:2], "completion": TALK[2:], "reward": 1.0}
    assert read(tmp_path, json.dumps(row).encode())[1][0].startswith("read as verifiers,")
    assert read(tmp_path, json.dumps({**row, "step": 3}).encode())[1][0].startswith("read as trl,")


def test_packed_logs_are_those_that_were_packed(tmp_path: Path) -> None:
    plain = read(tmp_path, INSPECT)[0]
    assert read(tmp_path, gzip.compress(INSPECT))[0] == plain
    assert read(tmp_path, inspect_archive())[0] == plain


def test_a_folder_is_one_log_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        line = {"input": "q", "output": "a", "score": 0, "step": step}
        (tmp_path / f"{step}.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    found = list(read_trajectories(tmp_path, lambda _: None))
    assert [(it.id, it.policy_version) for it in found] == [("2-1", 2), ("9-2", 9), ("10-3", 10)]


def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(SAMPLES["verl"])
    (tmp_path / "2.jsonl").write_bytes(b"{}\n")
    with pytest.raises(TrajectoryFormatError, match=r"2\.jsonl:1: input: this field is required"):
        list(read_trajectories(tmp_path, lambda _: None))


def test_parquet_rows_are_those_of_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in TRL.splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows")
    assert list(read_trajectories(tmp_path / "rows", lambda _: None)) == read(tmp_path, TRL)[0]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_read_survives_libras_own_format(tmp_path: Path, name: str) -> None:
    found, _ = read(tmp_path, SAMPLES[name])
    assert found
    write_trajectories(tmp_path / "own.jsonl", found)
    assert list(read_trajectories(tmp_path / "own.jsonl")) == found


def test_texts_are_counted_as_asked(tmp_path: Path) -> None:
    path, notes = write(tmp_path, SAMPLES["verl"]), list[str]()
    found = list(read_trajectories(path, notes.append, reading=LogReading(CharacterCount(1.0))))
    assert found[0].prompt_tokens == len("user\nquestion 0")
    assert any("(1 characters a token)" in note for note in notes)


def test_a_caller_that_takes_no_notes_is_warned(tmp_path: Path) -> None:
    with pytest.warns(LogNote, match="read as vidur, which lacks the following"):
        list(read_trajectories(write(tmp_path, SAMPLES["vidur"])))


VIDUR_HEADER = b"arrived_at,num_prefill_tokens,num_decode_tokens\n"
REFUSED = {
    "a log of unknown format": (
        b'{"colour": "red", "size": 3}\n',
        "log:1: unknown log format; the first fields of the entry are 'colour', 'size'",
    ),
    "a table of unknown format": (
        b"colour,size\nred,3\n",
        "log:2: unknown log format; the first fields of the entry are 'colour', 'size'",
    ),
    "requests": (
        b'{"arrival": 0.1, "prompt_tokens": 9, "output_tokens": 2}\n',
        "log:1: a request, not a trajectory: `libra search` and `libra simulate` take such a file as --requests",
    ),
    "a header alone": (VIDUR_HEADER, "a header without rows"),
    "a missing field": (b'{"input": "q", "output": "a", "score": null}\n', "log:1: score: this field is required"),
    "text for tokens": (
        b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,x\n",
        "log:2: num_decode_tokens: 'x' is",
    ),
    "too few cells": (
        b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n0,1\n",
        "log:3: line: 2 fields instead",
    ),
    "a second line that is no JSON": (SAMPLES["verl"] + b"{oops}\n", "log:3: not JSON"),
    "half a document": (INSPECT[: len(INSPECT) // 2], "not JSON"),
    "a field deep inside": (
        INSPECT.replace(b'"working_time": 2.5', b'"working_time": -1'),
        "log: samples[0].events[1].working_time: -1 s is not from 0",
    ),
    "half an archive": (gzip.compress(SAMPLES["verl"])[:60], "damaged while it was packed"),
    "results of vLLM without details": (
        b'{"num_prompts": 2, "request_rate": 1.0, "total_input_tokens": 9}',
        "log:1: input_lens: only sums were saved: benchmark again with --save-detailed",
    ),
    "lists of other lengths": (
        json.dumps({"input_lens": [1, 2], "output_lens": [1]}).encode(),
        "log:1: output_lens: 1 values for the 2 requests of input_lens",
    ),
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(TrajectoryFormatError) as refusal:
        list(read_trajectories(write(tmp_path, content), lambda _: None))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
