"""How fast devices train: rates achieved over whole layers, from published runs.

Invariant: `linear` is the most that devices of the kind were measured to reach over whole training steps, and nothing
else is faster, so no price made of these rates can beat what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.config.recipe import Dtype
from libra.hardware.cluster import GPU


@dataclass(frozen=True, slots=True)
class TrainingRates:
    """What a device reaches in training. FLOP/s are achieved over whole layers, not by single kernels."""

    linear: float  # FLOP/s of dense layers; also the ceiling of model FLOP/s
    attention: float  # FLOP/s of FlashAttention, forward and backward, at the causal FLOPs
    experts: float  # FLOP/s of grouped expert layers
    bandwidth: float  # bytes/s of device memory
    source: str

    def __post_init__(self) -> None:
        for field in ("linear", "attention", "experts", "bandwidth"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; a rate is positive")
        for field in ("attention", "experts"):
            if getattr(self, field) > self.linear:
                raise ValueError(f"{field} is {getattr(self, field):g}; it is at most linear, {self.linear:g}")


# Highest model FLOPs utilisation published for bf16 training of dense models of 1-70 B parameters, whole steps:
# A100-80G 64.2 % (7B, 2K tokens; 59.6 % 13B, 55.3 % 30B), MosaicML LLM Foundry, scripts/train/benchmarking; H100
# 46.4 % there (7B), 47-48 % in Megatron-LM's README (largest of 2-462B). Single GEMMs reach 70 % on both.
_CEILING = {"A100": 0.64, "A800": 0.64, "H100": 0.47, "H800": 0.47, "H200": 0.47}
# FlashAttention-2, causal, head dimension 128, forward and backward: about 170 TFLOP/s on A100 and 335 on H100
# (Dao 2023, arXiv 2307.08691, figs. 4 and 7). LLM Foundry's runs of 32K tokens and more, with FlashAttention-1, are
# slower than these give.
_ATTENTION = {"A100": 170 / 312, "A800": 170 / 312, "H100": 335 / 989, "H800": 335 / 989, "H200": 335 / 989}
# Megatron Bridge's performance summary (25.11) has 121-233 TFLOP/s for mixtures of experts on H100 (Qwen3-30B-A3B 121,
# GPT-OSS-120B 153, Qwen3-235B-A22B 233), where dense models reach 465: all of a step, with its all-to-all.
_EXPERTS = 0.4
_MEMORY = 0.8  # of the data sheet's bandwidth: measured with linear layers, A100 1.6 of 2.04 TB/s; H100 a little more


def training_rates(gpu: GPU, dtype: Dtype = "bf16") -> TrainingRates:
    """Rates of a GPU from published training runs; a GPU without any gets the lowest share of peak that others have.

    fp16 is as fast as bf16; fp32 runs on the tensor cores as TF32, at half the FLOP/s on every data sheet since A100's.
    """
    known = gpu.name in _CEILING
    ceiling = _CEILING.get(gpu.name, min(_CEILING.values()))
    attention = _ATTENTION.get(gpu.name, min(_ATTENTION.values()))
    origin = "published training runs" if known else "no published run known, the lowest shares of others"
    flops = gpu.flops / 2 if dtype == "fp32" else gpu.flops
    return TrainingRates(
        linear=ceiling * flops,
        attention=attention * flops,
        experts=_EXPERTS * ceiling * flops,
        bandwidth=_MEMORY * gpu.bandwidth,
        source=f"{gpu.name}: {origin}, {ceiling:.0%} of {flops:.3g} FLOP/s",
    )
