"""The models whose engines are timed, written to a directory.

Invariant: weights are drawn from a fixed seed, with the spread that trained ones start from; nothing is downloaded. How
long an engine takes does not depend on what they are, as long as no activation is zero or subnormal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig

ModelName = Literal["tiny", "small"]

MODEL_LENGTH = 4096  # tokens of the longest context

# Of the small one a decode step is several milliseconds of one core, nearly all of them arithmetic; of the tiny one it
# is about one, and nearly all of that is Python.
_SHAPES: dict[ModelName, ModelConfig] = {
    "tiny": ModelConfig(hidden_size=128, layers=3, heads=4, kv_heads=2, head_dim=32),
    "small": ModelConfig(hidden_size=512, layers=6, heads=8, kv_heads=4, head_dim=64),
}
_ALPHABET = {"tiny": 124, "small": 2044}  # characters; four special tokens are added


def write_model(directory: Path, name: ModelName) -> None:
    """Configuration, tokenizer and bfloat16 weights in Hugging Face layout: 0.6 and 21 million parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in _SHAPES:
        raise ValueError(f"there is no model {name!r}; choose {' or '.join(_SHAPES)}")
    alphabet = "".join(chr(0x4E00 + index) for index in range(_ALPHABET[name]))
    write_tiny_model(directory, _SHAPES[name], alphabet, MODEL_LENGTH)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def vocabulary(directory: Path) -> int:
    """Number of token ids of the model."""
    return int(json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"])
