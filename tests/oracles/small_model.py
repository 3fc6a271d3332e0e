"""A model of 0.6 million random parameters, written by `python small_model.py DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    shape = ModelConfig(hidden_size=128, layers=3, heads=4, kv_heads=2, head_dim=32)
    write_tiny_model(directory, shape, "".join(chr(0x4E00 + index) for index in range(124)), 4096)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)
