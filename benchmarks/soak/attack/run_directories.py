"""Damaged directories of an interrupted run, each resumed.

Invariant: the run is a real one; it is read by `libra run --resume` as far as its first process would start.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from benchmarks.rows import Row, never
from benchmarks.soak.attack.commands import STOPPED, Commands
from benchmarks.soak.attack.damage import STRANGE, damage_run, drawn

_ATTACK, NAME = "damaged runs", "attacked"
_TELL = 250  # directories between two lines of progress
_SHORT = {"max_model_len": 64, "max_num_seqs": 16, "kv_tokens": 1024}
_LONG = {"max_model_len": 192, "max_num_seqs": 5, "kv_tokens": 1024}
_RUN = {
    "name": NAME,
    "environment": {"kind": "calculator", "tools": ["calculator"], "train_prompts": 32, "heldout_prompts": 16},
    "model": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1},
    "warm_up": {"steps": 10, "batch": 32},
    "checkpoint_every": 1,
    "training": {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4},
    "planner": {"period": 2},
    "engines": {"short": _SHORT, "long": _LONG},
    "start": {
        "replicas": 2,
        "buckets": [{"shape": "short", "engines": 1, "up_to": 40}, {"shape": "long", "engines": 1, "up_to": 192}],
    },
}


def make_run(folder: Path) -> Path:
    """A run that has ended, and its configuration in `folder`; its directory."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(_RUN), encoding="utf-8")
    command = [sys.executable, "-m", "libra.cli.app", "run", file.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the run that is to be damaged ended with {done.returncode}: {done.stderr[-500:]}")
    return folder / "runs" / NAME


def resume_damaged(folder: Path, count: int, say: Callable[[str], None], seed: int = 0) -> Iterator[Row]:
    """Resume `count` damaged copies of the run that `make_run` left in `folder`."""
    rng, commands, wrong, gone_on = random.Random(f"runs:{seed}"), Commands(), list[str](), 0
    words, copy = ("run", "run.yaml", "--resume"), folder / "damaged"
    longest = largest = 0.0
    try:
        if STOPPED not in (ended := commands.run(words, folder)).said:
            raise RuntimeError(f"the whole run is not resumed: {ended.said}{ended.raised}")
        for number in range(count):
            copy.mkdir()
            shutil.copy(folder / "run.yaml", copy)
            shutil.copytree(folder / "runs", copy / "runs")
            damages = [(rng.random(), drawn(rng)) for _ in range(rng.choice((1, 1, 2)))]
            damage_run(copy / "runs" / NAME, damages, rng.choice((None, None, None, *STRANGE)))
            ended = commands.run(words, copy)
            gone_on += STOPPED in ended.said
            longest, largest = max(longest, ended.seconds), max(largest, ended.peak / 1e6)
            if ended.wrong:
                wrong.append(f"{damages}: {ended.wrong}")
                say(wrong[-1])
            shutil.rmtree(copy)
            if number and number % _TELL == 0:
                say(f"{number:,} of {count:,} directories, {len(wrong)} neither resumed nor refused")
    finally:
        commands.close()
    looked = f"{count:,} ({gone_on:,} go on; at most {longest:.1f} s and {largest:,.0f} MB)"
    yield never(_ATTACK, "neither resumed nor refused in one line in 5 s and 500 MB", wrong, looked)
