"""A model and its optimiser in files, in Hugging Face layout. The processes of a replica read and write them together.

Invariant: a file is whole when it has its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from libra.backends.grpo.model_part import Gathered, ModelPart

MODEL, OPTIMISER = "model.safetensors", "optimizer.safetensors"


def load_or_make(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a directory, in this type; with random weights where the directory holds none yet."""
    if any(directory.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    config = AutoConfig.from_pretrained(directory)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def save_files(
    directory: Path,
    part: ModelPart,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    config: PretrainedConfig | None,
) -> None:
    """`files` are this process's tensors by file and name. The one process that has the model's `config` writes; the
    others contribute their parts."""
    if config is not None:
        directory.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(directory)
    for name, own in files.items():
        whole = Gathered(part, own)
        if config is not None:
            unfinished = directory / f"{name}.part"
            save_file(
                {key: tensor.contiguous() for key, tensor in whole.items()}, unfinished, metadata={"format": "pt"}
            )
            unfinished.rename(directory / name)
        else:
            for key in whole:
                whole[key]


def load_file(file: Path, part: ModelPart, own: Mapping[str, torch.Tensor]) -> None:
    """One tensor of the file after the other, and of each what belongs to this process."""
    with torch.no_grad(), safe_open(file, framework="pt") as saved:
        for name, tensor in own.items():
            tensor.copy_(part.own(name, saved.get_tensor(name)))
