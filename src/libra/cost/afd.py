"""Times of attention and FFN on separate GPUs: the stages of layers with experts, and all other work.

Invariant: an attention rank computes everything except the routed experts; router, shared experts and dense layers stay
with attention, as in afd-plugin for vLLM 0.26. An FFN rank is one GPU with its share of every layer's experts. Times
are kernel times from one source, which the grid names.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from libra.cost.grid import EngineGrid
from libra.hardware.model import ModelSpec


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Times of one model on attention ranks of `attention.tp` GPUs and on `ffn` FFN ranks."""

    attention: EngineGrid  # times of an attention rank for all layers with experts
    layers: int  # with experts
    dense: int  # layers without experts
    tokens: tuple[int, ...]  # axis of `outside`, `head` and `experts`
    outside: tuple[float, ...]  # dense MLPs and output head, by tokens of an attention rank
    head: tuple[float, ...]  # the head's part of `outside`, by logits
    experts: tuple[float, ...]  # one layer on the fullest FFN rank, by tokens of all attention ranks
    ffn: int
    token_bytes: float  # bytes that cross the network for each token and layer, one way
    source: str

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or any(low >= high for low, high in pairwise(self.tokens)):
            raise ValueError(f"StageGrid.tokens is {self.tokens}; list two or more rising values")
        if not len(self.tokens) == len(self.outside) == len(self.head) == len(self.experts):
            raise ValueError(
                "StageGrid.outside, head and experts need a time for each of tokens; measure the missing ones"
            )

    def outside_seconds(self, tokens: float) -> float:
        return _between(self.tokens, self.outside, tokens)

    def head_seconds(self, logits: float) -> float:
        return _between(self.tokens, self.head, logits)

    def dense_seconds(self, tokens: float) -> float:
        """Seconds of the MLPs of all layers without experts."""
        return self.outside_seconds(tokens) - self.head_seconds(tokens)

    def experts_seconds(self, tokens: float) -> float:
        return _between(self.tokens, self.experts, tokens)

    @property
    def least_expert_seconds(self) -> float:
        """Lower bound of a layer's expert seconds per token, for any number of tokens."""
        beyond = (self.experts[-1] - self.experts[-2]) / (self.tokens[-1] - self.tokens[-2])
        return min(beyond, *(seconds / count for count, seconds in zip(self.tokens, self.experts, strict=True)))


def token_copies(model: ModelSpec, ffn: int) -> float:
    """Mean number of FFN ranks that receive a token, if all experts are equally likely."""
    assert model.experts is not None
    return ffn * (1 - (1 - 1 / ffn) ** model.experts.active)


def afd_refusal(model: ModelSpec, attention: int, ffn: int, micro_batches: int) -> str | None:
    """Reason why attention and FFN cannot be separated in this way, starting with the key; None if they can."""
    if model.experts is None:
        return f"afd: {model.name} has no experts for FFN ranks: leave afd out, or name a mixture of experts"
    if attention % ffn:
        return (
            f"afd.attention is {attention}, not a multiple of ffn {ffn}: make it a multiple, since all FFN ranks "
            f"serve equally many attention ranks"
        )
    if model.experts.count % ffn:
        return f"afd.ffn is {ffn}; it must divide the {model.experts.count} experts of {model.name}"
    if micro_batches < 1:
        return f"afd.micro_batches is {micro_batches}; set it to 1 or more"
    return None


def _between(axis: tuple[int, ...], seconds: tuple[float, ...], at: float) -> float:
    """Interpolate linearly between points; beyond the last point, extrapolate the last interval."""
    if at <= axis[-1]:
        return float(np.interp(at, axis, seconds))
    slope = (seconds[-1] - seconds[-2]) / (axis[-1] - axis[-2])
    return seconds[-1] + slope * (at - axis[-1])
