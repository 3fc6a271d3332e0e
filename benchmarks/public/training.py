"""Training rates beside published ones, each in the layout in which it ran.

Invariant: a row is priced as one optimiser step of pre-training: forward, backward and update, without the forward
passes that reinforcement learning adds. What a layout of Libra's cannot express is in the row's `note`.

Experts are routed as by the source's benchmark, which decides what is exchanged. Beside tensor parallelism they are
whole, as in the recipes of Megatron Bridge. MXFP8 is priced as FP8 with one scale a tensor.

Dense models of Megatron Bridge overlap tensor-parallel exchanges with products (`tp_comm_overlap`, by the recipes in
scripts/performance/configs/llama). That needs tensors of one shape (docs/performance-guide.md), which batches of
trajectories are not, so Libra charges what Megatron does not hide by itself; the note says how much that is. Its
experts on H100 do not overlap.

`RELEASE` is what one release of Megatron Bridge published in FP8, MXFP8 and bf16, but for hybrid models, whatever its
error: `ROWS` were chosen, and these were not. `ABOVE` used more of an H100 than Libra's ceiling. `ADAPTERS` train
low-rank adapters.

Sources: the performance summaries of NeMo AutoModel (docs/performance-summary.mdx) and of Megatron Bridge
(docs/performance-summary-archive.md, containers 25.09 to 26.06), torchtitan's benchmarks
(benchmarks/llama3_h100_202412_torchtitan.md, docs/performance.md of 2024), and NVIDIA's dgxc-benchmarking
(nemotron4-15b and nemotron4-340b, README.md of 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from benchmarks.public.case import CaseGroup, PublicCase
from libra.config.recipe import Dtype, Recipe
from libra.cost.adapters import training_bytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_passes import Work
from libra.cost.train_step import TrainStep, train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.hardware.parallel import ParallelLayout, Recompute

DENSE, EXPERTS = 0.15, 0.25
_NETWORK = 400e9  # bytes/s of a node: 400 Gb/s a GPU, of eight
# torchtitan's H100 have HBM2e of 2.4 TB/s and a limit of 500 W; their FLOP/s are not known.
_H100_500W = replace(GPUS["H100"], bandwidth=2.4e12)


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """Tokens/s a GPU of one row, and what it ran. `length` is in tokens, `batch` in sequences of it."""

    source: str
    model: ModelSpec
    gpu: GPU
    batch: int
    length: int
    rate: float
    layout: ParallelLayout
    note: str = ""
    halved: bool = False  # every second layer is computed again: the mean of the seconds with none and with all
    fitted: bool = False  # one that a constant of its price was fitted to
    dtype: Dtype = "bf16"  # of the products
    targets: Literal["all", "attention"] | None = None  # of low-rank adapters (LoRA) of `_RANK`; None: all is trained
    overlapped: bool = False  # its tensor-parallel exchanges run beside products

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"{self.model.name.rpartition('/')[2]}, {self.layout.devices} {self.gpu.name}{dtype}, {self.source}"


def _layout(
    tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1, micro: int = 4096, virtual: int = 1
) -> ParallelLayout:
    whole = tp > 1 and ep > 1
    return ParallelLayout(tp, pp, dp, cp, ep, micro, "none", "zero1", False, virtual, whole)


def _sharded(dp: int, cp: int = 1, micro: int = 8192, recompute: Recompute = "none") -> ParallelLayout:
    return replace(_layout(dp=dp, cp=cp, micro=micro), recompute=recompute, sharding="zero3")


def _consecutive(model: ModelSpec) -> ModelSpec:
    """AutoModel's benchmark gate sends a token to consecutive experts, from a multiple of their number on."""
    assert model.experts is not None
    groups = model.experts.count // model.experts.active
    return _routed(model, replace(model.experts, groups=groups, active_groups=1))


def _routed(model: ModelSpec, experts: Experts) -> ModelSpec:
    return replace(model, kinds=tuple(replace(it, mlp=experts) if it.experts else it for it in model.kinds))


def _even(model: ModelSpec) -> ModelSpec:
    """Megatron's forced balance draws experts evenly, without a limit of groups."""
    assert model.experts is not None
    return _routed(model, replace(model.experts, groups=1, active_groups=1))


_V3, _Q30, _Q235 = map(load_model, ("deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"))
_L8, _L70 = map(load_model, ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"))
# meta-llama/Llama-3.1-405B and openai/gpt-oss-120b, config.json; sinks and biases have no price of their own.
_L405 = decoder("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, False, 131072)
_OSS = decoder("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, False, 131072, experts=Experts(128, 4, 2880))
# moonshotai/Kimi-K2-Instruct, config.json: DeepSeek-V3 with more experts and fewer heads, one layer of them dense.
_K2 = decoder(
    *("Kimi-K2", 61, 7168, 64, 64, 192, 18432, 163840, False, 131072),
    experts=Experts(384, 8, 2048, 2048),
    sparse=60,
    latent=LatentAttention(64, 1536, 512, 128, 64, 128),
    stored=_V3.stored,
)
_Q7, _Q32 = map(load_model, ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"))
_RANK = 16
_AUTO, _BRIDGE, _TITAN, _DGXC = "NeMo AutoModel", "Megatron Bridge", "torchtitan", "dgxc-benchmarking"
_H100, _A100 = GPUS["H100"], GPUS["A100"]


def _auto(
    model: ModelSpec, batch: int, rate: float, virtual: int, fitted: bool = False, **layout: int
) -> PublishedRate:
    at = replace(_layout(**layout, virtual=virtual), recompute="full")
    return PublishedRate(_AUTO, _consecutive(model), _H100, batch, 4096, rate, at, fitted=fitted)


def _bridge(
    release: str,
    model: ModelSpec,
    batch: int,
    rate: float,
    virtual: int,
    gpu: str = "H100",
    dtype: Dtype = "fp8",
    length: int = 4096,
    sharded: bool = False,
    fitted: bool = False,
    **layout: int,
) -> PublishedRate:
    at = _layout(**{"micro": length, **layout}, virtual=virtual)
    if sharded:
        at = replace(at, sharding="zero3")
    balanced = _even(model) if model.experts else model
    overlapped = not model.experts and at.tp > 1
    source = f"{_BRIDGE} {release}"
    return PublishedRate(
        *(source, balanced, GPUS[gpu], batch, length, rate, at),
        fitted=fitted,
        dtype=dtype,
        overlapped=overlapped,
    )


ROWS: Sequence[PublishedRate] = (
    _auto(_V3, 512, 1002, 8, pp=4, dp=64, ep=64),
    _auto(_V3, 8192, 865, 8, pp=4, dp=256, ep=64, fitted=True),
    _auto(_K2, 512, 924, 4, pp=8, dp=32, ep=32),
    _auto(_Q30, 512, 12040, 1, dp=8, ep=8, micro=4 * 4096, fitted=True),
    _bridge("26.06", _Q30, 1024, 8826, 1, dp=16, ep=16),
    _bridge("25.11", _Q235, 2048, 1575, 4, tp=2, pp=8, dp=16, ep=32),
    _bridge("26.04.01", _Q235, 8192, 1712, 4, tp=2, pp=8, dp=16, ep=32),
    _bridge("25.09", _V3, 8192, 1297, 4, tp=2, pp=8, dp=64, ep=64),
    _bridge("25.11", _V3, 4096, 3848, 4, "GB300", "bf16", pp=2, dp=128, ep=32),
    _bridge("25.11", _V3, 4096, 3139, 4, "GB200", "bf16", pp=4, dp=64, ep=64),
    _bridge("25.11", _Q235, 8192, 6131, 12, "GB300", "bf16", pp=4, dp=64, ep=16, micro=2 * 4096),
    _bridge("25.11", _Q235, 8192, 4916, 3, "GB200", "bf16", pp=8, dp=32, ep=32),
    PublishedRate(_AUTO, _L70, _H100, 128, 8192, 867, _sharded(dp=32, cp=2, micro=8192, recompute="full")),
    PublishedRate(
        *(_TITAN, _L8, _H100_500W, 16, 8192, 6667, _sharded(dp=8, micro=2 * 8192)),
        note="H100 limited to 500 W",
        halved=True,
    ),
    PublishedRate(*(_TITAN, _L8, _A100, 64, 8192, 2904, _sharded(dp=64, micro=8192)), halved=True),
    PublishedRate(_TITAN, _L70, _A100, 64, 8192, 331, _sharded(dp=64, micro=8192, recompute="full")),
)


def _release(model: ModelSpec, batch: int, rate: float, virtual: int, gpu: str, **more: Any) -> PublishedRate:
    return _bridge("26.04.01", model, batch, rate, virtual, gpu, **more)


RELEASE: Sequence[PublishedRate] = (
    _release(_L70, 256, 5248, 1, "GB300", length=8192, sharded=True, dp=64, micro=2 * 8192),
    _release(_L70, 256, 4864, 5, "GB300", length=8192, pp=4, dp=16),
    _release(_L70, 256, 4224, 1, "GB200", length=8192, sharded=True, dp=64, micro=2 * 8192),
    _release(_L70, 256, 3712, 5, "GB200", length=8192, tp=2, pp=4, dp=8),
    _release(_L70, 256, 1664, 5, "H100", length=8192, tp=4, pp=8, dp=2),
    _release(_L405, 1536, 1024, 4, "GB300", length=8192, tp=4, pp=8, dp=8),
    _release(_L405, 1536, 960, 4, "GB300", length=8192, tp=2, pp=8, cp=2, dp=8),
    _release(_L405, 1536, 864, 4, "GB200", fitted=True, length=8192, tp=4, pp=16, dp=4),
    _release(_L405, 1536, 800, 8, "GB200", length=8192, tp=4, pp=16, dp=4),
    _release(_L405, 1536, 328, 8, "H100", length=8192, tp=8, pp=8, cp=2, dp=8),
    _release(_V3, 4096, 4992, 8, "GB300", pp=2, dp=128, ep=32, micro=2 * 4096),
    _release(_V3, 4096, 4256, 4, "GB200", pp=4, dp=64, ep=64),
    _release(_V3, 4096, 3456, 1, "B300", pp=8, dp=32, ep=8, micro=2 * 4096),
    _release(_V3, 4096, 3328, 2, "B200", pp=8, dp=32, ep=32),
    _release(_OSS, 1280, 19200, 1, "GB300", dtype="bf16", dp=64, ep=64, micro=4 * 4096),
    _release(_OSS, 1280, 16640, 1, "GB200", dtype="bf16", dp=64, ep=64, micro=4 * 4096),
    _release(_OSS, 1280, 15232, 1, "B300", dtype="bf16", dp=64, ep=8, micro=4 * 4096),
    _release(_OSS, 1280, 13568, 1, "B200", dtype="bf16", dp=64, ep=8, micro=4 * 4096),
    _release(_OSS, 1280, 5824, 1, "H100", dtype="bf16", pp=4, dp=16, ep=8),
    _release(_Q30, 512, 31744, 1, "GB300", dp=8, ep=8, micro=8 * 4096),
    _release(_Q30, 512, 26112, 1, "GB200", dp=8, ep=8, micro=4 * 4096),
    _release(_Q30, 512, 30720, 1, "B300", dp=8, ep=8, micro=8 * 4096),
    _release(_Q30, 512, 27136, 1, "B200", dp=8, ep=8, micro=4 * 4096),
    _release(_Q30, 1024, 8960, 1, "H100", dp=16, ep=16),
    _release(_Q235, 8192, 6944, 12, "GB300", pp=4, dp=64, ep=32, micro=2 * 4096),
    _release(_Q235, 8192, 5680, 3, "GB200", pp=8, dp=32, ep=32),
    _release(_Q235, 8192, 5936, 1, "B300", pp=8, dp=32, ep=8, micro=2 * 4096),
    _release(_Q235, 8192, 3776, 1, "B200", pp=8, dp=32, ep=8),
    _release(_Q235, 8192, 1712, 4, "H100", tp=2, pp=8, dp=16, ep=32),
    _release(_K2, 4096, 5328, 4, "GB300", pp=4, dp=64, ep=64, micro=2 * 4096),
)


def _adapted(model: ModelSpec, rate: float, dp: int, tp: int = 1) -> PublishedRate:
    """AutoModel in bf16, micro-batches of two; the larger models recompute, as in its configurations."""
    at = _layout(tp=tp, dp=dp, micro=2 * 4096)
    if tp > 1:
        at = replace(at, sharding="zero3", recompute="full")
    return PublishedRate(_AUTO, model, _H100, 32, 4096, rate, at, targets="all")


def _adapted_fp8(gpu: str, rate: float, **layout: Any) -> PublishedRate:
    return replace(_bridge("26.06", _L70, 32, rate, 20, gpu, **layout), targets="attention", overlapped=False)


def _nemotron(model: ModelSpec, batch: int, seconds: float, layout: ParallelLayout) -> PublishedRate:
    """A step of `seconds` in bf16 on H100, of sequences of 4,096 tokens; its MLPs are not gated."""
    kinds = tuple(replace(it, mlp=replace(it.dense, gated=False)) for it in model.kinds if it.dense)
    rate = batch * 4096 / seconds / layout.devices
    return PublishedRate(_DGXC, replace(model, kinds=kinds), _H100, batch, 4096, rate, layout, overlapped=True)


# nvidia/Nemotron-4-15B and 340B, by the shapes in the source.
ABOVE: Sequence[PublishedRate] = (
    _nemotron(
        decoder("Nemotron-4-15B", 32, 6144, 48, 8, 128, 24576, 256000, False, 4096),
        *(256, 2.693, _layout(tp=2, dp=32, micro=2 * 4096)),
    ),
    _nemotron(
        decoder("Nemotron-4-340B", 96, 18432, 96, 8, 192, 73728, 256000, False, 4096),
        *(64, 4.31, _layout(tp=8, pp=8, dp=4, virtual=12)),
    ),
)


ADAPTERS: Sequence[PublishedRate] = (
    _adapted(_L8, 12473, dp=1),
    _adapted(_Q7, 14110, dp=1),
    _adapted(_L70, 1092, tp=2, dp=4),
    _adapted(_Q32, 2250, tp=2, dp=4),
    _adapted(_L70, 985, tp=2, dp=8),
    _adapted(_Q32, 2073, tp=2, dp=8),
    _adapted_fp8("GB300", 7481, pp=2, dp=4),
    _adapted_fp8("GB200", 6206, pp=2, dp=4),
    _adapted_fp8("H100", 2643, tp=2, pp=4, dp=1),
)


def training_groups() -> list[CaseGroup]:
    named = (
        ("training", ROWS),
        ("training, all of a release", RELEASE),
        ("training, above the ceiling", ABOVE),
        ("training of adapters", ADAPTERS),
    )
    return [CaseGroup(name, "tokens/s a GPU", [_case(row) for row in rows]) for name, rows in named]


def priced_rate(row: PublishedRate) -> float:
    """Tokens/s a GPU by Libra's price of the row's layout."""
    every = replace(row.layout, recompute="full")
    seconds = fmean(_step(row, layout).total for layout in ((row.layout, every) if row.halved else (row.layout,)))
    return row.batch * row.length / seconds / row.layout.devices


def _step(row: PublishedRate, layout: ParallelLayout) -> TrainStep:
    size = 64 if row.gpu.name in ("GB200", "GB300") else 8  # of the 72 of a rack, layouts use 64
    nodes = NodeClass("node", max(1, layout.devices // size), size, row.gpu, row.gpu.link, size / 8 * _NETWORK)
    batch = Batch((float(row.length),), (float(row.batch),))
    rates = training_rates(row.gpu, row.dtype)
    rank = None if row.targets is None else _RANK
    recipe = Recipe(
        batch=1,
        samples_per_prompt=1,
        max_length=1,
        dtype=row.dtype,
        lora_rank=rank,
        lora_targets=row.targets or "all",
    )
    work = Work(
        row.model, batch, training_bytes(recipe, row.model), "none", row.gpu, rates, fabric(nodes), old_policy=False
    )
    return train_step(work, layout)


def _case(row: PublishedRate) -> PublicCase:
    bar = EXPERTS if row.model.experts else DENSE
    words = [row.note] if row.note else []
    if row.overlapped:
        step = _step(row, row.layout)
        words.append(f"{100 * (step.communication / step.total):.0f} % of it are exchanges, which the source overlaps")
    if row.fitted:
        words.append("fitted to")
    return PublicCase(row.name, row.rate, priced_rate(row), bar, "; ".join(words))
