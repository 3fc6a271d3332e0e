"""An engine that gives up its memory and takes it again: nothing of before is used.

vLLM for CPU keeps an engine's memory. Here its worker spoils what a GPU's gives up, weights and KV; all else is vLLM's.
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
from vllm.v1.worker.cpu_worker import CPUWorker

levels = []

def spoil(worker, level=1):
    levels.append(level)
    with torch.no_grad():
        for parameter in worker.model_runner.model.parameters():
            parameter.fill_(100.0)
        for cache in worker.model_runner.kv_caches:
            cache.fill_(100.0)

CpuPlatform.is_sleep_mode_available = lambda self: True
CPUWorker.sleep = spoil
CPUWorker.wake_up = lambda worker, tags=None: None

from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import Generate, LoadWeights, StartEngine
from libra.backends.transport.shared_memory import WeightBuffer, create_buffer, make_layout
from libra.backends.vllm.engine import VllmEngine
from libra.config.run import ModelConfig

directory = Path(sys.argv[1])
write_tiny_model(directory, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), "0123456789+;", 256)
config = AutoConfig.from_pretrained(directory)
models = []
for seed in range(2):
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
    StartEngine(str(directory), 256, 4, "float32", kv, layout, size, 0, 1.0, (0,), False, sleeps=True), buffer
)
prompt = [4 + (7 * place) % 12 for place in range(70)]  # blocks of it are in the prefix cache

def gap(name, version):
    "Largest distance of a turn's log-probs to those of the version's model."
    engine.add(Generate(name, prompt, 24, 1.0, -1, 0))
    made = []
    while engine.generating:
        made += [(t, l) for part in engine.step() for t, l in zip(part.tokens, part.logprobs)]
    with torch.no_grad():
        scores = torch.log_softmax(models[version](torch.tensor([prompt + [t for t, _ in made]])).logits[0], -1)
    wanted = [float(scores[len(prompt) - 1 + at, token]) for at, (token, _) in enumerate(made)]
    return max(abs(one - other) for one, (_, other) in zip(wanted, made, strict=True))

engine.warm_up()
gaps, refused = [gap("first", 0)], 0
engine.add(Generate("under way", prompt, 24, 1.0, -1, 0))
try:
    engine.sleep()
except RuntimeError:
    refused += 1
engine.interrupt("under way")
while engine.generating:
    engine.step()
for cycle in (1, 0):
    engine.sleep()
    engine.wake()
    gone = engine.version
    if cycle == 1:  # without weights; the next time nothing of before may be in the prefix cache either
        spoiled = gap("spoiled", cycle)
        engine.forget()
    engine.load(LoadWeights(cycle, cycle, buffer.write(cycle, layout, dict(models[cycle].named_parameters()))))
    gaps.append(gap(f"awake-{cycle}", cycle))
print(json.dumps({"gaps": gaps, "spoiled": spoiled, "levels": levels, "refused": refused, "version": gone}), flush=True)
os._exit(0)
"""


def test_an_engine_that_has_slept_serves_the_weights_that_it_loads(tmp_path: Path) -> None:
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"] == 1  # with a turn under way
    assert found["levels"] == [2, 2] and found["version"] == -1
    assert max(found["gaps"]) < 1e-3
    assert found["spoiled"] > 0.1  # the memory was given up for good
