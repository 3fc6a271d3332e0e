"""The bar that every way of sharing steps has to pass: the parameters of one process on the concatenated batches.

Twenty steps. The samples are so uneven that the replicas' shares differ much in generated tokens, whoever is present.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from libra.backends.transport.messages import Precision
from libra.backends.transport.trainer_messages import Sample

Tensors = Mapping[str, torch.Tensor]

STEPS = 20
LIMITS: Mapping[Precision, float] = {"fp64": 1e-9, "fp32": 1e-4}
TOKENS = 14  # ids that samples are made of, after the special ones
RATE = 1e-3


def write_model(directory: Path) -> Path:
    """A tiny GPT-2: unlike newer models it has no step of its own that is always made in single precision."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 32,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def sample(number: int, prompt: int, generated: int, advantage: float) -> Sample:
    length = prompt + generated
    return Sample(
        id=str(number),
        tokens=[4 + (7 * number + 3 * place + place // 5) % TOKENS for place in range(length)],
        generated=[place >= prompt for place in range(length)],
        logprobs=[0.0] * prompt + [-2.3 - 0.05 * ((number + place) % 7) for place in range(generated)],
        versions=[-1] * prompt + [0] * generated,
        advantage=advantage,
    )


def batch(step: int) -> list[Sample]:
    """Seven samples of step `step`; one writes almost all of its many tokens, the others few."""
    sizes = [(2, 40 + step % 5), (25, 3), (20, 1 + step % 3), (18, 4), (6, 5), (5, 2), (9, 1)]
    return [
        sample(10 * step + index, prompt, own, (1.0, -0.5, 0.75, -1.25)[(10 * step + index) % 4])
        for index, (prompt, own) in enumerate(sizes)
    ]


def counts(samples: list[Sample]) -> tuple[int, int]:
    """Sequences and generated tokens."""
    return len(samples), sum(sum(sample.generated) for sample in samples)


def distance(found: Tensors, wanted: Tensors, start: Tensors) -> float:
    """|theta - ref| / |ref - theta_0| over all parameters."""
    assert found.keys() == wanted.keys() == start.keys()
    theta, reference, first = (
        torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])
        for tensors in (found, wanted, start)
    )
    return float((theta - reference).norm() / (reference - first).norm())
