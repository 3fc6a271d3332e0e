"""Records of known GPUs, and of GPUs that a file describes.

Invariant: each number has a source. To add a GPU, add its record here. Speeds are without sparsity, which doubles the
figures in data sheets. Memory is the figure of the driver, which is less than the data sheet's gigabytes by the memory
for error correction and the driver. `visible` is PyTorch's figure in public logs of vLLM, for H200 an estimate from
PyTorch's messages.

The measured kernel rates are fits of the model in `libra.cost.sources.layer_kernels` to the kernel times of vLLM in
aiconfigurator-core 0.12 (NVIDIA, Apache-2.0; vLLM 0.14.0 on A100, 0.24.0 on H100, H200 and L40S). The fits are over
layers of Qwen3-8B/14B/32B at tp 1 to 8. Their mean errors are 7 to 9 % for linear layers, 5 to 7 % for decode
attention, and 5 to 7 % for prefill attention. Rates of grouped products are from Qwen3-30B-A3B, those of L40S from
Qwen3-14B. Fixed times of all-reduces are those of vLLM's own kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from libra.hardware.gpu import GPU
from libra.hardware.gpu_record import Architecture, GPURecord, KernelRates, TableSystem, TrainingShares
from libra.hardware.stored_weights import Product

_MIB, _GIB = 2.0**20, 2.0**30
_LEAST_REPORTED = 0.93  # of the memory in a GPU's name; GDDR6 error correction takes a sixteenth, and the driver some

# Data sheets

_A100 = GPU(
    name="A100",
    memory=81_920 * _MIB,
    visible=79.2 * _GIB,
    bandwidth=2.039e12,
    flops=312e12,
    link=300e9,
    source="NVIDIA A100 80GB SXM4 data sheet (2021): 80 GB HBM2e, 2,039 GB/s, 312 TFLOP/s bf16, NVLink 3 600 GB/s",
)
_A100_40GB = replace(
    _A100,
    name="A100-40GB",
    memory=40_960 * _MIB,
    visible=39.4 * _GIB,
    bandwidth=1.555e12,
    source="NVIDIA A100 40GB SXM4 data sheet (2021): 40 GB HBM2, 1,555 GB/s, 312 TFLOP/s bf16, NVLink 3",
)
_A800 = replace(_A100, name="A800", link=200e9, source=f"{_A100.source}; A800 has NVLink 400 GB/s")
_H100 = GPU(
    name="H100",
    memory=81_559 * _MIB,
    visible=79.18 * _GIB,
    bandwidth=3.35e12,
    flops=989e12,
    link=450e9,
    source="NVIDIA H100 SXM5 data sheet (2023): 80 GB HBM3, 3.35 TB/s, 989 TFLOP/s bf16, NVLink 4 900 GB/s",
)
_H800 = replace(_H100, name="H800", link=200e9, source=f"{_H100.source}; H800 has NVLink 400 GB/s")
_H200 = GPU(
    name="H200",
    memory=143_771 * _MIB,
    visible=139.8 * _GIB,
    bandwidth=4.8e12,
    flops=989e12,
    link=450e9,
    source="NVIDIA H200 SXM data sheet (2024): 141 GB HBM3e, 4.8 TB/s, 989 TFLOP/s bf16, NVLink 4 900 GB/s",
)
_H20 = GPU(
    name="H20",
    memory=97_871 * _MIB,
    bandwidth=4.0e12,
    flops=148e12,
    link=450e9,
    source="NVIDIA H20 data sheet (2024): 96 GB HBM3, 4.0 TB/s, 148 TFLOP/s bf16, NVLink 4 900 GB/s",
)
_H20_3E = replace(
    _H20,
    name="H20-3e",
    memory=143_771 * _MIB,
    bandwidth=4.8e12,
    source="NVIDIA H20-3e data sheet (2025): 141 GB HBM3e, 4.8 TB/s, 148 TFLOP/s bf16, NVLink 4 900 GB/s",
)
_B200 = GPU(
    name="B200",
    memory=183_359 * _MIB,
    visible=178.35 * _GIB,
    bandwidth=7.7e12,
    flops=2.25e15,
    link=900e9,
    source="NVIDIA HGX B200 data sheet (2025): 180 GB HBM3e, 7.7 TB/s, 2.25 PFLOP/s bf16, NVLink 5 1.8 TB/s",
)
_B300 = replace(
    _B200,
    name="B300",
    memory=275_040 * _MIB,
    visible=None,
    bandwidth=7.75e12,
    source="NVIDIA HGX B300 data sheet (2025): 288 GB HBM3e, 62 TB/s and 18 PFLOP/s bf16 of eight, NVLink 5 1.8 TB/s",
)
_GB200 = GPU(
    name="GB200",
    memory=189_471 * _MIB,
    visible=184.3 * _GIB,
    bandwidth=8.0e12,
    flops=2.5e15,
    link=900e9,
    source="NVIDIA GB200 NVL72 data sheet (2024), of one of 72 GPUs: 186 GB HBM3e, 8 TB/s, 2.5 PFLOP/s bf16, NVLink 5",
)
_GB300 = replace(
    _GB200,
    name="GB300",
    memory=284_208 * _MIB,
    visible=276.6 * _GIB,
    source="NVIDIA GB300 NVL72 data sheet (2025), of one of 72 GPUs: 288 GB HBM3e, 8 TB/s, 2.5 PFLOP/s bf16, NVLink 5",
)
_L4 = GPU(
    name="L4",
    memory=23_034 * _MIB,
    bandwidth=300e9,
    flops=121e12,
    link=32e9,
    source="NVIDIA L4 data sheet (2023): 24 GB GDDR6, 300 GB/s, 121 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
)
_L40S = GPU(
    name="L40S",
    memory=46_068 * _MIB,
    visible=44.4 * _GIB,
    bandwidth=864e9,
    flops=362.05e12,
    link=32e9,
    source="NVIDIA L40S data sheet (2023): 48 GB GDDR6, 864 GB/s, 362 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
)
_RTX_3090 = GPU(
    name="RTX 3090",
    memory=24_576 * _MIB,
    visible=23.57 * _GIB,
    bandwidth=936e9,
    flops=71e12,
    link=32e9,
    source="NVIDIA GA102 white paper (2020): 24 GB GDDR6X, 936 GB/s, 71 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
)
_RTX_4090 = GPU(
    name="RTX 4090",
    memory=24_564 * _MIB,
    visible=23.64 * _GIB,
    bandwidth=1.008e12,
    flops=165.2e12,
    link=32e9,
    source="NVIDIA Ada white paper (2022): 24 GB GDDR6X, 1,008 GB/s, 165 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
)
_RTX_PRO_6000 = GPU(
    name="RTX PRO 6000",
    memory=97_887 * _MIB,
    visible=94.97 * _GIB,
    bandwidth=1.792e12,
    flops=503.8e12,
    link=64e9,
    source="NVIDIA RTX PRO 6000 Blackwell data sheet (2025): 96 GB GDDR7, 1,792 GB/s, 504 TFLOP/s bf16, PCIe 5 x16",
)
_MI300X = GPU(
    name="MI300X",
    memory=196_592 * _MIB,
    bandwidth=5.3e12,
    flops=1.3074e15,
    link=448e9,
    source="AMD MI300X data sheet (2023): 192 GB HBM3, 5.3 TB/s, 1,307 TFLOP/s bf16, seven links of 128 GB/s",
)
_MI355X = GPU(
    name="MI355X",
    memory=294_896 * _MIB,
    bandwidth=8.0e12,
    flops=2.5166e15,
    link=537.6e9,
    source="AMD MI355X data sheet (2025): 288 GB HBM3E, 8 TB/s, 2.5 PFLOP/s bf16, seven links of 153.6 GB/s",
)

# Measured shares

# Bus bandwidth of all-reduce among eight GPUs, as a share of one direction of NVLink (nccl-tests): A100 186 of 300
# GB/s, A800 142-155 of 200, H100 370 of 450. A GPU without a figure gets the lowest share.
_BUS_A100, _BUS_A800, _BUS_H100 = 0.62, 0.74, 0.82
_BUS_OTHERS = _BUS_A100

# Model FLOPs utilisation published for bf16 training of dense models with 1-405 B parameters, over whole steps.
# A100-80G: 64.2 % (7B, 2K tokens; 59.6 % 13B, 55.3 % 30B), MosaicML LLM Foundry, scripts/train/benchmarking. H100: 46.4
# % in the same source (7B), 47-48 % in Megatron-LM's README (largest of 2-462B). GB200: 46 % (Llama-3.1-405B, 128 GPUs,
# 9.347 s a step, NVIDIA's dgxc-benchmarking, llama3.1/README.md). Single GEMMs reach 70 %. Any other GPU gets the lower
# share of A100 and H100.
#
# Earlier versions of dgxc-benchmarking have more runs on H100, in bf16 with sequences of one length: 57.8 % (15B, 64
# GPUs, 256 sequences of 4,096 tokens in 2.693 s) and 50.5 % (340B, 256 GPUs, 64 of 4,096 in 4.31 s) for Nemotron-4,
# 51.2 % (128 GPUs, 256 of 8,192 in 15.57 s) for Llama-3 70B with MaxText. These figures count attention without the
# causal mask; with the mask they are 54.9, 49.5 and 47.7 %. (Still older figures in that source, up to 65 %, count an
# eighth more FLOPs per token.) H100 keeps 47 %, as for Llama: with 49 % a published 8B run would be priced 18 % too
# fast instead of 13 %. The two Nemotron runs, whose MLPs are wide and ungated, are priced too slow (`python -m
# benchmarks.public`).
#
# The same in FP8 with a scale for each tensor, the highest published figure of each GPU: H100 888 TFLOP/s (GPT-3 175B,
# performance page of NeMo 24.12), B200 1,676, GB200 2,144, GB300 2,646 (Llama-3.1-405B, Megatron Bridge,
# docs/performance-summary-archive.md, 25.09 to 26.06). Any other GPU gets B200's share, the lowest. GB300 has no such
# run in bf16. In FP8 it trains 405B 1.23 times as fast as GB200 (1.19 to 1.25 in six releases; it may draw 1,400 W
# instead of 1,200), and the same ratio is assumed in bf16.
#
# FlashAttention-2, causal, head dimension 128, forward and backward: about 170 TFLOP/s on A100 (Dao 2023, arXiv
# 2307.08691, fig. 4), 335 on H100 (fig. 7), whose share a GPU without a figure gets. Hopper has FlashAttention-3,
# measured on an H100 at 570 to 610 TFLOP/s. LLM Foundry's runs with 32K tokens and more use FlashAttention-1, and are
# slower than predicted with these shares.
_LEAST_FP8 = 1676 / 4500
_AMPERE_TRAINING = TrainingShares(ceiling=0.64, attention=170 / 312, published=True)
_HOPPER_TRAINING = TrainingShares(ceiling=0.47, attention=0.60, published=True, fp8=888 / 1979)
_OTHER_TRAINING = TrainingShares(
    ceiling=0.47,
    attention=335 / 989,
    published=False,
    fp8=_LEAST_FP8,
    origin="no published run known, the lowest shares of others",
)
_GB200_TRAINING = TrainingShares(ceiling=0.46, attention=335 / 989, published=True, fp8=2144 / 5000)
_GB300_TRAINING = replace(
    _OTHER_TRAINING,
    ceiling=1.23 * _GB200_TRAINING.ceiling,
    fp8=2646 / 5000,
    origin="published training runs in FP8, in bf16 above GB200 by as much as in FP8",
)
_OTHER_HOPPER_TRAINING = replace(
    _HOPPER_TRAINING, published=False, fp8=_LEAST_FP8, origin="no published run known, the lowest shares of others"
)

_TABLES = "fitted to the vLLM kernel times of aiconfigurator-core 0.12"
_A100_KERNELS = KernelRates(
    linear_flops=255e12,
    bandwidth=1.5e12,
    linear_launch=5e-6,
    expert_flops=120e12,
    attention_flops=180e12,
    attention_launch=60e-6,
    cache_bandwidth=1.5e12,
    decode_launch=20e-6,
    pass_launch=3e-6,
    link_latency=5e-6,
    peer_latency=0.3e-6,
    source=_TABLES,
)
_H100_KERNELS = KernelRates(
    linear_flops=780e12,
    bandwidth=2.8e12,
    linear_launch=3e-6,
    expert_flops=540e12,
    attention_flops=640e12,
    attention_launch=55e-6,
    cache_bandwidth=3.1e12,
    decode_launch=13e-6,
    pass_launch=3e-6,
    link_latency=4e-6,
    peer_latency=0.3e-6,
    source=_TABLES,
)
_SLOWER_MEMORY = 1.555 / 2.039  # memory bandwidth of A100-40GB over that of A100, by their data sheets
_A100_40GB_KERNELS = replace(
    _A100_KERNELS,
    bandwidth=1.5e12 * _SLOWER_MEMORY,
    cache_bandwidth=1.5e12 * _SLOWER_MEMORY,
    source=f"{_TABLES}, those of A100 but for the memory",
)
_H200_KERNELS = replace(
    _H100_KERNELS, linear_flops=760e12, bandwidth=3.8e12, expert_flops=600e12, cache_bandwidth=4.3e12
)
_L40S_KERNELS = replace(
    _H100_KERNELS,
    linear_flops=235e12,
    bandwidth=0.73e12,
    expert_flops=150e12,
    attention_flops=190e12,
    cache_bandwidth=0.75e12,
    peer_latency=3e-6,
)


def _unmeasured(gpu: GPU) -> KernelRates:
    """Rates of a GPU without measurements: its peak rates times the average share of their peak rates that H100 and
    H200 reach, with the fixed times of H100.
    """
    return replace(
        _H100_KERNELS,
        linear_flops=0.78 * gpu.flops,
        bandwidth=0.81 * gpu.bandwidth,
        expert_flops=0.58 * gpu.flops,
        attention_flops=0.65 * gpu.flops,
        cache_bandwidth=0.91 * gpu.bandwidth,
        source=f"not measured: data sheet of {gpu.name} times the shares that H100 and H200 reach of theirs",
    )


# Speed of dense products relative to bf16, by data sheets. B300 and GB300 hardly multiply int8.
_AMPERE: Mapping[Product, float] = {"int8": 2.0}
_EIGHT: Mapping[Product, float] = {"fp8": 2.0, "int8": 2.0}
_BLACKWELL: Mapping[Product, float] = {"fp8": 2.0, "int8": 2.0, "fp4": 4.0}
_B300_TYPES: Mapping[Product, float] = {"fp8": 2.0, "fp4": 6.0}


def _roofline(
    gpu: GPU,
    architecture: Architecture,
    faster: Mapping[Product, float],
    tables: TableSystem | None = None,
    training: TrainingShares | None = None,
) -> GPURecord:
    """Record of a GPU without measured kernel rates. It may have kernel tables."""
    training = training or (_OTHER_HOPPER_TRAINING if architecture == "hopper" else _OTHER_TRAINING)
    training = training if "fp8" in faster else replace(training, fp8=None)
    return GPURecord(gpu, architecture, faster, _unmeasured(gpu), _BUS_OTHERS, training, tables)


_A100_TABLES, _H100_TABLES = TableSystem("a100_sxm", "0.14.0"), TableSystem("h100_sxm", "0.24.0")
_H200_TABLES, _L40S_TABLES = TableSystem("h200_sxm", "0.24.0"), TableSystem("l40s", "0.24.0")
_BY_A100, _BY_H100 = replace(_A100_TABLES, sister="A100"), replace(_H100_TABLES, sister="H100")
_A800_KERNELS = replace(_A100_KERNELS, source=f"{_TABLES}, those of A100 but for the link")
_H800_KERNELS = replace(_H100_KERNELS, source=f"{_TABLES}, those of H100 but for the link")

RECORDS: Mapping[str, GPURecord] = {
    record.gpu.name: record
    for record in (
        GPURecord(_A100, "ampere", _AMPERE, _A100_KERNELS, _BUS_A100, _AMPERE_TRAINING, _A100_TABLES),
        GPURecord(_A100_40GB, "ampere", _AMPERE, _A100_40GB_KERNELS, _BUS_A100, _AMPERE_TRAINING, None),
        GPURecord(_A800, "ampere", _AMPERE, _A800_KERNELS, _BUS_A800, _AMPERE_TRAINING, _BY_A100),
        GPURecord(_H100, "hopper", _EIGHT, _H100_KERNELS, _BUS_H100, _HOPPER_TRAINING, _H100_TABLES),
        GPURecord(_H800, "hopper", _EIGHT, _H800_KERNELS, _BUS_A800, _HOPPER_TRAINING, _BY_H100),
        GPURecord(_H200, "hopper", _EIGHT, _H200_KERNELS, _BUS_H100, _HOPPER_TRAINING, _H200_TABLES),
        _roofline(_B200, "blackwell", _BLACKWELL, TableSystem("b200_sxm", "0.24.0")),
        _roofline(_L4, "ada", _EIGHT),
        GPURecord(_L40S, "ada", _EIGHT, _L40S_KERNELS, _BUS_OTHERS, _OTHER_TRAINING, _L40S_TABLES),
        _roofline(_H20, "hopper", _EIGHT),
        _roofline(_H20_3E, "hopper", _EIGHT),
        _roofline(_B300, "blackwell", _B300_TYPES),
        _roofline(_GB200, "blackwell", _BLACKWELL, training=_GB200_TRAINING),
        _roofline(_GB300, "blackwell", _B300_TYPES, training=_GB300_TRAINING),
        _roofline(_RTX_3090, "ampere", {"int8": 4.0}),
        _roofline(_RTX_4090, "ada", {"fp8": 2.0, "int8": 4.0}),
        _roofline(_RTX_PRO_6000, "blackwell", _BLACKWELL),
        _roofline(_MI300X, "cdna", _EIGHT),
        _roofline(_MI355X, "cdna", _BLACKWELL),
    )
}
GPUS: Mapping[str, GPU] = {name: record.gpu for name, record in RECORDS.items()}


def record_of(gpu: GPU) -> GPURecord:
    """The record of a GPU. A GPU that a file describes gets the shares of H100 and H200, and multiplies only in
    bf16."""
    known = RECORDS.get(gpu.name)
    return _roofline(gpu, "ada", {}) if known is None else known


_FORM = re.compile(
    r"nvidia|geforce|amd|instinct|tesla|gpu|sxm\d?|hgx|dgx"
)  # words of a name that do not distinguish two GPUs
_MEMORY = re.compile(r"(\d+)\s*gi?b\b")


def nearest_gpu(given: str) -> str | None:
    """The known GPU for another spelling of its name; never a GPU with other memory, link or chip.

    >>> [nearest_gpu(name) for name in ("NVIDIA H100 SXM5 80GB", "h-200", "H100 PCIe", "A30", "H200 80GB")]
    ['H100', 'H200', None, None, None]
    """
    text = _FORM.sub("", given.casefold())
    memory = _MEMORY.search(text)
    for name, gpu in GPUS.items():
        if _letters(text) == _letters(name):
            return name
        if memory is not None and _letters(_MEMORY.sub("", text)) == _letters(name):
            size = float(memory[1]) * 2.0**30
            if gpu.memory <= size <= gpu.memory / _LEAST_REPORTED:
                return name
    return None


def _letters(name: str) -> str:
    """Letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.casefold()))
