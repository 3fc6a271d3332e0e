"""Sums that Libra reads in public logs, compared with plain sums over the fields of the same files.

Invariant: right values come from the files by `csv` and `json` alone, never through Libra's readers.

    python -m benchmarks.logs [--data DIR] [--json FILE]

A log that is not there is a line that says so. Exit status 1 where a log is refused or a sum differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from libra.trajectory import Trajectory, TrajectoryFormatError, read_trajectories
from libra.trajectory.logs.catalogue import first_entry, format_of

SHARED = Path(__file__).parents[2] / "shared" / "data"
TRACES, TRAJECTORIES = Path("public", "traces"), Path("trajectories")  # below the folder of data

Rows = Sequence[Mapping[str, Any]]
Sum = Callable[[Rows], float]
Ours = Callable[[Sequence[Trajectory]], float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of one file."""

    file: str
    format: str
    quantity: str
    right: float
    ours: float

    @property
    def error(self) -> float:
        """Ours over the right value, less one; where the right value is 0, ours."""
        return self.ours / self.right - 1 if self.right else self.ours


@dataclass(frozen=True, slots=True)
class Quantity:
    """A sum over the fields of a file, and the same of Libra's trajectories."""

    name: str
    right: Sum
    ours: Ours


def column(name: str) -> Sum:
    return lambda rows: sum(float(row[name]) for row in rows)


def listed(name: str) -> Sum:
    return lambda rows: sum(sum(row[name]) for row in rows)


def inside(*path: str) -> Sum:
    """The sum of a field below others."""

    def one(row: Any) -> float:
        for name in path:
            row = row[name]
        return float(row)

    return lambda rows: sum(map(one, rows))


def of_calls(field: str) -> Sum:
    """The sum over all calls of Copilot's sessions."""
    return lambda rows: sum(
        call["tokens"][field] for row in rows for turn in row["turns"] for call in turn["llm_calls"]
    )


def of_events(field: str) -> Sum:
    """The sum over the model events of Inspect's samples."""
    return lambda rows: sum(
        event["output"]["usage"][field]
        for row in rows
        for sample in row["samples"]
        for event in sample["events"]
        if event["event"] == "model"
    )


def read_tokens(found: Sequence[Trajectory]) -> float:
    """Tokens that all calls read: the contexts at the start of each turn."""
    return sum(sum(it.contexts()) for it in found)


def written_tokens(found: Sequence[Trajectory]) -> float:
    return sum(it.generated_tokens for it in found)


def first_read(found: Sequence[Trajectory]) -> float:
    return sum(it.prompt_tokens for it in found)


def first_written(found: Sequence[Trajectory]) -> float:
    return sum(it.turns[0].generated_tokens for it in found)


def last_read(found: Sequence[Trajectory]) -> float:
    return sum(it.contexts()[-1] for it in found)


def last_written(found: Sequence[Trajectory]) -> float:
    return sum(it.turns[-1].generated_tokens for it in found)


def rewards(found: Sequence[Trajectory]) -> float:
    return sum(it.reward or 0.0 for it in found)


def tokens(read: Sum, written: Sum) -> tuple[Quantity, ...]:
    return Quantity("tokens read by all calls", read, read_tokens), Quantity(
        "tokens generated", written, written_tokens
    )


COUNT = Quantity("trajectories", len, len)
AZURE = tokens(column("ContextTokens"), column("GeneratedTokens"))
BURSTGPT = tokens(column("Request tokens"), column("Response tokens"))
QUANTITIES: dict[Path, tuple[Quantity, ...]] = {
    TRACES / "azure2023.csv": AZURE,
    TRACES / "azure2024.csv": AZURE,
    TRACES / "azure_lmm2025.csv": AZURE,
    TRACES / "burstgpt.csv": BURSTGPT,
    TRACES / "burstgpt_v2.csv": BURSTGPT,
    TRACES / "vidur.csv": tokens(column("num_prefill_tokens"), column("num_decode_tokens")),
    TRACES / "mooncake.jsonl": tokens(column("input_length"), column("output_length")),
    TRACES / "vllm_bench_result.json": tokens(listed("input_lens"), listed("output_lens")),
    TRACES / "copilot_sessions.jsonl": tokens(of_calls("prompt"), of_calls("completion")),
    TRACES / "openai_messages.jsonl": (
        Quantity("tokens read by the last calls", inside("usage", "prompt_tokens"), last_read),
        Quantity("tokens of the last answers", inside("usage", "completion_tokens"), last_written),
    ),
    TRACES / "verifiers_results.jsonl": (
        *tokens(inside("token_usage", "input_tokens"), inside("token_usage", "output_tokens")),
        Quantity("rewards", column("reward"), rewards),
    ),
    TRACES / "sweagent.traj": tokens(
        inside("info", "model_stats", "tokens_sent"), inside("info", "model_stats", "tokens_received")
    ),
    TRACES / "inspect.json": (
        Quantity("tokens read by the recorded call", of_events("input_tokens"), first_read),
        Quantity("tokens of the recorded answer", of_events("output_tokens"), first_written),
    ),
    TRACES / "verl_dump.jsonl": (COUNT, Quantity("scores", column("score"), rewards)),
    TRAJECTORIES / "tau_bench_airline.jsonl": (COUNT,),
    TRAJECTORIES / "claude_code_sessions.jsonl": (COUNT,),
}


def raw_rows(path: Path) -> Rows:
    """The rows of a table, the lines of a file of JSON lines, or one JSON document."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def compared(path: Path, quantities: Sequence[Quantity]) -> Iterator[Compared]:
    """Raises `TrajectoryFormatError` where Libra does not read the file."""
    raw, found = raw_rows(path), list(read_trajectories(path, lambda _: None))
    first = first_entry(path)
    known = None if first is None else format_of(first)
    for it in quantities:
        yield Compared(path.name, "libra" if known is None else known.name, it.name, it.right(raw), it.ours(found))


def table_of(rows: Sequence[Compared]) -> Table:
    table = Table("file", "format", "quantity", title="Public logs")
    for name in ("right", "ours", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *map(escape, (row.file, row.format, row.quantity)),
            *(f"{value:,.6g}" for value in (row.right, row.ours)),
            f"{row.error:+.1%}" if row.error else "0",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", default=SHARED, help="folder of data, default ../shared/data"
    )
    options = parser.parse_args(arguments)
    rows, refused = list[Compared](), 0
    for name, quantities in QUANTITIES.items():
        path = options.data / name
        if not path.exists():
            print(f"{path.name}: not there, left out")
            continue
        try:
            rows += compared(path, quantities)
        except TrajectoryFormatError as error:
            refused += 1
            print(f"refused: {error}")
    if rows:
        Console().print(table_of(rows))
    if options.json is not None:
        lines = (json.dumps({**asdict(row), "error": row.error}) + "\n" for row in rows)
        options.json.write_text("".join(lines), encoding="utf-8")
    return 1 if refused or any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
