"""The terminal tables of a search, and the texts that page and terminal share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Column, Table

from libra.report.tables import number, whole
from libra.report.words import cell, fine_duration, per_second, percent, plain, plural
from libra.serving.answer import Point, Rejection, SizingAnswer, bottleneck
from libra.serving.candidate import EngineSetup, ServingCandidate
from libra.serving.mix import ServingMix
from libra.serving.objective import Objective
from libra.serving.point_file import simulate_command
from libra.serving.verdict import statistic

MOST_POINTS = 12  # in a terminal; the page has all points
_BY = {
    "bound": "ruled out by the bound",
    "simulation": "miss an objective in simulation",
    "dominated": "dominated by another",
}


def headline(answer: SizingAnswer) -> str:
    """The best point, and how certain the answer is about the rest of the menu."""
    if not answer.points:
        return f"No deployment serves within the objectives: {answer.claim()}."
    if not answer.told:
        return f"No rate can be given: {answer.caution()}."
    best = answer.points[0]
    one = sum(pool.count for pool in best.candidate.pools) == 1
    return (
        f"{deployment(answer, best.candidate)} {'serves' if one else 'serve'} {per_second(best.trial.rate)}:"
        f" {value_words(answer, best)}; {answer.claim()}. Margin: {margin(best)}."
    )


def deployment(answer: SizingAnswer, candidate: ServingCandidate) -> str:
    """Engines and GPUs, such as `5 prefill engines of tp1 and 1 decode engine of tp4 on 9 H100`."""
    engines = []
    for pool in candidate.pools:
        role = "" if pool.role == "colocated" else f"{pool.role} "
        engines.append(f"{plural(pool.count, f'{role}engine')} of {_parallelism(pool.shape)}")
    nodes = answer.question.cluster.node_class
    gpus = [f"{count:,} {nodes(name).gpu.name}" for name, count in candidate.by_class().items()]
    return f"{' and '.join(engines)} on {' and '.join(gpus)}"


def label(candidate: ServingCandidate) -> str:
    """The label of a dot in a chart, such as `5 tp1 + 1 tp4`."""
    return " + ".join(f"{pool.count} {_parallelism(pool.shape)}" for pool in candidate.pools)


def _parallelism(shape: EngineSetup) -> str:
    apart = [] if shape.apart is None else [str(shape.apart)]
    stages = [f"pp{shape.pipeline_parallel_size}"] if shape.pipeline_parallel_size > 1 else []
    ranks = [] if shape.parallel is None else [f"dp{shape.parallel.size}"]
    return " ".join((*apart, f"tp{shape.tensor_parallel_size}", *stages, *ranks))


def counts(answer: SizingAnswer) -> str:
    share = percent(answer.out_by_bound / answer.candidates)
    return (
        f"{plural(answer.candidates, 'candidate')}: {answer.out_by_bound:,} ruled out by the bound ({share}),"
        f" {plural(answer.runs, 'simulation')} of {len(answer.question.requests):,} requests;"
        f" {plural(len(answer.points), 'point')} on the Pareto set"
    )


def unit_words(answer: SizingAnswer) -> str:
    """The unit by which goodput is divided; also the title of the price's column."""
    return "cost/h" if answer.question.prices else answer.question.unit


def value_words(answer: SizingAnswer, point: Point) -> str:
    return f"{plain(point.value)} per {unit_words(answer)}"


def axes(answer: SizingAnswer) -> tuple[Objective, Objective]:
    """The statistics by which TTFT and TPOT are reported."""
    return statistic(answer.question, "ttft"), statistic(answer.question, "tpot")


def alike(answer: SizingAnswer) -> list[list[Point]]:
    """The points in their order, grouped by equal numbers. Points can differ only in limits that no batch reaches."""
    groups: dict[tuple[float, ...], list[Point]] = {}
    for point in answer.points:
        same = (point.candidate.devices, point.cost, point.trial.rate, point.trial.ttft, point.trial.tpot)
        groups.setdefault(same, []).append(point)
    return list(groups.values())


def row(answer: SizingAnswer, points: Sequence[Point], files: Sequence[Path] = ()) -> tuple[str, ...]:
    """A row for points with equal numbers, with the names of their engines files."""
    point = points[0]
    names = {it.candidate: f"{file.stem}: " for it, file in zip(answer.points, files, strict=False)}
    return (
        "; or ".join(f"{names.get(it.candidate, '')}{it.candidate}" for it in points),
        f"{point.candidate.devices:,}",
        *((f"{point.cost:.4g}",) if answer.question.prices else ()),
        plain(point.trial.rate),
        plain(point.value),
        fine_duration(point.trial.ttft),
        fine_duration(point.trial.tpot),
        point.bottleneck,
        margin(point),
    )


def margin(point: Point) -> str:
    """The margin to the tightest limit, with its check, such as `3.0 % (tpot p99, longer prompts)`."""
    share, objective, check = point.tightest
    return f"{percent(1 - share)} ({objective.replace('_', ' ')}, {check})"


def columns(answer: SizingAnswer) -> tuple[str, ...]:
    ttft, tpot = (it.name.replace("_", " ") for it in axes(answer))
    price = ("cost/h",) if answer.question.prices else ()
    return ("deployment", "GPUs", *price, "req/s", f"per {unit_words(answer)}", ttft, tpot, "bottleneck", "margin")


def rejections(answer: SizingAnswer) -> list[tuple[str, Sequence[Rejection]]]:
    """(kind, its rejections), most frequent kind first."""
    ordered = sorted(answer.rejected, key=lambda it: it.by)
    kinds = [(_BY[by], list(its)) for by, its in groupby(ordered, key=lambda it: it.by)]
    return sorted(kinds, key=lambda it: -len(it[1]))


def engine_files(answer: SizingAnswer, files: Sequence[Path]) -> list[tuple[str, str, str]]:
    """(file, deployment, command that simulates it) for each point."""
    return [
        (str(file), str(point.candidate), simulate_command(answer.question, point, file))
        for file, point in zip(files, answer.points, strict=True)
    ]


def files_line(answer: SizingAnswer, files: Sequence[Path]) -> str:
    """A line with the paths of the engines files and the command that simulates the best point."""
    best = f"simulate the best by: {simulate_command(answer.question, answer.points[0], files[0])}"
    if len(files) == 1:
        return f"Its engines are in {files[0]}; {best}"
    return f"The points' engines are in {files[0]} to {files[-1].name}; {best}"


def search_tables(answer: SizingAnswer, files: Sequence[Path] = ()) -> list[Table]:
    _, *numbers, _, _ = columns(answer)
    table = Table(*(whole(it) for it in numbers), Column("deployment", overflow="fold"), title="Pareto set")
    groups = alike(answer)
    for points in groups[:MOST_POINTS]:
        name, *cells, why, left = row(answer, points, files)
        table.add_row(*cells, f"{cell(name)}\n  {why}\n  margin {left}")
    if len(groups) > MOST_POINTS:
        shown = sum(len(it) for it in groups[:MOST_POINTS])
        more = len(answer.points) - shown
        table.caption = f"{len(answer.points):,} points, {shown:,} shown and {more:,} more: --report has them all"
    out = Table("rejected", number("candidates"), Column("such as", overflow="fold"), title="The others")
    for kind, its in rejections(answer):
        out.add_row(kind, f"{len(its):,}", cell(f"{its[0].candidate}: {its[0].reason}"))
    return [*([table] if answer.told else []), *([out] if answer.rejected else [])]


def mix_lines(mix: ServingMix) -> list[str]:
    """Lines on a plan: its GPUs and cost, its pools, and the result of its simulation."""
    question, rate = mix.question, mix.trial.rate
    cost = f", {mix.plan.cost:,.4g} an hour" if question.prices else ""
    limits = {it.name: it.limit for it in question.objectives}
    reached = ", ".join(
        f"{name} {fine_duration(value)} (limit {fine_duration(limits[name])})"
        for name, value in mix.trial.latency.items()
    )
    return [
        f"{per_second(rate)} on {plural(mix.candidate.devices, 'GPU')}{cost}: {mix.claim()}.",
        *(f"  {pool}" for pool in mix.candidate.pools),
        f"Simulated: {reached}.",
        f"Bottleneck: {bottleneck(question, mix.candidate, mix.trial)}.",
    ]
