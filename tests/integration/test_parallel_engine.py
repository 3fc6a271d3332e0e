"""An engine whose model is divided among two processes: each finds the weights by itself, and takes its slice."""

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
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import Generate, LoadWeights, StartEngine
from libra.backends.transport.shared_memory import WeightBuffer, create_buffer, make_layout
from libra.backends.vllm.engine import VllmEngine
from libra.config.run import ModelConfig

directory, gaps = Path(sys.argv[1]), []
write_tiny_model(directory, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=2), "0123456789+;", 256)
config, models = AutoConfig.from_pretrained(directory), []
for seed in range(2):
    torch.manual_seed(seed)
    models.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
models[0].save_pretrained(directory)
layout, size = make_layout([(n, tuple(p.shape)) for n, p in models[0].named_parameters()], "float32")
buffer = WeightBuffer(create_buffer(), size)
kv = 4096 * kv_bytes_per_token(directory, "float32") // 2
engine = VllmEngine(
    StartEngine(str(directory), 256, 4, "float32", kv, layout, size, 0, 1.0, (0,), False, gpus=2), buffer
)
engine.load(LoadWeights(1, 1, buffer.write(1, layout, dict(models[1].named_parameters()))))
prompt, tokens, logprobs = [5, 6, 7, 8, 9, 10], [], []
engine.add(Generate("a", prompt, 16, 1.0, -1, 0))
while engine.generating:
    for part in engine.step():
        tokens += part.tokens
        logprobs += part.logprobs
for model in models:
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0], -1)[len(prompt) - 1 :]
    gaps.append(max(abs(float(scores[i, t]) - logprobs[i]) for i, t in enumerate(tokens)))
print(json.dumps([len(tokens), gaps]), flush=True)
os._exit(0)
"""


def test_every_process_of_an_engine_takes_its_slice_of_new_weights(tmp_path: Path) -> None:
    environment = {**os.environ, **WORKER_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, (old, new) = json.loads(done.stdout.splitlines()[-1])
    assert count == 16
    assert new < 1e-3
    assert old > 0.01
