"""A real run that borrows against the same run that does not: steps per second, reward, and what users noticed.

Invariant: all rules of a seed meet the same traffic, in runs one after the other, begun in turn. A miss is attributable
where the same request of the same server meets its SLO while nothing is lent.

    python -m benchmarks.lending run [--rules off,gate] [--seeds 0,1] [--steps 40] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.command import command_line
from benchmarks.rows import Row, at_least, none, report
from libra.config.run import load_config
from libra.lend.gate import Slo
from libra.lend.lending_config import LendingConfig
from libra.lend.records.served import attributable, read_served
from libra.records.schema import LendingSummary, RunSummary, ServedSummary, StepRecord, parse_record, read_records

_RUN = Path(__file__).parents[2] / "examples" / "lent.yaml"
_SECONDS = 1200.0  # that one run may take
_GOAL = 1.3  # times the steps per second without lending


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("lending run", __doc__)
    parser.add_argument("--rules", default="off,gate", help="of --lending, off first (default: off,gate)")
    parser.add_argument("--seeds", default="0", help="between commas (default: 0)")
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of a run (default: 40)")
    options = parser.parse_args(arguments)
    rules, seeds = options.rules.split(","), [int(seed) for seed in options.seeds.split(",")]
    if rules[0] != "off":
        parser.error("--rules: off comes first; the others are compared with it")
    with tempfile.TemporaryDirectory() as directory:
        runs = {(rule, seed): _run(Path(directory), rule, seed, options.steps) for seed in seeds for rule in rules}
        rows = _rows(runs, rules, seeds)
    report(rows, options.json)
    return 0


@dataclass(frozen=True, slots=True)
class _Run:
    summary: RunSummary
    seconds: float  # of all steps but the first
    directory: Path


def _run(directory: Path, rule: str, seed: int, steps: int) -> _Run:
    name = f"{rule}-{seed}"
    command = [sys.executable, "-m", "libra.cli.app", "run", str(_RUN), "--directory", str(directory), "--name", name]
    command += ["--lending", rule, "--seed", str(seed), "--steps", str(steps)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
    if ended.returncode:
        raise SystemExit(f"{name} ended with status {ended.returncode}: {ended.stderr[-2000:]}")
    made = list(read_records(StepRecord, directory / name / "metrics.jsonl"))
    summary = parse_record(RunSummary, (directory / name / "summary.json").read_text(), name)
    return _Run(summary, made[-1].time - made[0].time, directory / name)


def _rows(runs: dict[tuple[str, int], _Run], rules: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    lending = load_config(_RUN).lending
    assert isinstance(lending, LendingConfig)
    slo, rows = Slo(*lending.objective), list[Row]()
    for rule in rules:
        mine = [runs[rule, seed] for seed in seeds]
        told = [_lending(it) for it in mine]
        users = [_users(it) for it in told]
        rows += [
            Row(rule, "step", fmean(it.seconds / (it.summary.steps - 1) for it in mine), "s"),
            Row(rule, "reward at the end", fmean(it.summary.evaluations[-1].sampled_accuracy for it in mine), ""),
            Row(rule, "TTFT, 99th percentile", fmean(1e3 * it.ttft for it in users), "ms"),
            Row(rule, "TPOT, 99th percentile", fmean(1e3 * it.tpot for it in users), "ms"),
            Row(rule, "missed their SLO", sum(it.missed for it in users), f"of {sum(it.requests for it in users)}"),
        ]
        if rule == "off":
            continue
        faster = fmean(runs["off", seed].seconds / runs[rule, seed].seconds for seed in seeds)
        blamed = sum(
            attributable(
                read_served(runs[rule, seed].directory / f"served-{number}.jsonl"),
                read_served(runs["off", seed].directory / f"served-{number}.jsonl"),
                slo,
            )
            for seed in seeds
            for number in range(lending.servers)
        )
        rows += [
            Row(rule, "lent, of the time wanted", fmean(it.share for it in told), ""),
            none(rule, "attributable misses", blamed, "requests"),
            at_least(rule, "steps per second over off", faster, "x", _GOAL),
        ]
    return rows


def _lending(run: _Run) -> LendingSummary:
    assert run.summary.lending is not None
    return run.summary.lending


def _users(lending: LendingSummary) -> ServedSummary:
    assert lending.users is not None
    return lending.users


if __name__ == "__main__":
    sys.exit(main())
