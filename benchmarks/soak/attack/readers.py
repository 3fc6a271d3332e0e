"""Every reader of a file that a user gives, given mutated files: the commands that read them, one after the other.

Invariant: before anything is mutated each command takes its file, so a mutated file is what is refused.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, never
from benchmarks.soak.attack.commands import STOPPED, Commands, Ended
from benchmarks.soak.attack.damage import drawn
from libra.route.catalogue import policy_named
from libra.trajectory import read_trajectories

EXAMPLES = Path(__file__).parents[3] / "examples"
_ATTACK = "mutated files"
_TELL = 250  # files between two lines of progress
_REAL = 20  # of them read by processes as a user starts them, which have to end as the others did
_MODEL = "Qwen/Qwen3-8B"
_HEADS = {"search_agent.jsonl": 12, "trajectories.jsonl": 12, "chat.jsonl": 12, "serving.jsonl": 12}  # lines
_COPIES = (
    *("cluster_48_a800.yaml", "cluster_mixed.yaml", "request.yaml", "engines.yaml", "lender.yaml", "calculator.yaml"),
    *("gateway.yaml", "loan.yaml", "profile_2_cores.json", "requests.csv", "requests.jsonl"),
)
_MENU = (
    "architectures: [colocated]\nnodes: [h100, l40s]\ntensor_parallel_size: [1]\nmax_num_seqs: [64]\n"
    "max_num_batched_tokens: [2048]\nengines: [1, 2]\n"
)


@dataclass(frozen=True, slots=True)
class Reader:
    """A command, and the file among its words that is mutated."""

    file: str
    words: tuple[str, ...]


_PLAN = ("plan", "cluster_48_a800.yaml", "-m", "model.json", "-t", "search_agent.jsonl", "-r", "request.yaml")
_PLANNED = (*_PLAN, "-p", "roofline", "--no-simulation")
_RUN_PLAN = ("plan", "calculator.yaml", "-t", "trajectories.jsonl", "-p", "profile_2_cores.json", "--no-simulation")
_CHECK = ("lend", "check", "lender.yaml", "--traffic", "chat.jsonl", "--ttft", "1", "--tpot", "0.1")
_ASKED = ("--requests", "serving.jsonl", "--slo", "ttft_p99=1", "--rate", "2", "--menu", "menu.yaml")
_SEARCH = ("search", "cluster_mixed.yaml", "--model", "model.json", *_ASKED, "--profile", "roofline", "--jobs", "1")
_ROUTE = ("route", "gateway.yaml", "--port", "0", "--state", "state.json", "--learn-from", "trajectories.jsonl")
READERS = (
    *(Reader(file, _PLANNED) for file in ("cluster_48_a800.yaml", "model.json", "search_agent.jsonl", "request.yaml")),
    *(Reader(file, _RUN_PLAN) for file in ("calculator.yaml", "profile_2_cores.json", "trajectories.jsonl")),
    Reader("calculator.yaml", ("run", "calculator.yaml")),
    Reader("plan.json", ("explain", "plan.json")),
    Reader("plan.json", ("rehearse", "plan.json", "-t", "search_agent.jsonl", "--steps", "1")),
    Reader("plan.json", ("simulate", "plan.json", "-t", "search_agent.jsonl")),
    Reader("engines.yaml", ("simulate", "engines.yaml", "--requests", "requests.jsonl")),
    *(Reader(it, ("simulate", "engines.yaml", "--requests", it)) for it in ("requests.jsonl", "requests.csv")),
    *(Reader(file, _CHECK) for file in ("lender.yaml", "chat.jsonl")),
    *(Reader(file, _SEARCH) for file in ("cluster_mixed.yaml", "menu.yaml", "serving.jsonl")),
    *(Reader(file, _ROUTE) for file in ("gateway.yaml", "state.json")),
    Reader("engines.yaml", ("emulate", "engines.yaml", "--port", "0")),
    *(Reader(file, ("lend", "serve", "loan.yaml")) for file in ("loan.yaml", "certificate.json")),
    Reader("trajectories.jsonl", ("trace", "stats", "trajectories.jsonl")),
    *(
        Reader(f"run/{name}", ("report", "run"))
        for name in ("metrics.jsonl", "decisions.jsonl", "events.jsonl", "config.json", "summary.json")
    ),
)


def read_mutated(folder: Path, run: Path, count: int, say: Callable[[str], None], seed: int = 0) -> Iterator[Row]:
    """Give `count` mutated files to the readers in turn. `run`: directory of a run that has ended."""
    rng, commands = random.Random(f"files:{seed}"), Commands()
    whole, here, wrong, real, statuses = folder / "whole", folder / "mutated", list[str](), list[str](), Counter[int]()
    longest = largest = 0.0
    write_inputs(whole, run)
    try:
        _require_whole(commands, whole, here)
        for number in range(count):
            reader = READERS[number % len(READERS)]
            shutil.copytree(whole, here)
            damages = [drawn(rng) for _ in range(rng.choice((1, 1, 2)))]
            for damage in damages:
                if (here / reader.file).is_file() and not (here / reader.file).is_symlink():
                    damage(here / reader.file)
            ended = commands.run(reader.words, here)
            statuses[ended.status] += 1
            longest, largest = max(longest, ended.seconds), max(largest, ended.peak / 1e6)
            if ended.wrong:
                wrong.append(f"{reader.words[0]} of {reader.file}, {damages}: {ended.wrong}")
                say(wrong[-1])
            if number % max(1, count // _REAL) == 0 and ended.status:
                real += _as_a_process(reader, here, ended)
            shutil.rmtree(here)
            if number and number % _TELL == 0:
                say(f"{number:,} of {count:,} files, {len(wrong)} neither read nor refused")
    finally:
        commands.close()
    said = ", ".join(f"{times:,} of status {status}" for status, times in sorted(statuses.items()))
    taken = f"at most {longest:.1f} s and {largest:,.0f} MB"
    looked = f"{count:,} ({said}; {taken})"
    yield never(_ATTACK, "neither read nor refused in one line in 5 s and 500 MB", wrong, looked)
    yield never(_ATTACK, "ended otherwise in a process of its own", real, f"about {_REAL}")


def _require_whole(commands: Commands, whole: Path, here: Path) -> None:
    """Raises RuntimeError where a command does not take its file before that is mutated."""
    for reader in READERS:
        shutil.copytree(whole, here)
        ended = commands.run(reader.words, here)
        if ended.status and STOPPED not in ended.said:
            raise RuntimeError(f"{' '.join(reader.words)} does not take its own file: {ended.said}{ended.raised}")
        shutil.rmtree(here)


def write_inputs(folder: Path, run: Path) -> None:
    """Files that the readers take, in a new directory: examples, most of them shortened."""
    folder.mkdir()
    for name, count in _HEADS.items():
        kept = (EXAMPLES / name).read_text(encoding="utf-8").splitlines(keepends=True)[:count]
        (folder / name).write_text("".join(kept), encoding="utf-8")
    for name in _COPIES:
        shutil.copy(EXAMPLES / name, folder)
    shutil.copy(EXAMPLES / "chat_use_60.json", folder / "certificate.json")
    shutil.copytree(run, folder / "run", ignore=shutil.ignore_patterns("checkpoint-*", "model", "logs", "*.html"))
    shutil.copytree(run / "model", folder / "policy")  # that the loan's engine serves
    loan = (folder / "loan.yaml").read_text(encoding="utf-8").replace("max_model_len: 16384", "max_model_len: 128")
    (folder / "loan.yaml").write_text(loan, encoding="utf-8")
    (folder / "menu.yaml").write_text(_MENU, encoding="utf-8")
    models = Path(__file__).parents[3] / "src" / "libra" / "hardware" / "models"
    shutil.copy(models / f"{_MODEL.replace('/', '--')}.json", folder / "model.json")
    policy = policy_named("cmlfq")
    for trajectory in read_trajectories(folder / "trajectories.jsonl"):
        policy.finished(trajectory)
    (folder / "state.json").write_text(json.dumps(policy.snapshot()), encoding="utf-8")
    _libra(*_PLANNED, "-o", "plan.json", directory=folder)


def _as_a_process(reader: Reader, here: Path, ended: Ended) -> list[str]:
    done = _libra(*reader.words, directory=here)
    if (done.returncode, done.stderr.count("\n")) == (ended.status, ended.said.count("\n")):
        return []
    return [f"{reader.words[0]} of {reader.file}: status {done.returncode}, not {ended.status}: {done.stderr[:200]}"]


def _libra(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "libra.cli.app", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
