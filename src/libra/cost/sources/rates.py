"""Achieved rates of a GPU: in kernels of an engine (the roofline's constants), and in training.

Invariant: every set of rates names its source. Some GPUs were measured; others are assumed to reach the same shares of
their data sheets, and their source says so. A calibration replaces only the rates that it measured.
`libra.hardware.gpus` has the measurements of each GPU.

Training rates are achieved over whole layers, in published runs. `linear` is the rate over whole steps, and no other
rate is higher, so no price from these rates is faster than the published run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from libra.config.recipe import Dtype, Execution
from libra.hardware.gpu import GPU
from libra.hardware.gpu_record import KernelRates
from libra.hardware.gpus import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(KernelRates):
    """Rates that kernels reach, including all-reduces."""

    link_share: float  # bus bandwidth of an all-reduce of two GPUs, over the link's bandwidth in one direction


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of repeated measurements, and their spread: (90 % quantile - 10 % quantile) / median."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0):
            raise ValueError(f"Measured.median is {self.median}; give a positive measurement: calibrate again")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"Measured.spread is {self.spread}; it is 0 or more: calibrate again")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured rates of one device, from `libra.backends.calibration`."""

    device: str  # the driver's name
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
        """Model FLOP utilisation of the training step, as a share of the data sheet's FLOP/s."""
        return self.training_flops.median / gpu.flops


def rates(gpu: GPU, calibration: Calibration | None = None) -> Rates:
    """Rates that kernels reach on a GPU, from a calibration or from the GPU's record."""
    record = record_of(gpu)
    kernels = {it.name: getattr(record.kernels, it.name) for it in fields(KernelRates)}
    known = Rates(**kernels, link_share=record.bus)
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
    """Rates that a device reaches in training. FLOP/s are over whole layers, not of single kernels."""

    linear: float  # FLOP/s of dense layers; also the ceiling of model FLOP/s
    attention: float  # FLOP/s of FlashAttention, forward and backward, at the causal FLOPs
    experts: float  # FLOP/s of grouped expert layers
    bandwidth: float  # bytes/s of device memory
    source: str
    head: float | None = None  # FLOP/s of the language-model head, if its type is not that of the layers
    casts: float = 0.0  # bytes moved to cast each input number of experts; `linear` includes its own casts
    passes: float = 0.0  # over a layer's activations in a forward, besides products; 0: part of `linear`
    # Rates of fused kernels, which need fewer passes. Layers and head take at least as long as at these rates.
    fused: TrainingRates | None = None

    def __post_init__(self) -> None:
        for field in ("linear", "attention", "experts", "bandwidth"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; a rate is positive")
        for field in ("attention", "experts"):
            if getattr(self, field) > self.linear:
                raise ValueError(f"{field} is {getattr(self, field):g}; it is at most linear, {self.linear:g}")


# Rate of grouped expert layers over that of dense layers, without the exchange of tokens, which has its own price.
# Source: whole steps of NeMo AutoModel in bf16 on H100 (docs/performance-summary.mdx), by seconds of a step = others +
# FLOPs of routed experts / (share * ceiling). Its gate sends a token to neighbouring experts, so little is exchanged.
# Fitted to Qwen3-30B-A3B on 8 GPUs (12,040 tokens/s a GPU) and DeepSeek-V3 on 1,024 (865). DeepSeek-V3 on 256 and
# Kimi-K2 are not part of the fit: -10 % and +9 % (`python -m benchmarks.public`). The sweep showed all four.
_EXPERTS = 0.7
_EAGER_EXPERTS = 0.4  # assumed: eager modules compute one expert after the other
# Bytes moved to cast one input number of a product, with one scale per tensor (Transformer Engine): 2 read to find the
# largest number, 2 read for the cast, one written in each of two orientations. The published rate of dense models
# includes them; narrow experts spend a larger share on them.
_CAST = 6.0
_MEMORY = 0.8  # of the data sheet's bandwidth, measured with linear layers: A100 1.6 of 2.04 TB/s, H100 a little more


# Source: plain PyTorch 2.11 with Transformers' modules on an H100, forward and backward of Qwen3-1.7B (fp32 under
# autocast) and 4B (bf16), 512 to 32,768 tokens. Three constants are fitted to 13 steps with 2 % mean error: products,
# attention (SDPA; FlashAttention-3 on Hopper, 570 to 610 TFLOP/s) and passes over activations. So narrow layers train
# slower: of 600 TFLOP/s, 260 remain at a width of 2,048, and 360 at 2,560 in bf16. Bandwidth is that of fused AdamW,
# 1.9 to 2.2 TB/s.
_EAGER, _EAGER_MEMORY, _PASSES = 0.61, 0.61, 4.57


def published_mfu(gpu: GPU) -> float | None:
    """Published model FLOP utilisation of whole training steps of dense models; None: no figure for the GPU."""
    training = record_of(gpu).training
    return training.ceiling if training.published else None


def training_rates(gpu: GPU, dtype: Dtype = "bf16", execution: Execution = "fused") -> TrainingRates:
    """Training rates of a GPU.

    Rates of fused kernels come from published training runs; a GPU without such a run gets the lowest share of peak of
    all others. Rates of eager execution are shares of the data sheet, measured on an H100.

    fp16 is as fast as bf16; fp32 runs on the tensor cores as TF32, at half the FLOP/s on every data sheet since A100's.
    fp8 applies to the products of layers; attention and the head stay in bf16. Raises ValueError if a GPU has no FP8.
    """
    flops = gpu.flops / 2 if dtype == "fp32" else gpu.flops
    fused = _fp8_rates(gpu) if dtype == "fp8" else _fused_rates(gpu, flops)
    return fused if execution == "fused" else _eager_rates(gpu, flops, fused)


def _fused_rates(gpu: GPU, flops: float) -> TrainingRates:
    training = record_of(gpu).training
    ceiling, attention = training.ceiling, min(training.attention, training.ceiling)
    return TrainingRates(
        linear=ceiling * flops,
        attention=attention * flops,
        experts=_EXPERTS * ceiling * flops,
        bandwidth=_MEMORY * gpu.bandwidth,
        source=f"{gpu.name}: {training.origin}, {100 * ceiling:.0f} % of {flops:.3g} FLOP/s",
    )


def dtype_refusal(gpu: GPU, dtype: Dtype) -> str | None:
    """Reason why a GPU cannot train in a type; None if it can."""
    if dtype == "fp8" and record_of(gpu).training.fp8 is None:
        return f"dtype is fp8, but {gpu.name} does not multiply in fp8: set it to bf16, or choose another GPU"
    return None


def _fp8_rates(gpu: GPU) -> TrainingRates:
    record = record_of(gpu)
    if record.training.fp8 is None:
        raise ValueError(dtype_refusal(gpu, "fp8"))
    wide, flops = _fused_rates(gpu, gpu.flops), record.faster["fp8"] * gpu.flops
    linear = record.training.fp8 * flops
    return replace(
        wide,
        linear=linear,
        experts=_EXPERTS * linear,
        head=wide.linear,
        casts=_CAST,
        source=f"{gpu.name}: {record.training.origin}, {100 * record.training.fp8:.0f} % of {flops:.3g} FLOP/s in FP8",
    )


def _eager_rates(gpu: GPU, flops: float, fused: TrainingRates) -> TrainingRates:
    """Rates of eager execution. FlashAttention-3 is for Hopper; other GPUs keep the rate of FlashAttention-2."""
    origin = "measured on an H100" if gpu.name == "H100" else "not measured, the shares of an H100"
    return TrainingRates(
        linear=_EAGER * flops,
        attention=record_of(gpu).training.attention * flops,
        experts=_EAGER_EXPERTS * _EAGER * flops,
        bandwidth=_EAGER_MEMORY * gpu.bandwidth,
        source=f"{gpu.name}: eager PyTorch, {origin}, {100 * _EAGER:.0f} % of {flops:.3g} FLOP/s in products",
        passes=_PASSES,
        fused=fused,
    )
