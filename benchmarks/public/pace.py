"""Seconds a token of engines beside what was measured on them.

Invariant: a case is a file of engines and a log, simulated as `libra simulate` does. The hosts of the sources are not
known: a row is priced with the host that its file names, and beside it, with `fast`, a host of 0.8 of that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase, engines_with
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.replay import Replay
from libra.trajectory import read_trajectories

LARGEST, MEAN = 0.20, 0.10


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    engines: str
    log: str
    concurrency: int
    published: float  # milliseconds a token after the first, mean
    fitted: bool = False  # whether `fast` was fitted to it


_RUNS = (
    _Run("Llama-3.1-8B, A100-40GB, without graphs, one at a time", "t6_eager", "one", 1, 25.6, fitted=True),
    _Run("Qwen3-8B, H100, vLLM 0.11, four at a time", "q8_h100", "sg100", 4, 7.38, fitted=True),
    _Run("Qwen3-14B, L40S, ten at a time", "q14_l40s", "sg100", 10, 42.4),
    _Run("Qwen3-14B AWQ, L40S, ten at a time", "q14awq_l40s", "sg100", 10, 15.2),
)


def pace_groups(folder: Path) -> list[CaseGroup]:
    """The runs with the host of their files, and with a faster one."""
    named = (("pace of engines", None), ("pace of engines, fast host", "fast"))
    return [CaseGroup(name, "ms a token", list(_cases(folder, host)), MEAN) for name, host in named]


def _cases(folder: Path, host: str | None) -> Iterator[PublicCase]:
    for run in _RUNS:
        note = "fitted to" if host is not None and run.fitted else ""
        yield PublicCase(run.name, run.published, _milliseconds(folder, run, host), LARGEST, note)


def _milliseconds(folder: Path, run: _Run, host: str | None) -> float:
    deployment = engines_with(folder / f"{run.engines}.yaml", **({} if host is None else {"host": host}))
    log = list(read_trajectories(folder / f"{run.log}.jsonl"))
    found = metrics_of(simulate(deployment.engines, Replay(log, concurrency=run.concurrency), deployment.route)).tpot
    assert found is not None
    return 1e3 * found.mean
