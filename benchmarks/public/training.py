"""Training rates beside published ones, each in the layout in which it ran.

Invariant: a row is priced as one optimiser step of pre-training: forward, backward and update, without the forward
passes that reinforcement learning adds. What a layout of Libra's cannot express is in the row's `note`.

Experts are routed as by the source's benchmark, which decides what is exchanged. Beside tensor parallelism they are
whole, as in the recipes of Megatron Bridge. MXFP8 is priced as FP8 with one scale a tensor.

Dense models of Megatron Bridge overlap tensor-parallel exchanges with products (`tp_comm_overlap`, by the recipes in
scripts/performance/configs/llama). That needs tensors of one shape (docs/performance-guide.md), which batches of
trajectories are not, so Libra charges what Megatron does not hide by itself; the note says how much that is. Its
experts on H100 do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

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
from libra.hardware.parallel import ParallelLayout, Recompute, Sharding

FILE = Path(__file__).with_name("training.yaml")
DENSE, EXPERTS = 0.15, 0.25
_NETWORK = 400e9  # bytes/s of a node: 400 Gb/s a GPU, of eight
_RANK = 16  # of adapters
# torchtitan's H100 have HBM2e of 2.4 TB/s and a limit of 500 W; their FLOP/s are not known.
_DEVICES = {**GPUS, "H100 of 500 W": replace(GPUS["H100"], bandwidth=2.4e12)}


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """Tokens/s a GPU of one row of `training.yaml`, which says what its fields are."""

    source: str
    model: ModelSpec
    gpu: GPU
    batch: int
    length: int
    rate: float
    layout: ParallelLayout
    note: str = ""
    halved: bool = False
    fitted: bool = False
    dtype: Dtype = "bf16"
    targets: Literal["all", "attention"] | None = None
    overlapped: bool = False

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"{self.model.name.rpartition('/')[2]}, {self.layout.devices} {self.gpu.name}{dtype}, {self.source}"


def _ungated(model: ModelSpec) -> ModelSpec:
    kinds = (replace(it, mlp=replace(it.dense, gated=False)) for it in model.kinds if it.dense)
    return replace(model, kinds=tuple(kinds))


# By config.json of meta-llama/Llama-3.1-405B, of openai/gpt-oss-120b, whose sinks and biases have no price of their
# own, and of moonshotai/Kimi-K2-Instruct: DeepSeek-V3 with more experts and fewer heads, one layer of them dense.
# nvidia/Nemotron-4 by the shapes in the source.
_MADE = (
    decoder("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, False, 131072),
    decoder("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, False, 131072, experts=Experts(128, 4, 2880)),
    decoder(
        *("Kimi-K2", 61, 7168, 64, 64, 192, 18432, 163840, False, 131072),
        experts=Experts(384, 8, 2048, 2048),
        sparse=60,
        latent=LatentAttention(64, 1536, 512, 128, 64, 128),
        stored=load_model("deepseek-ai/DeepSeek-V3").stored,
    ),
    _ungated(decoder("Nemotron-4-15B", 32, 6144, 48, 8, 128, 24576, 256000, False, 4096)),
    _ungated(decoder("Nemotron-4-340B", 96, 18432, 96, 8, 192, 73728, 256000, False, 4096)),
)
_MODELS = {model.name: model for model in _MADE}


def _model(name: str, source: str) -> ModelSpec:
    """AutoModel's benchmark gate sends a token to consecutive experts, from a multiple of their number on; Megatron's
    forced balance draws experts evenly, without a limit of groups."""
    model = _MODELS[name] if name in _MODELS else load_model(name)
    if not model.experts:
        return model
    groups = model.experts.count // model.experts.active if source == "NeMo AutoModel" else 1
    experts = replace(model.experts, groups=groups, active_groups=1)
    return replace(model, kinds=tuple(replace(it, mlp=experts) if it.experts else it for it in model.kinds))


def _rate(
    source: str,
    model: str,
    batch: int,
    *,
    rate: float = 0.0,
    seconds: float = 0.0,
    gpu: str = "H100",
    length: int = 4096,
    micro: int | None = None,
    recompute: Recompute = "none",
    sharding: Sharding = "zero1",
    virtual: int = 1,
    **more: Any,
) -> PublishedRate:
    tp, pp, dp, cp, ep = (more.pop(degree, 1) for degree in ("tp", "pp", "dp", "cp", "ep"))
    whole = tp > 1 and ep > 1
    layout = ParallelLayout(tp, pp, dp, cp, ep, micro or length, recompute, sharding, False, virtual, whole)
    rate = rate or batch * length / seconds / layout.devices
    return PublishedRate(source, _model(model, source), _DEVICES[gpu], batch, length, rate, layout, **more)


RATES: dict[str, Sequence[PublishedRate]] = {
    group: [_rate(**row) for row in rows] for group, rows in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
}


def training_groups() -> list[CaseGroup]:
    named = {
        "rows": "training",
        "release": "training, all of a release",
        "above": "training, above the ceiling",
        "adapters": "training of adapters",
    }
    return [CaseGroup(name, "tokens/s a GPU", list(map(_case, RATES[group]))) for group, name in named.items()]


def priced_rate(row: PublishedRate) -> float:
    """Tokens/s a GPU by Libra's price of the row's layout. A row that is `halved` has the mean of the seconds with no
    recomputation and with all."""
    every = replace(row.layout, recompute="full")
    seconds = fmean(_step(row, layout).total for layout in ((row.layout, every) if row.halved else (row.layout,)))
    return row.batch * row.length / seconds / row.layout.devices


def _step(row: PublishedRate, layout: ParallelLayout) -> TrainStep:
    size = 64 if row.gpu.name in ("GB200", "GB300") else 8  # of the 72 of a rack, layouts use 64
    nodes = NodeClass("node", max(1, layout.devices // size), size, row.gpu, row.gpu.link, size / 8 * _NETWORK)
    batch, rates = Batch((float(row.length),), (float(row.batch),)), training_rates(row.gpu, row.dtype)
    adapted: dict[str, Any] = {} if row.targets is None else {"lora_rank": _RANK, "lora_targets": row.targets}
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=1, dtype=row.dtype, **adapted)
    stored = training_bytes(recipe, row.model)
    return train_step(Work(row.model, batch, stored, "none", row.gpu, rates, fabric(nodes), old_policy=False), layout)


def _case(row: PublishedRate) -> PublicCase:
    words = [row.note] if row.note else []
    if row.overlapped:
        step = _step(row, row.layout)
        words.append(f"{100 * (step.communication / step.total):.0f} % of it are exchanges, which the source overlaps")
    if row.fitted:
        words.append("fitted to")
    return PublicCase(row.name, row.rate, priced_rate(row), EXPERTS if row.model.experts else DENSE, "; ".join(words))
