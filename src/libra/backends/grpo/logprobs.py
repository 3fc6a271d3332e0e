"""Log-probs of chosen tokens, computed without a copy of the logits.

Invariant: for more than `LOGIT_CHUNK` tokens, log-probs take the memory of one chunk of logits in the type of the
computation, and no second copy of the logits. The backward pass overwrites the logits with their gradient.
"""

from __future__ import annotations

from typing import Any

import torch

LOGIT_CHUNK = 2048  # tokens whose logits are converted together


def chosen_logprobs(logits: torch.Tensor, chosen: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """Log-probs [n, t] of the `chosen` tokens [n, t] under the policy softmax(logits / temperature), computed in
    `dtype`. The `logits` are [n, t + 1]; those of the last position are not used. The backward pass overwrites them."""
    if chosen.numel() > LOGIT_CHUNK:
        found: torch.Tensor = _Chunked.apply(logits, chosen, temperature, dtype)
        return found
    scores = torch.log_softmax(logits[:, :-1].to(dtype) / temperature, dim=-1)
    return scores.gather(-1, chosen[..., None])[..., 0]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, chosen: torch.Tensor, temperature: float, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, chosen)
        ctx.temperature, ctx.dtype = temperature, dtype
        made = [
            torch.log_softmax(part.to(dtype) / temperature, dim=-1).gather(-1, tokens[..., None])[..., 0]
            for part, tokens in zip(*_parts(logits, chosen), strict=True)
        ]
        return torch.cat(made).view(logits.shape[:2])[:, :-1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, chosen = ctx.saved_tensors
        own = torch.nn.functional.pad(gradients[0], (0, 1)).flatten().split(LOGIT_CHUNK)
        for part, tokens, gradient in zip(*_parts(logits, chosen), own, strict=True):
            scores = torch.log_softmax(part.to(ctx.dtype) / ctx.temperature, dim=-1)
            scores.exp_().mul_(-gradient[..., None]).scatter_add_(-1, tokens[..., None], gradient[..., None])
            part.copy_(scores.div_(ctx.temperature))
        return logits, None, None, None


def _parts(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Chunks of logits [tokens, vocabulary], as views, and of the chosen tokens. The last position of a sample gets
    token 0."""
    tokens = torch.nn.functional.pad(chosen, (0, 1)).flatten()
    return logits.view(-1, logits.shape[-1]).split(LOGIT_CHUNK), tokens.split(LOGIT_CHUNK)
