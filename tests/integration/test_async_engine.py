"""An engine that schedules an iteration ahead, while its weights change: whose weights a token is of.

vLLM never schedules ahead on CPUs. It can, and here it has to: the rest of the engine is as on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT

pytestmark = pytest.mark.integration

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.platforms.cpu import CpuPlatform

checked = CpuPlatform.check_and_update_config.__func__

def ahead(cls, config):
    checked(cls, config)
    config.scheduler_config.async_scheduling = True

CpuPlatform.check_and_update_config = classmethod(ahead)

from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import Generate, LoadWeights, StartEngine
from libra.backends.transport.shared_memory import WeightBuffer, create_buffer, make_layout
from libra.backends.vllm.engine import VllmEngine
from libra.config.run import ModelConfig

directory = Path(sys.argv[1])
write_tiny_model(directory, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), "0123456789+;", 256)
config = AutoConfig.from_pretrained(directory)
models = []
for seed in range(3):
    torch.manual_seed(seed)
    models.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for parameter in models[-1].parameters():
            parameter.mul_(3.0)  # away from the uniform distribution
models[0].save_pretrained(directory)
layout, size = make_layout([(n, tuple(p.shape)) for n, p in models[0].named_parameters()], "float32")
buffer = WeightBuffer(create_buffer(), size)
kv = 4096 * kv_bytes_per_token(directory, "float32")
engine = VllmEngine(
    StartEngine(str(directory), 256, 4, "float32", kv, layout, size, 0, 1.0, (0,), False, asynchronous=True), buffer
)
core = engine._engine.engine_core.engine_core
prompts = {f"t{i}": [4 + (i + p) % 12 for p in range(5 + 3 * i)] for i in range(3)}
made = {name: [] for name in prompts}  # (token, log-prob, version)

def take(sampled):
    for part in sampled:
        made[part.turn] += [(t, l, engine.version) for t, l in zip(part.tokens, part.logprobs)]

for name, prompt in prompts.items():
    engine.add(Generate(name, prompt, 40, 1.0, -1, 0))
in_flight = refused = 0
for version in (1, 2):
    weights = {n: p for n, p in models[version].named_parameters()}
    checksum = buffer.write(version % 2, layout, weights)
    for _ in range(8):
        take(engine.step())
    in_flight += len(core.batch_queue)
    order = LoadWeights(version, version % 2, checksum)
    try:
        engine.load(order)
    except RuntimeError:
        refused += 1
    for sampled in engine.drained():
        take(sampled)
    engine.load(order)
while engine.generating:
    take(engine.step())

def gap(name, shift):
    "Largest distance to log-probs under the stated versions, of which the first changes `shift` tokens earlier."
    prompt, parts = prompts[name], made[name]
    tokens, versions = prompt + [t for t, _, _ in parts], [v for _, _, v in parts]
    first = versions.index(1)
    versions[first - shift : first] = [1] * shift
    versions = [versions[0]] * (len(prompt) - 1) + versions  # of the pass that reads each token but the last
    cache, found, at = None, [], 0
    while at < len(versions):
        end = at
        while end < len(versions) and versions[end] == versions[at]:
            end += 1
        with torch.no_grad():
            out = models[versions[at]](torch.tensor([tokens[at:end]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        scores = torch.log_softmax(out.logits[0], -1)
        found += [float(scores[i, tokens[at + i + 1]]) for i in range(end - at)]
        at = end
    found = found[len(prompt) - 1 :]
    return max(abs(one - other) for one, (_, other, _) in zip(found, parts, strict=True))

print(json.dumps({
    "in_flight": in_flight, "refused": refused,
    "lengths": [len(parts) for parts in made.values()],
    "versions": [sorted({v for _, _, v in parts}) for parts in made.values()],
    "gap": max(gap(name, 0) for name in prompts), "mislabelled": min(gap(name, 1) for name in prompts),
}), flush=True)
os._exit(0)
"""


def test_tokens_of_an_iteration_in_flight_are_of_the_weights_that_made_them(tmp_path: Path) -> None:
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["in_flight"] == found["refused"] == 2  # at each load one was, and the load alone is refused
    assert found["lengths"] == [40] * 3  # no turn is lost
    assert found["versions"] == [[0, 1, 2]] * 3
    assert found["gap"] < 1e-3
    assert found["mislabelled"] > 0.01  # the check can tell versions apart by a single token
