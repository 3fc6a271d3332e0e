"""Every reader of a file that a user gives, given mutated files, and `libra run --resume`, given damaged directories of
an interrupted run.

Invariant: before anything is mutated each command takes its file, so a mutated file is what is refused. The run is a
real one; it is read as far as its first process would start.
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

import yaml

from benchmarks.rows import Row, never
from benchmarks.soak.attack.commands import Commands, Ended
from libra.route.catalogue import policy_named
from libra.trajectory import read_trajectories
from tests.fakes.stopped_run import STOPPED
from tests.oracles.damage import STRANGE, damage_run, drawn

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
EXAMPLES, RUN = ROOT / "examples", HERE / "run.yaml"
NAME = yaml.safe_load(RUN.read_text(encoding="utf-8"))["name"]
_KNOWN = yaml.safe_load((HERE / "readers.yaml").read_text(encoding="utf-8"))
_TELL = 250  # files or directories between two lines of progress
_REAL = 20  # files read by processes as a user starts them, which have to end as the others did
_MODEL = "Qwen--Qwen3-8B.json"
_HEADS = {"search_agent.jsonl": 12, "trajectories.jsonl": 12, "chat.jsonl": 12, "serving.jsonl": 12}  # lines
_COPIES = (
    *("cluster_48_a800.yaml", "cluster_mixed.yaml", "request.yaml", "engines.yaml", "lender.yaml", "calculator.yaml"),
    *("gateway.yaml", "loan.yaml", "profile_2_cores.json", "requests.csv", "requests.jsonl"),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reader:
    """A command, and the file among its words that is mutated."""

    file: str
    words: tuple[str, ...]


READERS = [Reader(file, tuple(words.split())) for words, *files in _KNOWN["readers"] for file in files]


def read_mutated(folder: Path, run: Path, count: int, say: Say, seed: int = 0) -> Iterator[Row]:
    """Give `count` mutated files to the readers in turn. `run`: directory of a run that has ended."""
    rng, whole, here = random.Random(f"files:{seed}"), folder / "whole", folder / "mutated"
    real, statuses = list[str](), Counter[int]()
    write_inputs(whole, run)

    def attempt(commands: Commands, number: int) -> tuple[str, Ended]:
        reader = READERS[number % len(READERS)]
        shutil.copytree(whole, here)
        damages = [drawn(rng) for _ in range(rng.choice((1, 1, 2)))]
        for damage in damages:
            if (here / reader.file).is_file() and not (here / reader.file).is_symlink():
                damage(here / reader.file)
        ended = commands.run(reader.words, here)
        statuses[ended.status] += 1
        if number % max(1, count // _REAL) == 0 and ended.status:
            real.extend(_as_a_process(reader, here, ended))
        shutil.rmtree(here)
        return f"{reader.words[0]} of {reader.file}, {damages}", ended

    with Commands() as commands:
        _require_whole(commands, whole, here)
        wrong, taken = _attempts(commands, count, attempt, say, "files", "read")
    said = ", ".join(f"{times:,} of status {status}" for status, times in sorted(statuses.items()))
    case = "mutated files"
    yield never(case, "neither read nor refused in one line in 5 s and 500 MB", wrong, f"{count:,} ({said}; {taken})")
    yield never(case, "ended otherwise in a process of its own", real, f"about {_REAL}")


def resume_damaged(folder: Path, count: int, say: Say, seed: int = 0) -> Iterator[Row]:
    """Resume `count` damaged copies of the run that `make_run` left in `folder`."""
    rng, words, copy, gone_on = random.Random(f"runs:{seed}"), ("run", RUN.name, "--resume"), folder / "damaged", 0

    def attempt(commands: Commands, number: int) -> tuple[str, Ended]:
        nonlocal gone_on
        copy.mkdir()
        shutil.copy(folder / RUN.name, copy)
        shutil.copytree(folder / "runs", copy / "runs")
        damages = [(rng.random(), drawn(rng)) for _ in range(rng.choice((1, 1, 2)))]
        damage_run(copy / "runs" / NAME, damages, rng.choice((None, None, None, *STRANGE)))
        ended = commands.run(words, copy)
        gone_on += STOPPED in ended.said
        shutil.rmtree(copy)
        return str(damages), ended

    with Commands() as commands:
        if STOPPED not in (ended := commands.run(words, folder)).said:
            raise RuntimeError(f"the whole run is not resumed: {ended.said}{ended.raised}")
        wrong, taken = _attempts(commands, count, attempt, say, "directories", "resumed")
    metric = "neither resumed nor refused in one line in 5 s and 500 MB"
    yield never("damaged runs", metric, wrong, f"{count:,} ({gone_on:,} go on; {taken})")


def _attempts(
    commands: Commands, count: int, attempt: Callable[[Commands, int], tuple[str, Ended]], say: Say, of: str, done: str
) -> tuple[list[str], str]:
    """The attempts that went wrong, and the most that one took."""
    wrong, longest, largest = list[str](), 0.0, 0.0
    for number in range(count):
        name, ended = attempt(commands, number)
        longest, largest = max(longest, ended.seconds), max(largest, ended.peak / 1e6)
        if ended.wrong:
            wrong.append(f"{name}: {ended.wrong}")
            say(wrong[-1])
        if number and number % _TELL == 0:
            say(f"{number:,} of {count:,} {of}, {len(wrong)} neither {done} nor refused")
    return wrong, f"at most {longest:.1f} s and {largest:,.0f} MB"


def _require_whole(commands: Commands, whole: Path, here: Path) -> None:
    """Raises RuntimeError where a command does not take its file before that is mutated."""
    for reader in READERS:
        shutil.copytree(whole, here)
        ended = commands.run(reader.words, here)
        if ended.status and STOPPED not in ended.said:
            raise RuntimeError(f"{' '.join(reader.words)} does not take its own file: {ended.said}{ended.raised}")
        shutil.rmtree(here)


def make_run(folder: Path) -> None:
    """A run that has ended, and its configuration, in `folder`."""
    shutil.copy(RUN, folder)
    done = _libra("run", RUN.name, directory=folder)
    if done.returncode:
        raise RuntimeError(f"the run that is to be damaged ended with {done.returncode}: {done.stderr[-500:]}")


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
    (folder / "menu.yaml").write_text(yaml.safe_dump(_KNOWN["menu"]), encoding="utf-8")
    shutil.copy(ROOT / "src/libra/hardware/models" / _MODEL, folder / "model.json")
    policy = policy_named("cmlfq")
    for trajectory in read_trajectories(folder / "trajectories.jsonl"):
        policy.finished(trajectory)
    (folder / "state.json").write_text(json.dumps(policy.snapshot()), encoding="utf-8")
    _libra(*_KNOWN["plan"].split(), "-o", "plan.json", directory=folder)


def _as_a_process(reader: Reader, here: Path, ended: Ended) -> list[str]:
    done = _libra(*reader.words, directory=here)
    if (done.returncode, done.stderr.count("\n")) == (ended.status, ended.said.count("\n")):
        return []
    return [f"{reader.words[0]} of {reader.file}: status {done.returncode}, not {ended.status}: {done.stderr[:200]}"]


def _libra(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "libra.cli.app", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
