"""vLLM's own engine with the scheduler that lends, and a borrower in another process that takes what it is granted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]

SERVE = """
import json, sys
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

model, scheduler = sys.argv[1], sys.argv[2] or None
engine = LLMEngine.from_engine_args(EngineArgs(
    model=model, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
    kv_cache_memory_bytes=8 << 20, block_size=32, dtype="float32", enforce_eager=True, disable_log_stats=True, seed=0,
    scheduler_cls=scheduler))
print("ready", flush=True)
sys.stdin.readline()
for number in range(12):
    prompt = [4 + (number + 7 * i) % 16 for i in range(20 + 5 * number)]
    engine.add_request(str(number), {"prompt_token_ids": prompt},
                       SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, detokenize=False))
made = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            made[output.request_id] = list(output.outputs[0].token_ids)
print(json.dumps(made), flush=True)
sys.stdin.readline()
"""

BORROW = """
import json, sys, time
from pathlib import Path
from libra.backends.lend.device_token import BorrowerToken, FencedError
from libra.lend.gate import Gate, Grant

class Cost:
    def longest_step(self, view):
        return 0.05
    def catch_up(self, view):
        return 0.05

token, gate = BorrowerToken(Path(sys.argv[1]), 5.0), Gate(0.02, 0.002)
token.wish(0.06)
print("ready", flush=True)
grants, fenced, most_live, steps, until, began = 0, 0, 0, [], time.monotonic() + 60, False
while time.monotonic() < until:
    said = token.look()
    most_live = max(most_live, said.view.live)
    began = began or said.view.live > 0
    steps += token.steps()
    if began and not said.view.live:
        break
    now = time.monotonic()
    answer = gate.decide(said.view, now, Cost())
    if said.wants or not isinstance(answer, Grant) or not token.try_take(answer.expires):
        time.sleep(0.0005)
        continue
    answer = gate.decide(token.look().view, time.monotonic(), Cost())
    if isinstance(answer, Grant):
        token.shorten(answer.expires)
        grants += 1
        while time.monotonic() < answer.expires - 0.001:
            pass
    try:
        token.release()
    except FencedError:  # this process was put aside for longer than its grant
        fenced += 1
seen = {"grants": grants, "fenced": fenced, "most_live": most_live, "steps": [list(step) for step in steps]}
print(json.dumps(seen), flush=True)
"""


def serve(model: Path, scheduler: str, device: Path, borrow: bool) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Tokens of each request, and what the borrower saw."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, "LIBRA_LEND_DEVICE": str(device)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    serving = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(model), scheduler], env=environment, cwd=REPOSITORY, **pipes
    )
    try:
        assert serving.stdout is not None and serving.stdin is not None
        while (line := serving.stdout.readline()) != "ready\n":  # vLLM may print before
            assert line
        seen: dict[str, Any] = {}
        borrower = None
        if borrow:
            borrower = subprocess.Popen([sys.executable, "-c", BORROW, str(device)], cwd=REPOSITORY, **pipes)
            assert borrower.stdout is not None and borrower.stdout.readline() == "ready\n"
        serving.stdin.write("\n")
        serving.stdin.flush()
        made = json.loads(serving.stdout.readline())
        if borrower is not None:
            seen = json.loads(borrower.communicate(timeout=90)[0])
        serving.communicate("\n", timeout=60)
        return made, seen
    finally:
        serving.kill()
        serving.wait()


def test_a_lent_engine_makes_the_same_tokens_and_says_what_it_owes(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from benchmarks.fidelity.models import write_model;"
            " write_model(Path(sys.argv[1]), 'tiny')",
            str(tmp_path / "model"),
        ],
        cwd=REPOSITORY,
        check=True,
        timeout=120,
    )
    alone, _ = serve(tmp_path / "model", "", tmp_path / "none", borrow=False)
    lent, seen = serve(
        tmp_path / "model", "libra.backends.lend.scheduler.LendingScheduler", tmp_path / "device", borrow=True
    )
    assert lent == alone and len(lent) == 12
    assert seen["grants"] > 10 and seen["fenced"] < seen["grants"]
    assert seen["most_live"] == 12
    shapes = {tuple(step[:2]) for step in seen["steps"]}
    assert any(sequences > 1 and new == 0 for sequences, new in shapes)  # steps that only decode
    assert any(new > 0 for _, new in shapes)  # and prompts
    assert all(step[3] > 0 for step in seen["steps"])


def test_kv_memory_changes_hands_and_nobody_notices(tmp_path: Path) -> None:
    """Two engines, of which one serves a burst amid the other's turns: see the benchmark."""
    pytest.importorskip("vllm")
    rows = tmp_path / "rows.jsonl"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.lending", "memory", "--json", str(rows)],
        cwd=REPOSITORY,
        check=True,
        timeout=600,
        capture_output=True,
    )
    found = {row["metric"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert len(found) == 13
    assert all(row["met"] for metric, row in found.items() if row["goal"] is not None and metric != "time")
    # Apart from pages at the ends of runs of blocks, none is had by both.
    assert found["KV memory of both, at most"]["value"] < 1.01
