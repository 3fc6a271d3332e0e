"""Training rates beside published ones, each in the layout in which it ran.

Invariant: a row is priced as one optimiser step of pre-training: forward, backward and update, without the forward
passes that reinforcement learning adds. What a layout of Libra's cannot express is in the row's `note`.

Sources: the performance summaries of NeMo AutoModel (docs/performance-summary.mdx) and of Megatron Bridge
(docs/performance-summary-archive.md, containers 25.09 to 26.06), and torchtitan's benchmarks
(benchmarks/llama3_h100_202412_torchtitan.md, docs/performance.md of 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.public.case import CaseGroup, PublicCase
from libra.config.recipe import TrainingBytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, GPUS, NodeClass
from libra.hardware.model_file import load_model
from libra.hardware.parallel import ParallelLayout, Recompute, Sharding

DENSE, EXPERTS = 0.15, 0.25
_ADAMW = TrainingBytes(weights=2, gradients=2, states=12)
_NETWORK = 400e9  # bytes/s of a node: 400 Gb/s a GPU, of eight
# torchtitan's H100 have HBM2e of 2.4 TB/s and a limit of 500 W; their FLOP/s are not known.
_H100_500W = replace(GPUS["H100"], bandwidth=2.4e12)


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """Tokens/s a GPU of one row, and what it ran. `length` is in tokens, `batch` in sequences of it."""

    source: str
    model: str
    gpu: GPU
    batch: int
    length: int
    rate: float
    layout: ParallelLayout
    note: str = ""
    halved: bool = False  # every second layer is computed again: the mean of the seconds with none and with all
    fitted: bool = False  # one of those that `_EXPERTS` of `libra.cost.sources.rates` was fitted to

    @property
    def name(self) -> str:
        return f"{self.model.rpartition('/')[2]}, {self.layout.devices} {self.gpu.name}, {self.source}"


def _layout(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    micro: int = 4096,
    recompute: Recompute = "none",
    sharding: Sharding = "zero1",
) -> ParallelLayout:
    return ParallelLayout(tp, pp, dp, cp, ep, micro, recompute, sharding, chunked_logits=False)


_V3, _Q30, _Q235 = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
_L8, _L70 = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
_AUTO, _BRIDGE, _TITAN = "NeMo AutoModel", "Megatron Bridge", "torchtitan"
_H100, _A100 = GPUS["H100"], GPUS["A100"]
_INTERLEAVED, _FP8 = "the source interleaves stages", "the source multiplies in FP8"

ROWS: Sequence[PublishedRate] = (
    PublishedRate(
        _AUTO, _V3, _H100, 512, 4096, 1002, _layout(pp=4, dp=64, ep=64, recompute="full"), f"{_INTERLEAVED}, 8 each"
    ),
    PublishedRate(
        *(_AUTO, _V3, _H100, 8192, 4096, 865, _layout(pp=4, dp=256, ep=64, recompute="full")),
        note=f"{_INTERLEAVED}, 8 each",
        fitted=True,
    ),
    PublishedRate(
        _AUTO, _Q30, _H100, 512, 4096, 12040, _layout(dp=8, ep=8, micro=4 * 4096, recompute="full", sharding="zero3")
    ),
    PublishedRate(*(f"{_BRIDGE} 26.06", _Q30, _H100, 1024, 4096, 8826, _layout(dp=16, ep=16)), note=_FP8, fitted=True),
    PublishedRate(
        *(f"{_BRIDGE} 25.11", _Q235, _H100, 2048, 4096, 1575, _layout(tp=2, pp=8, dp=16, ep=16)),
        note=f"{_FP8}, interleaves stages, ep 32",
    ),
    PublishedRate(
        *(f"{_BRIDGE} 26.04.01", _Q235, _H100, 8192, 4096, 1712, _layout(tp=2, pp=8, dp=16, ep=16)),
        note=f"{_FP8}, interleaves stages, ep 32",
        fitted=True,
    ),
    PublishedRate(
        *(f"{_BRIDGE} 25.09", _V3, _H100, 8192, 4096, 1297, _layout(tp=2, pp=8, dp=64, ep=64, recompute="selective")),
        note=f"{_FP8}, interleaves stages",
    ),
    PublishedRate(
        _AUTO, _L70, _H100, 128, 8192, 867, _layout(dp=32, cp=2, micro=8192, recompute="full", sharding="zero3")
    ),
    PublishedRate(
        *(_TITAN, _L8, _H100_500W, 16, 8192, 6667, _layout(dp=8, micro=2 * 8192, sharding="zero3")),
        note="H100 limited to 500 W",
        halved=True,
    ),
    PublishedRate(*(_TITAN, _L8, _A100, 64, 8192, 2904, _layout(dp=64, micro=8192, sharding="zero3")), halved=True),
    PublishedRate(_TITAN, _L70, _A100, 64, 8192, 331, _layout(dp=64, micro=8192, recompute="full", sharding="zero3")),
)


def training_group() -> CaseGroup:
    return CaseGroup("training", "tokens/s a GPU", [_case(row) for row in ROWS])


def priced_rate(row: PublishedRate) -> float:
    """Tokens/s a GPU by Libra's price of the row's layout."""
    every = replace(row.layout, recompute="full")
    seconds = fmean(_seconds(row, layout) for layout in ((row.layout, every) if row.halved else (row.layout,)))
    return row.batch * row.length / seconds / row.layout.devices


def _seconds(row: PublishedRate, layout: ParallelLayout) -> float:
    nodes = NodeClass("node", max(1, layout.devices // 8), 8, row.gpu, row.gpu.link, _NETWORK)
    batch = Batch((float(row.length),), (float(row.batch),))
    rates, model = training_rates(row.gpu), load_model(row.model)
    work = Work(model, batch, _ADAMW, "none", row.gpu, rates, fabric(nodes), old_policy=False)
    return train_step(work, layout).total


def _case(row: PublishedRate) -> PublicCase:
    bar = EXPERTS if load_model(row.model).experts else DENSE
    words = [row.note] if row.note else []
    if row.fitted:
        words.append("fitted to")
    return PublicCase(row.name, row.rate, priced_rate(row), bar, "; ".join(words))
