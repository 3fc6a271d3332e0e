"""A prefill and a decode engine of vLLM's: KV goes from one to the other, and what is generated is what one engine
generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.sim.clock import TICKS

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
RATE = 20_000.0  # KV tokens/s
BLOCK = 32
SERVE = """
import json, sys
from pathlib import Path
from benchmarks.fidelity.models import vocabulary, write_model
from benchmarks.fidelity.real_engine import RealEngine, run
from benchmarks.fidelity.real_pair import PairedEngine, run_pair
from benchmarks.fidelity.sessions import Sessions
from benchmarks.fidelity.summary import outcomes
from benchmarks.fidelity.texts import Texts
from benchmarks.fidelity.workloads import Engine, Group, Poisson, Workload

model = Path(sys.argv[1]) / "tiny"
write_model(model, "tiny")
group = Group(sessions=5, arrivals=Poisson(kind="poisson", per_second=8.0), prompt=(40, 300), output=(4, 12),
              turns=(1, 3), tool_tokens=(5, 40), tool_seconds=(0.0, 0.1))
workload = Workload(name="w", why="w", seed=5, engine=Engine(max_num_seqs=8, kv_blocks=64, max_model_len=512),
                    groups=(group,))
config = workload.engine.config()

def served(requests):
    return [{"number": it.number, "arrival": it.arrival, "prefill_end": it.prefill_end, "first": it.first_token,
             "finish": it.finish, "prompt": it.prompt_tokens, "output": it.output_tokens} for it in requests]

def texts_of(texts):
    return {name: tokens for name, tokens in sorted(texts._own.items())}

alone, together = Texts(vocabulary(model)), Texts(vocabulary(model))
run([RealEngine(0, model, config)], Sessions(workload), lambda request: 0, alone)
prefill, decode = PairedEngine(0, model, config), PairedEngine(1, model, config)
requests = run_pair(prefill, decode, Sessions(workload), float(sys.argv[2]), together)
outcomes(requests)
decoded = [[step.decodes, step.chunks] for step in decode.steps]
prefilled = [[step.decodes, step.chunks] for step in prefill.steps]
prefill.forget(), decode.forget()  # neither holds anything any more
print(json.dumps({"alone": texts_of(alone), "pair": texts_of(together), "requests": served(requests),
                  "decoded": decoded, "prefilled": prefilled}))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path_factory.mktemp("pair")), str(RATE)],
        cwd=REPOSITORY,
        env={**os.environ, **WORKER_ENVIRONMENT},
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_pair_generates_what_one_engine_does(pair: dict[str, Any]) -> None:
    assert pair["pair"] == pair["alone"]


def test_a_pull_takes_its_time_on_the_link(pair: dict[str, Any]) -> None:
    assert len(pair["requests"]) > 5
    for one in pair["requests"]:
        assert one["arrival"] < one["prefill_end"] < one["first"] <= one["finish"]
    whole = [it for it in pair["requests"] if it["number"] < 5]  # first turns: nothing of theirs is cached
    for one in whole:
        blocks = -(-one["prompt"] // BLOCK)
        assert one["first"] - one["prefill_end"] > blocks * BLOCK / RATE * TICKS


def test_each_engine_does_its_part(pair: dict[str, Any]) -> None:
    assert all(decodes == 0 for decodes, _ in pair["prefilled"])
    computed = [chunk for _, chunks in pair["decoded"] for chunk in chunks]
    assert {new for new, _ in computed} == {1}  # the last token of each prompt, once more
    assert sorted(before + 1 for _, before in computed) == sorted(it["prompt"] for it in pair["requests"])
    assert sum(decodes for decodes, _ in pair["decoded"]) == sum(it["output"] - 1 for it in pair["requests"])
