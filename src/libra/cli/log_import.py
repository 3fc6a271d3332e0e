"""`libra trace import`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input
from libra.cli.output import check_writable, reading, tell_notes, writing
from libra.report.words import plural
from libra.trajectory import Trajectory, Turn, dump_trajectory, read_trajectories

if TYPE_CHECKING:
    from libra.trajectory.logs.count import TokenCount


def import_log(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A log of another framework or agent.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Write trajectories as JSON lines to this file.")],
    log_format: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FORMAT", help="A format of `libra trace formats` (default: recognised by its shape)."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="DIR", help="Folder with the tokenizer.json for texts without token counts."
        ),
    ] = None,
    characters_per_token: Annotated[
        float | None,
        typer.Option(
            "--characters-per-token",
            help="Characters per token, to estimate texts without token counts if there is no tokenizer (default: 4).",
        ),
    ] = None,
    unknown_tool_seconds: Annotated[
        float | None,
        typer.Option("--unknown-tool-seconds", min=0, help="Seconds of tool calls whose duration the log lacks."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON on standard output.")] = False,
) -> None:
    """Convert a log of another framework to trajectories, one JSON line each.

    Every command that takes trajectories can read such logs directly. This command can also count the tokens of texts
    with the model's tokenizer. Notes name the fields that the log lacks.

    Exit status: 0 done, 2 the log cannot be read (the message names file, line and field).
    """
    from libra.trajectory.logs.catalogue import first_entry, format_named, format_of
    from libra.trajectory.logs.format import LogReading

    notes: list[str] = []
    try:
        check_writable(out, reads=(log,))
        counted = LogReading(_counter(tokenizer, characters_per_token))
        first = first_entry(log) if log_format is None else None
        of = None if first is None else format_of(first)
        if log_format is not None:
            of = format_named(log_format)
        summary = Summary("libra" if of is None else of.name)
        read = read_trajectories(log, notes.append, log_format=of, reading=counted)
        read = reading(log, read, "trajectories")
        if unknown_tool_seconds is not None:
            read = _assumed(read, unknown_tool_seconds, summary)
        _write(out, read, summary)
    except (ValueError, OSError) as error:
        bad_input(error)
    if summary.assumed_seconds:
        calls = plural(summary.assumed_seconds, "tool call")
        notes.append(f"{calls} without recorded seconds: {unknown_tool_seconds:g} s assumed")
    tell_notes(notes, err=as_json)
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "notes": notes}))
    else:
        typer.echo(f"{out}: {summary}")


@dataclass(slots=True)
class Summary:
    """Sums over the trajectories written. `context_tokens` adds up the contexts at the start of each turn."""

    format: str
    trajectories: int = 0
    finished: int = 0
    turns: int = 0
    generated_tokens: int = 0
    context_tokens: int = 0
    unknown_seconds: int = 0
    assumed_seconds: int = 0

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.finished += trajectory.finished
        self.turns += len(trajectory.turns)
        self.generated_tokens += trajectory.generated_tokens
        self.context_tokens += sum(trajectory.contexts())
        self.unknown_seconds += sum(map(_seconds_unknown, trajectory.turns))

    def __str__(self) -> str:
        return (
            f"{plural(self.trajectories, 'trajectory', 'trajectories')} of {self.format} ({self.finished:,} finished),"
            f" {plural(self.turns, 'turn')}, {self.generated_tokens:,} tokens generated"
        )


def _seconds_unknown(turn: Turn) -> bool:
    return turn.tool is not None and turn.tool_seconds is None


def _counter(tokenizer: Path | None, characters_per_token: float | None) -> TokenCount:
    from libra.trajectory.logs.count import CharacterCount, TokenizerCount

    if tokenizer is None:
        try:
            return CharacterCount() if characters_per_token is None else CharacterCount(characters_per_token)
        except ValueError as error:
            raise ValueError(f"--{str(error).replace('_', '-')}") from None
    if characters_per_token is not None:
        raise ValueError("--tokenizer and --characters-per-token contradict each other: leave one out")
    return TokenizerCount(tokenizer)


def _assumed(trajectories: Iterable[Trajectory], seconds: float, summary: Summary) -> Iterator[Trajectory]:
    """The trajectories, with `seconds` for each tool call without a duration."""
    for trajectory in trajectories:
        summary.assumed_seconds += sum(map(_seconds_unknown, trajectory.turns))
        turns = (replace(it, tool_seconds=seconds) if _seconds_unknown(it) else it for it in trajectory.turns)
        yield replace(trajectory, turns=tuple(turns))


def _write(out: Path, trajectories: Iterable[Trajectory], summary: Summary) -> None:
    """Write all trajectories; write no file if the log is refused."""
    part = out.with_name(f"{out.name}.part") if out.is_file() or not out.exists() else out
    try:
        with writing(out):
            file = part.open("w", encoding="utf-8")
        with file:
            for trajectory in trajectories:
                with writing(out):
                    file.write(dump_trajectory(trajectory) + "\n")
                summary.add(trajectory)
        if part != out:
            part.replace(out)
    except BaseException:
        if part != out:
            part.unlink(missing_ok=True)
        raise
