"""Asynchronous GRPO: the advantages of a group, and the decoupled clipped objective as an unnormalised sum.

Invariant: the loss of a set of samples is a plain sum over their tokens, and so is its denominator. Both add up over
micro-batches and over replicas. So one division at the end gives the result of one process with the whole batch, for
any split.

Sources: GRPO (Shao et al. 2024, arXiv 2402.03300); asymmetric clip (DAPO, arXiv 2503.14476); decoupled objective with a
proximal policy (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from libra.backends.transport.messages import Denominator
from libra.backends.transport.trainer_messages import Sample, TokenSums

if TYPE_CHECKING:
    import torch  # at run time the controller needs only advantages, and so no torch

BEHAVIOUR_WEIGHT_CAP = 2.0  # min(pi_prox / mu, 2): truncated importance weight
_EPSILON = 1e-4  # keeps the advantage of a nearly unanimous group finite


def group_advantages(rewards: Sequence[float]) -> list[float] | None:
    """Rewards of one group, centred and scaled; None if they are all equal and carry no signal."""
    spread = pstdev(rewards)
    if spread == 0:
        return None
    mean = fmean(rewards)
    return [(reward - mean) / (spread + _EPSILON) for reward in rewards]


def denominator(kind: Denominator, sequences: int, tokens: int, constant: float) -> float:
    """Divisor of a whole batch's summed loss: its generated tokens (DAPO), its sequences (GRPO, with each sequence's
    loss a mean over its own tokens), or its sequences times a constant length (Dr. GRPO, arXiv 2503.20783)."""
    match kind:
        case "tokens":
            return float(tokens)
        case "sequences":
            return float(sequences)
        case "constant":
            return sequences * constant


def loss_sum(
    logprobs: torch.Tensor,
    prox: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: tuple[float, float],
    kind: Denominator,
) -> tuple[torch.Tensor, TokenSums]:
    """-sum over tokens of w * min(r A, clip(r) A), with r = pi / pi_prox, and w = min(pi_prox / mu, 2) without
    gradient.

    `logprobs` (pi), `prox` and `behaviour` (mu) are [samples, tokens], `advantages` is [samples, 1]. `mask` [samples,
    tokens] is 1 for tokens that the policy generated. With `kind` "sequences" each sample is divided by its own length.
    The loss is a scalar tensor with gradient.
    """
    import torch

    log_weight = (prox - behaviour) * mask
    weight = log_weight.exp().clamp(max=BEHAVIOUR_WEIGHT_CAP).detach()
    ratio = ((logprobs - prox.detach()) * mask).exp()
    clipped = ratio.clamp(*clip)
    objective = weight * torch.minimum(ratio * advantages, clipped * advantages) * mask
    if kind == "sequences":
        objective = objective / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -objective.sum(), TokenSums(
        forward_tokens=mask.numel() + len(mask),  # plus the first token of each sample, which is not predicted
        generated_tokens=int(mask.sum()),
        clipped=float(((clipped != ratio) * mask).sum()),
        behaviour_weight=float((weight * mask).sum()),
        prox_gap=float(log_weight.abs().sum()),
    )


def micro_batches(samples: list[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    """Batches of samples with similar length, each at most `most_tokens` when padded (a single sample may exceed
    it)."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        if batch and (len(batch) + 1) * len(sample.tokens) > most_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def collate(
    samples: list[Sample], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ids [n, t]; mask and behaviour log-probs [n, t - 1] of the predicted tokens; advantages [n, 1]. All are on
    `device`."""
    import torch

    longest = max(len(sample.tokens) for sample in samples)

    def padded(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in values]).to(device)

    ids = padded([sample.tokens for sample in samples])  # type: ignore[misc]
    mask = padded([[float(own) for own in sample.generated] for sample in samples])[:, 1:]
    behaviour = padded([sample.logprobs for sample in samples])[:, 1:]
    return ids, mask, behaviour, torch.tensor([[sample.advantage] for sample in samples]).to(device)


# For a process that must take part in a micro-batch without a sample of its own: nothing in it is trained.
IDLE = Sample("idle", [0, 0], [False, False], [0.0, 0.0], [-1, -1], 0.0)


def made_up_sample(index: int, length: int) -> Sample:
    """A sample of `length` tokens, for measurements."""
    tokens = [4 + (index + 5 * position) % 16 for position in range(length)]
    return Sample(str(index), tokens, [True] * length, [-1.0] * length, [0] * length, 1.0)
