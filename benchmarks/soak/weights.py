"""Whether the model that a run left is one: it loads, and all its numbers are numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.soak.accounts import Check, checked


def weights(model: Path) -> Check:
    return checked("the trained weights are finite and load", _wrong(model), f"{_size(model):,} bytes")


def _wrong(model: Path) -> Iterator[str]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tensors = load_file(model / "model.safetensors")
    yield from (f"{name} is not finite" for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    loaded = AutoModelForCausalLM.from_pretrained(model)
    missing = {name for name, _ in loaded.named_parameters()} - set(tensors)
    yield from (f"{name} is not in it" for name in sorted(missing))
    with torch.no_grad():
        logits = loaded(torch.arange(16).reshape(1, -1)).logits
    if not torch.isfinite(logits).all():
        yield "its logits are not finite"


def _size(model: Path) -> int:
    return (model / "model.safetensors").stat().st_size
