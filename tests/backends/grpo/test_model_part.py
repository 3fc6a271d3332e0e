"""A model on its way to shards: a layer that is divided leaves nothing whole behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import json, weakref
from types import SimpleNamespace
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig
from libra.backends.grpo import model_part

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config)
whole = [weakref.ref(parameter) for parameter in model.parameters()]
left, fully_shard = [len(whole)], model_part.fully_shard

def counted(module, **options):
    fully_shard(module, **options)
    left.append(sum(each() is not None for each in whole))

model_part.fully_shard = counted
model_part.ShardedModel(model, SimpleNamespace(device=torch.device("cpu"), mixed_precision="no"), model_part.ALONE)
print(json.dumps(left))
"""


def test_layers_are_given_up_one_after_the_other() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout.splitlines()[-1])
    assert len(left) == 5 and left == sorted(left, reverse=True) and len({*left}) == 5
    assert left[-1] == 0
