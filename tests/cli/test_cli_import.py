"""Logs of other frameworks as a user brings them: `libra trace import`, and the commands that read them as they are."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import EXAMPLES, LOG, assert_refused, libra

from benchmarks.public.__main__ import DATA
from libra.trajectory import read_trajectories
from tests.trajectory.logs.samples import SAMPLES

ENGINES = EXAMPLES / "engines.yaml"


def sample(folder: Path, name: str) -> Path:
    path = folder / "log"
    path.write_bytes(SAMPLES[name])
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_an_imported_log_is_the_log_as_it_is_read(tmp_path: Path, name: str) -> None:
    log, out = sample(tmp_path, name), tmp_path / "own.jsonl"
    result = libra("trace", "import", log, out, "--json")
    assert result.exit_code == 0, result.stderr
    found, notes = list(read_trajectories(out)), list[str]()
    assert found == list(read_trajectories(log, notes.append))
    summary = json.loads(result.stdout)
    assert summary["format"] == name
    assert summary["notes"] == notes
    assert summary["trajectories"] == len(found)
    assert summary["generated_tokens"] == sum(it.generated_tokens for it in found)
    assert summary["context_tokens"] == sum(sum(it.contexts()) for it in found)
    assert result.stderr.splitlines() == [f"note: {note}" for note in notes]


def test_a_log_of_libra_is_copied(tmp_path: Path) -> None:
    assert libra("trace", "import", LOG, tmp_path / "own.jsonl").exit_code == 0
    assert list(read_trajectories(tmp_path / "own.jsonl")) == list(read_trajectories(LOG))


def test_seconds_that_a_log_lacks_are_assumed_by_option_and_told(tmp_path: Path) -> None:
    log, out = sample(tmp_path, "verl"), tmp_path / "own.jsonl"
    result = libra("trace", "import", log, out, "--unknown-tool-seconds", 2.5)
    assert "note: 2 tool calls without recorded seconds: 2.5 s assumed" in result.output
    assert [it.turns[0].tool_seconds for it in read_trajectories(out)] == [2.5, 2.5]


def test_texts_are_counted_by_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    log, out = sample(tmp_path, "verl"), tmp_path / "own.jsonl"
    result = libra("trace", "import", log, out, "--tokenizer", tmp_path)
    assert f"tokens are counted by {tmp_path / 'tokenizer.json'}, without a chat template" in result.output
    assert [it.prompt_tokens for it in read_trajectories(out)] == [3, 3]


def test_a_damaged_log_leaves_nothing_behind(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "own.jsonl"
    log.write_bytes(SAMPLES["verl"] + b'{"input": "q", "output": [3], "score": 1}\n')
    out.write_text("before\n")
    assert_refused(
        libra("trace", "import", log, out), f"{log}:3: output: list of 1 is not a text; correct it, or remove"
    )
    assert out.read_text() == "before\n"
    assert {path.name for path in tmp_path.iterdir()} == {"log", "own.jsonl"}


BAD_CALLS = {
    "no such log": (("no.jsonl", "out"), "no.jsonl: No such file or directory"),
    "onto itself": ((LOG, LOG), "the same file as"),
    "no such format": ((LOG, "out", "--from", "csv"), "there is no format 'csv'; choose from verl, trl"),
    "no such tokenizer": ((LOG, "out", "--tokenizer", "nowhere"), "tokenizer.json: No such file or directory"),
    "no such ratio": (
        (LOG, "out", "--characters-per-token", 0),
        "--characters-per-token is 0.0; set it to more than 0",
    ),
    "two ways to count": (
        (LOG, "out", "--characters-per-token", 3, "--tokenizer", "."),
        "--tokenizer and --characters-per-token contradict each other: leave one out",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(libra("trace", "import", *arguments), words)
    assert not list(tmp_path.iterdir())


def test_every_format_is_listed() -> None:
    listed = libra("trace", "formats").stdout
    assert all(name in listed for name in SAMPLES)


@pytest.mark.parametrize("name", ["verl", "copilot"])
def test_engines_are_simulated_on_a_log_of_others(tmp_path: Path, name: str) -> None:
    log = sample(tmp_path, name)
    result = libra("simulate", ENGINES, "-t", log, "--unknown-tool-seconds", 1, "--json")
    assert result.exit_code == 0, result.stderr
    assert f"note: {log}: read as {name}, which lacks the following" in result.stderr


PUBLIC = sorted((DATA / "traces").glob("*.*"))  # small files as others publish them, where they are at hand
COUNTS = (  # names by which logs give the tokens of a call's prompt and of its answer
    *(("ContextTokens", "GeneratedTokens"), ("Request tokens", "Response tokens"), ("input_length", "output_length")),
    *(("num_prefill_tokens", "num_decode_tokens"), ("prompt_tokens", "completion_tokens"), ("in", "out")),
    *(("input_tokens", "output_tokens"), ("tokens_sent", "tokens_received"), ("prompt", "completion")),
)


def calls_in(entry: object) -> Iterator[tuple[int, int]]:
    """Tokens of the prompt and the answer of each call that has both, wherever in an entry of a log."""
    if isinstance(entry, list):
        for each in entry:
            yield from calls_in(each)
    elif isinstance(entry, dict):
        for prompt, answer in COUNTS:
            tokens, generated = (str(entry.get(name)) for name in (prompt, answer))
            if tokens.isdigit() and generated.isdigit() and int(generated):
                yield int(tokens) + entry.get("input_tokens_cache_read", 0), int(generated)
        yield from (
            (tokens, out)
            for tokens, out in zip(*(entry.get(f"{it}_lens", ()) for it in ("input", "output")), strict=True)
            if out
        )
        yield from calls_in(list(entry.values()))


def entries(text: str) -> list[object]:
    if text[0] != "{":
        return list(csv.DictReader(text.splitlines()))
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("log", [*SAMPLES, *PUBLIC], ids=lambda log: getattr(log, "name", log))
def test_two_commands_simulate_any_log_with_the_tokens_that_it_records(tmp_path: Path, log: str | Path) -> None:
    source, own = log if isinstance(log, Path) else sample(tmp_path, log), tmp_path / "own.jsonl"
    imported = libra("trace", "import", source, own, "--json", "--unknown-tool-seconds", 1)
    assert imported.exit_code == 0, imported.stderr
    simulated = libra("simulate", ENGINES, "-t", own, "--json")
    assert simulated.exit_code == 0, simulated.stderr
    metrics = json.loads(simulated.stdout)["metrics"]
    found = metrics["prompt_tokens"], metrics["generated_tokens"]
    recorded = [sum(tokens) for tokens in zip(*calls_in(entries(source.read_text())), strict=True)]
    told = json.loads(imported.stdout)
    if told["format"] == "openai":  # the usage of the last call: what was said before is a part of its prompt
        last = [(it.contexts()[-1], it.turns[-1].generated_tokens) for it in read_trajectories(own)]
        assert recorded == [sum(tokens) for tokens in zip(*last, strict=True)]
    elif told["format"] in ("verl", "trl"):  # texts alone
        assert not recorded and min(found) > 0
    elif any("turns without a recorded call" in note for note in told["notes"]):
        assert all(ours > theirs for ours, theirs in zip(found, recorded, strict=True))
    else:
        assert found == tuple(recorded)


def test_engines_are_simulated_on_requests_of_others(tmp_path: Path) -> None:
    log = sample(tmp_path, "mooncake")
    result = libra("simulate", ENGINES, "--requests", log)
    assert result.exit_code == 0, result.stderr
    assert f"note: {log}: requests whose shared blocks (hash_ids) are not kept: 3" in result.output


def test_a_cluster_is_planned_from_a_log_of_others(tmp_path: Path) -> None:
    log = sample(tmp_path, "verl")
    result = libra(
        *("plan", EXAMPLES / "cluster_48_a800.yaml", "-m", "Qwen/Qwen3-0.6B", "-t", log, "-p", "roofline"),
        *("--no-simulation", "--json", "--longest-tool-call", 5),
    )
    assert result.exit_code == 0, result.stderr
    assert f"note: {log}: read as verl, which lacks the following" in result.stderr


def test_a_log_is_summed_up_as_it_is(tmp_path: Path) -> None:
    result = libra("trace", "stats", sample(tmp_path, "copilot"), "--json")
    assert json.loads(result.stdout)["generated"]["mean"] == 90
    assert "calls without token counts left out: 1" in result.stderr
