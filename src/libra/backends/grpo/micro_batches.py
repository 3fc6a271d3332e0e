"""Samples as padded tensors, few enough at a time to fit in memory.

Invariant: every sample is in exactly one micro-batch; the loss is a sum, so how they are grouped does not change the
step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from libra.backends.transport.messages import Sample


def micro_batches(samples: list[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    """Samples of similar length together, each batch at most `most_tokens` when padded (one sample may exceed it)."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        if batch and (len(batch) + 1) * len(sample.tokens) > most_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ids [n, t]; mask and behaviour log-probs [n, t - 1] of the predicted tokens; advantages [n, 1]."""
    longest = max(len(sample.tokens) for sample in samples)

    def padded(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in values])

    ids = padded([sample.tokens for sample in samples])  # type: ignore[misc]
    mask = padded([[float(own) for own in sample.generated] for sample in samples])[:, 1:]
    behaviour = padded([sample.logprobs for sample in samples])[:, 1:]
    return ids, mask, behaviour, torch.tensor([[sample.advantage] for sample in samples])


# For a process that has to take part in a micro-batch and has none: nothing in it is trained.
IDLE = Sample("idle", [0, 0], [False, False], [0.0, 0.0], [-1, -1], 0.0)


def made_up_sample(index: int, length: int) -> Sample:
    """To measure with."""
    tokens = [4 + (index + 5 * position) % 16 for position in range(length)]
    return Sample(str(index), tokens, [True] * length, [-1.0] * length, [0] * length, 1.0)
