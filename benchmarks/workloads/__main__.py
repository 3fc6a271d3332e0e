"""Facts about the workloads, next to published ones: `python -m benchmarks.workloads [--json FILE]`.

Invariant: every number is of trajectories that were drawn, or of the log that is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from benchmarks.workloads.definition import SIGNALS, Workload, names, read
from benchmarks.workloads.facts import BATCH, PERCENTS, Facts, at_version, facts
from libra.trajectory import read_trajectories, write_trajectories

# Assumption: to generate one token of one of many sequences.
TOKEN_SECONDS = 0.015
GROUPS = 250  # at each stage
EXAMPLE_GROUPS = 12

_MEANS = {("search_r1", 0.0): 2_500, ("search_r1", 1.0): 11_500}  # Libra, arXiv 2606.03077
_MEAN_ERROR = 0.05


def main() -> None:
    parser = command_line("workloads.__main__", __doc__)
    parser.add_argument("--log", type=Path, help="the facts of this log of trajectories, instead of the workloads")
    parser.add_argument("--passive", nargs="*", default=[], help="tools of the log that only answer, such as a user")
    parser.add_argument(
        "--example",
        type=Path,
        help=f"write {EXAMPLE_GROUPS} groups of search_r1, halfway through its drift, to this file",
    )
    options = parser.parse_args()
    if options.example is not None:
        workload = read("search_r1")
        write_trajectories(
            options.example, at_version(workload.episodes("strong"), workload.steps // 2, EXAMPLE_GROUPS)
        )
        return
    if options.log is not None:
        report(list(_log_rows(options.log, options.passive)), options.json)
        return
    workloads = {name: read(name) for name in names()}
    rows = [row for name, workload in workloads.items() for row in _stage_rows(name, workload)]
    rows += [row for name, workload in workloads.items() for row in _signal_rows(name, workload)]
    report(rows, options.json)
    for name, workload in workloads.items():
        print(f"{name}: sha256 {workload.digest()}")
        for field, source in sorted(workload.sources.items()):
            print(f"  {field}: {source}")


def _stage_rows(name: str, workload: Workload) -> Iterator[Row]:
    for progress in (0.0, 0.5, 1.0):
        found = facts(at_version(workload.episodes("strong"), round(progress * workload.steps), GROUPS), TOKEN_SECONDS)
        case = f"{name}, drift {progress:.0%}"
        published = _MEANS.get((name, progress))
        if published is None:
            yield Row(case, "mean final context", found.mean_final_context, "tokens")
        else:
            met = abs(found.mean_final_context / published - 1) <= _MEAN_ERROR
            goal = f"{published:,} published, within {_MEAN_ERROR:.0%}"
            yield Row(case, "mean final context", found.mean_final_context, "tokens", goal, met)
        yield from _rows(case, found)


def _rows(case: str, found: Facts) -> Iterator[Row]:
    for percent, tokens in zip(PERCENTS, found.final_context, strict=True):
        yield Row(case, f"final context, P{percent}", tokens, "tokens")
    yield Row(case, "mean generated", found.mean_generated, "tokens")
    yield Row(case, "mean turns", found.mean_turns, "")
    yield Row(case, "most turns", found.most_turns, "")
    yield Row(case, "trajectories without tool return", 100 * found.no_return_share, "%")
    yield Row(case, "mean tool call", found.mean_tool_seconds, "s")
    yield Row(case, "tool call, P99", found.p99_tool_seconds, "s")
    yield Row(case, "tools, of rollout seconds", 100 * found.tool_time_share, "%")
    yield Row(case, "longest tenth, of generated tokens", 100 * found.longest_tenth_tokens, "%")
    yield Row(case, "longest tenth, of rollout seconds", 100 * found.longest_tenth_seconds, "%")
    # Published: the longest 10 % take over 50 % of the rollout time (Libra, arXiv 2606.03077).
    yield Row(case, f"time of {BATCH} after nine tenths of them", 100 * found.tail_share, "%")
    yield Row(case, "prompts, of the variance of log length", 100 * found.prompt_share, "%")
    yield Row(case, "R^2 by the first tool return", found.signal, "")
    yield Row(case, "R^2 by any tool return", found.signal_everywhere, "")


def _signal_rows(name: str, workload: Workload) -> Iterator[Row]:
    for signal in SIGNALS:
        trajectories = at_version(workload.episodes(signal), workload.steps // 2, GROUPS)
        yield Row(f"{name}, R^2 by the first tool return", signal, facts(trajectories, TOKEN_SECONDS).signal, "")


def _log_rows(path: Path, passive: Collection[str]) -> Iterator[Row]:
    found = facts([each for each in read_trajectories(path) if each.finished], TOKEN_SECONDS, passive)
    case = path.name if not passive else f"{path.name} without {', '.join(passive)}"
    yield Row(case, "mean final context", found.mean_final_context, "tokens")
    yield from _rows(case, found)


if __name__ == "__main__":
    main()
