"""Checks of a run that has ended, as rows: whether its files account for everything (`run_accounts` of the oracles)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.rows import Row, never
from tests.oracles.run_accounts import (
    Sizes,
    journal_wrong,
    records_wrong,
    steps_wrong,
    tell,
    trained_wrong,
    unequal,
    unreadable,
    unsound,
    versions_wrong,
)
from tests.oracles.run_files import read_rows, read_segments


def checked(name: str, wrong: Iterable[str], counted: str) -> Row:
    return never("what must hold", name, wrong, counted)


def accounts(directory: Path, kept: Path, sizes: Sizes) -> Iterator[Row]:
    """All checks on the files of a run; `kept` are its segments of episodes."""
    story = tell(read_segments(kept), sizes)
    metrics, journal = read_rows(directory / "metrics.jsonl"), read_rows(directory / "journal.jsonl")
    trajectories = read_rows(directory / "trajectories.jsonl")
    summary = json.loads((directory / "summary.json").read_text())
    total = sizes.steps * sizes.groups * sizes.samples
    wrong, counted = [*story.wrong, *unequal(story, sizes)], f"{total:,} in {sizes.steps:,} steps"
    yield checked("every trajectory is started, finished and trained once", wrong, counted)
    steps = steps_wrong(metrics, summary, sizes)
    yield checked("the run made the steps of its configuration", steps, f"{sizes.steps:,}")
    counted = f"{sum(row['trained_tokens'] for row in metrics):,} tokens"
    yield checked("each step trained on its trajectories", trained_wrong(metrics, story, sizes), counted)
    recorded = records_wrong(trajectories, story)
    yield checked("trajectories.jsonl has each finished trajectory once", recorded, f"{len(trajectories):,}")
    what = "tokens are of versions between the start of their group and its step"
    counted = f"{sum(len(episode['tokens']) for episode in story.episodes.values()):,} tokens"
    yield checked(what, versions_wrong(story), counted)
    yield checked("the journal is consistent", journal_wrong(journal, sizes.steps), f"{len(journal):,} entries")
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    yield checked("every line of every file can be read", unreadable(directory), f"{size / 2**20:.0f} MiB")
    calls = Counter(turn["status"] for row in trajectories for turn in row["turns"] if turn["tool"] is not None)
    counted = ", ".join(f"{count:,} {status}" for status, count in sorted(calls.items()))
    wrong = [f"no call ended with {status}" for status in ("ok", "error", "timeout") if not calls[status]]
    yield checked("tools that break, hang and return nonsense were called", wrong, counted)


def weights(model: Path) -> Row:
    """Whether the model that a run left is one: it loads, and all its numbers are numbers."""
    size = (model / "model.safetensors").stat().st_size
    return checked("the trained weights are finite and load", unsound(model), f"{size:,} bytes")
