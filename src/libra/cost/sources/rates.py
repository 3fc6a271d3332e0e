"""What share of its data sheet a GPU delivers: in kernels of an engine (the roofline's constants), and in training.

Invariant: every set of rates says where it comes from. Some GPUs were measured; the others deliver the same shares of
their data sheets as those, and their rates say so. A calibration takes the place of what it measured, of nothing else.

The measured sets are fits of the model in `layer_kernels` to the kernel times of vLLM that aiconfigurator-core 0.12
ships (NVIDIA, Apache-2.0; vLLM 0.14.0 on A100, 0.24.0 on H100, H200 and L40S), over layers of Qwen3-8B/14B/32B at tp 1
to 8, with mean errors by kind of kernel: linear layers 7 to 9 %, decode attention 5 to 7 %, prefill attention 5 to 7 %.
Grouped products are read off Qwen3-30B-A3B, L40S off Qwen3-14B. Bus bandwidths are those of `transfer`, fixed times
of all-reduces those of vLLM's own kernel.

Training rates are achieved over whole layers, from published runs: `linear` is the most that devices of the kind were
measured to reach over whole steps, and nothing else is faster, so no price made of these rates can beat what was
measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from libra.config.recipe import Dtype, Execution
from libra.cost.transfer import BUS_SHARE
from libra.hardware.cluster import GPU


@dataclass(frozen=True, slots=True)
class Rates:
    """What kernels reach. Each also takes a fixed time, which is what decode of few sequences consists of."""

    linear_flops: float  # FLOP/s of large matrix products
    bandwidth: float  # bytes/s of weights and activations
    linear_launch: float  # seconds of a linear layer beside its work
    expert_flops: float  # FLOP/s of large grouped products, one for each expert
    attention_flops: float  # FLOP/s of prefill attention
    attention_launch: float  # seconds
    cache_bandwidth: float  # bytes/s of KV read by decode attention
    decode_launch: float  # seconds of decode attention beside its work
    pass_launch: float  # seconds of one pass over activations (norm, activation) beside its work
    link_share: float  # bus bandwidth of an all-reduce of two, over the link's bandwidth in one direction
    link_latency: float  # seconds of an all-reduce beside its work
    peer_latency: float  # further seconds for each peer
    source: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of repeated measurements, and their spread: (90 % quantile - 10 % quantile) / median."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0):
            raise ValueError(f"Measured.median is {self.median}; a measurement is positive: calibrate again")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"Measured.spread is {self.spread}; it is 0 or more: calibrate again")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one device was measured to do, by `libra.backends.calibration`."""

    device: str  # as its driver calls it
    torch: str  # version
    date: str  # ISO 8601
    dtype: str
    linear_flops: Measured  # FLOP/s
    bandwidth: Measured  # bytes/s of a matrix product that its weights bound
    linear_launch: Measured  # seconds
    attention_flops: Measured  # FLOP/s
    attention_launch: Measured  # seconds
    cache_bandwidth: Measured  # bytes/s
    decode_launch: Measured  # seconds
    training_flops: Measured  # FLOP/s of a whole step: 6 * parameters * tokens plus attention, over its seconds
    training_parameters: int

    def __post_init__(self) -> None:
        if self.training_parameters < 1:
            raise ValueError(f"Calibration.training_parameters is {self.training_parameters}; calibrate again")

    def mfu(self, gpu: GPU) -> float:
        """Model FLOP utilisation of the training step: what it reached of the data sheet."""
        return self.training_flops.median / gpu.flops


_TABLES = "fitted to the vLLM kernel times of aiconfigurator-core 0.12"
_A100 = Rates(
    linear_flops=255e12,
    bandwidth=1.5e12,
    linear_launch=5e-6,
    expert_flops=120e12,
    attention_flops=180e12,
    attention_launch=60e-6,
    cache_bandwidth=1.5e12,
    decode_launch=20e-6,
    pass_launch=3e-6,
    link_share=BUS_SHARE["A100"],
    link_latency=5e-6,
    peer_latency=0.3e-6,
    source=_TABLES,
)
_H100 = Rates(
    linear_flops=780e12,
    bandwidth=2.8e12,
    linear_launch=3e-6,
    expert_flops=540e12,
    attention_flops=640e12,
    attention_launch=55e-6,
    cache_bandwidth=3.1e12,
    decode_launch=13e-6,
    pass_launch=3e-6,
    link_share=BUS_SHARE["H100"],
    link_latency=4e-6,
    peer_latency=0.3e-6,
    source=_TABLES,
)
_A100_40GB = 1.555 / 2.039  # memory bandwidth over that of the A100 with 80 GB, by their data sheets
_RATES = {
    "A100": _A100,
    "A100-40GB": replace(
        _A100,
        bandwidth=1.5e12 * _A100_40GB,
        cache_bandwidth=1.5e12 * _A100_40GB,
        source=f"{_TABLES}, those of A100 but for the memory",
    ),
    "A800": replace(_A100, link_share=BUS_SHARE["A800"], source=f"{_TABLES}, those of A100 but for the link"),
    "H100": _H100,
    "H800": replace(_H100, link_share=BUS_SHARE["H800"], source=f"{_TABLES}, those of H100 but for the link"),
    "H200": replace(_H100, linear_flops=760e12, bandwidth=3.8e12, expert_flops=600e12, cache_bandwidth=4.3e12),
    "L40S": replace(
        _H100,
        linear_flops=235e12,
        bandwidth=0.73e12,
        expert_flops=150e12,
        attention_flops=190e12,
        cache_bandwidth=0.75e12,
        link_share=min(BUS_SHARE.values()),
        peer_latency=3e-6,
    ),
}


def rates(gpu: GPU, calibration: Calibration | None = None) -> Rates:
    """What kernels reach on a GPU. One that was not measured gets the shares of the data sheet that H100 and H200 reach
    on average, and the fixed times of H100.
    """
    known = _RATES.get(gpu.name)
    if known is None:
        known = replace(
            _H100,
            linear_flops=0.78 * gpu.flops,
            bandwidth=0.81 * gpu.bandwidth,
            expert_flops=0.58 * gpu.flops,
            attention_flops=0.65 * gpu.flops,
            cache_bandwidth=0.91 * gpu.bandwidth,
            link_share=min(BUS_SHARE.values()),
            source=f"data sheet of {gpu.name} times what H100 and H200 reach of theirs: not measured",
        )
    if calibration is None:
        return known
    source = f"{calibration.device}, {calibration.date}, torch {calibration.torch}; all else {known.source}"
    return replace(
        known,
        linear_flops=calibration.linear_flops.median,
        bandwidth=calibration.bandwidth.median,
        linear_launch=calibration.linear_launch.median,
        attention_flops=calibration.attention_flops.median,
        attention_launch=calibration.attention_launch.median,
        cache_bandwidth=calibration.cache_bandwidth.median,
        decode_launch=calibration.decode_launch.median,
        source=source,
    )


@dataclass(frozen=True, slots=True)
class TrainingRates:
    """What a device reaches in training. FLOP/s are achieved over whole layers, not by single kernels."""

    linear: float  # FLOP/s of dense layers; also the ceiling of model FLOP/s
    attention: float  # FLOP/s of FlashAttention, forward and backward, at the causal FLOPs
    experts: float  # FLOP/s of grouped expert layers
    bandwidth: float  # bytes/s of device memory
    source: str
    passes: float = 0.0  # over a layer's activations in its forward, beside its products; 0: `linear` has them
    # Rates of fused kernels, which do the same with fewer passes: layers and head take at least as long as by them.
    fused: TrainingRates | None = None

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
_CEILING = {"A100": 0.64, "A100-40GB": 0.64, "A800": 0.64, "H100": 0.47, "H800": 0.47, "H200": 0.47}
# FlashAttention-2, causal, head dimension 128, forward and backward: about 170 TFLOP/s on A100 (Dao 2023, arXiv
# 2307.08691, fig. 4); a GPU without a figure gets the 335 of H100 (fig. 7). Hopper has FlashAttention-3, below, as far
# as the ceiling of whole steps lets it. LLM Foundry's runs of 32K tokens and more, with FlashAttention-1, are
# slower than these give.
_ATTENTION = {"A100": 170 / 312, "A100-40GB": 170 / 312, "A800": 170 / 312}
_ATTENTION_OTHERS = 335 / 989
# Rate of grouped expert layers over that of dense ones, without the exchange of tokens, which is priced by itself.
# Whole steps of NeMo AutoModel in bf16 on H100 (docs/performance-summary.mdx) give it: seconds of a step = others +
# FLOPs of routed experts / (share * ceiling). Its gate sends a token to neighbouring experts: little is exchanged.
# Fitted to Qwen3-30B-A3B on 8 (12,040 tokens/s a GPU) and DeepSeek-V3 on 1,024 (865); DeepSeek-V3 on 256 and Kimi-K2,
# which were left out, are then -12 % and -2 % (`python -m benchmarks.public`). The other GPUs have no such runs.
_EXPERTS = 0.7
_EAGER_EXPERTS = 0.4  # assumed: eager modules compute one expert after the other
_MEMORY = 0.8  # of the data sheet's bandwidth: measured with linear layers, A100 1.6 of 2.04 TB/s; H100 a little more


# Plain PyTorch 2.11 with Transformers' modules on an H100, forward and backward of Qwen3-1.7B (fp32 under autocast) and
# 4B (bf16), 512 to 32,768 tokens: three constants fitted to 13 steps with 2 % mean error, products, attention (SDPA;
# FlashAttention-3 on Hopper, 570 to 610 TFLOP/s) and passes over activations. So narrow layers train slower: at 2,048
# wide 260 TFLOP/s are left of 600, at 2,560 in bf16 360. Memory as fused AdamW moves it, 1.9 to 2.2 TB/s.
_EAGER, _HOPPER_ATTENTION, _EAGER_MEMORY, _PASSES = 0.61, 0.60, 0.61, 4.57


def published_mfu(gpu: GPU) -> float | None:
    """Highest published model FLOP utilisation of whole training steps of dense models; None: no figure for the GPU."""
    return _CEILING.get(gpu.name)


def training_rates(gpu: GPU, dtype: Dtype = "bf16", execution: Execution = "fused") -> TrainingRates:
    """Rates of a GPU: of fused kernels from published training runs, where a GPU without any gets the lowest share of
    peak that others have; of eager execution as measured on an H100, by shares of the data sheet.

    fp16 is as fast as bf16; fp32 runs on the tensor cores as TF32, at half the FLOP/s on every data sheet since A100's.
    """
    flops = gpu.flops / 2 if dtype == "fp32" else gpu.flops
    fused = _fused_rates(gpu, flops)
    return fused if execution == "fused" else _eager_rates(gpu, flops, fused)


def _fused_rates(gpu: GPU, flops: float) -> TrainingRates:
    known = gpu.name in _CEILING
    ceiling = _CEILING.get(gpu.name, min(_CEILING.values()))
    attention = min(_HOPPER_ATTENTION, ceiling) if gpu.is_hopper else _ATTENTION.get(gpu.name, _ATTENTION_OTHERS)
    origin = "published training runs" if known else "no published run known, the lowest shares of others"
    return TrainingRates(
        linear=ceiling * flops,
        attention=attention * flops,
        experts=_EXPERTS * ceiling * flops,
        bandwidth=_MEMORY * gpu.bandwidth,
        source=f"{gpu.name}: {origin}, {ceiling:.0%} of {flops:.3g} FLOP/s",
    )


def _eager_rates(gpu: GPU, flops: float, fused: TrainingRates) -> TrainingRates:
    """FlashAttention-3 is for Hopper: others keep what FlashAttention-2 reaches on them."""
    attention = _HOPPER_ATTENTION if gpu.is_hopper else _ATTENTION.get(gpu.name, _ATTENTION_OTHERS)
    origin = "measured on an H100" if gpu.name == "H100" else "not measured, the shares of an H100"
    return TrainingRates(
        linear=_EAGER * flops,
        attention=attention * flops,
        experts=_EAGER_EXPERTS * _EAGER * flops,
        bandwidth=_EAGER_MEMORY * gpu.bandwidth,
        source=f"{gpu.name}: eager PyTorch, {origin}, {_EAGER:.0%} of {flops:.3g} FLOP/s in products",
        passes=_PASSES,
        fused=fused,
    )
