"""The training recipe: the part of a planning request that is neither hardware, nor model, nor trajectories.

Invariant: a recipe in memory is consistent. An inconsistent file is refused in one line that names the key and the
remedy. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from libra.config.frameworks import Framework, framework_named
from libra.config.yaml_file import Section, read_section

Mode = Literal["async", "sync", "colocated"]
Dtype = Literal["bf16", "fp16", "fp32", "fp8"]
Optimiser = Literal["adamw", "adamw_bf16", "sgd"]
# Training kernels: fused, as in Megatron and LLM Foundry; or eager, PyTorch's kernel for each operation.
Execution = Literal["fused", "eager"]
# After an update, contexts keep the KV of older weights, or are prefilled again (refresh).
KVOnUpdate = Literal["keep", "refresh"]
# vLLM's names; `libra.cost.quantization` has their bytes and speeds.
WeightQuantization = Literal["fp8", "awq", "gptq", "modelopt_fp4", "mxfp4"]
RolloutDtype = Literal["bf16", WeightQuantization]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"]

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # of a weight, which is converted to FP8 for matrix products
_FP8_COPIES = 2  # bytes: a weight and its transpose, kept over the micro-batches of a step
_MOMENTS = {"adamw": 8, "adamw_bf16": 4, "sgd": 0}  # two in fp32, two in bf16, none

_Count = Annotated[int, Field(strict=True, ge=1)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1)]

DEFAULT_ROUTER = "cmlfq"


def _router_of(framework: str | None) -> str:
    """The default router of a request: the router of its framework, or `cmlfq`."""
    return framework_named(framework).router or DEFAULT_ROUTER


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Bytes that training keeps for one parameter. Each kind of bytes may be sharded or not."""

    weights: int  # in the compute type
    gradients: float  # in the compute type
    states: float  # the optimiser's: moments, and an fp32 master copy if the compute type is smaller
    compute: int | None = None  # of a number in matrix products, under autocast; None: as the weights
    trained: float = 1.0  # share of the parameters that have gradients; below 1: only adapters are trained
    copies: float = 0.0  # of weights in the type of the products, on each device that uses them
    offloaded: bool = False  # whether the optimiser's state is in the host's memory, and updated there

    @property
    def product(self) -> int:
        """Bytes of one number in the output of a matrix product."""
        return self.weights if self.compute is None else self.compute

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states

    @property
    def on_devices(self) -> float:
        """The part of the total that devices hold between two steps."""
        return self.total - (self.states if self.offloaded else 0.0)


class Recipe(Section):
    """Settings of one optimiser step. Only `batch`, `samples_per_prompt` and `max_length` have no default."""

    batch: Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # trajectories trained on in one step
    samples_per_prompt: _Count  # trajectories of one prompt, which are compared with each other; divides `batch`
    max_length: _Count  # longest context of a trajectory, in tokens
    # async: generation and training overlap; sync: they take turns on separate devices; colocated: on the same devices.
    mode: Mode = "async"
    # Versions that a trajectory's oldest token may lag behind the trained policy. Default: 1 when async, 0 otherwise.
    staleness: int = Field(default_factory=lambda given: 1 if given["mode"] == "async" else 0, strict=True, ge=0)
    # Limit on trajectories in generation at the same time; null: only the bound on staleness limits them.
    concurrency: _Count | None = None
    # Whether training accumulates gradients of complete groups while other groups are still generated.
    early_gradients: bool = Field(default=False, strict=True)
    kv_on_update: KVOnUpdate = "keep"
    # A frozen model that scores every trajectory: none, in device memory, or loaded from the host in each step.
    reference: Literal["none", "resident", "offloaded"] = "none"
    dtype: Dtype = "bf16"  # of training's compute; fp8: the layers' products in FP8, weights in bf16
    # Type of the engines' weights: bf16, or a `quantization` of vLLM; None: the checkpoint's type.
    rollout_dtype: RolloutDtype | None = None
    kv_cache_dtype: KVCacheDtype = "auto"  # of the engines' KV; auto: bf16
    optimiser: Optimiser = "adamw"
    # Whether hosts store the optimiser's state and update it (Megatron's --optimizer-cpu-offload).
    offload_optimiser: bool = Field(default=False, strict=True)
    # Rank of low-rank adapters (LoRA): only the adapters are trained and published; null: all weights are trained.
    lora_rank: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    lora_targets: Literal["all", "attention"] = "all"  # the layers' matrices that have adapters
    execution: Execution = "fused"
    horizon: _Count = 100  # expected lifetime of a plan, in steps, over which its switching cost must pay back
    # Share of a GPU's memory for an engine, and tokens of one iteration: defaults of vLLM's server on H100.
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.9
    max_batched_tokens: _Count = 8192
    # Seconds of a tool return whose time was not recorded: a search or a short command. 0: tools answer at once.
    tool_seconds_if_unknown: Annotated[float, Field(strict=True, ge=0)] = 1.0
    # Whether a bucket may be a prefill/decode pair: prompts are computed on some engines, tokens generated on others.
    prefill_decode: bool = Field(default=False, strict=True)
    max_buckets: _Count = 4  # number of buckets: ranges of final context that have their own engines
    # Framework that will carry the plan out, a name of `libra.config.frameworks`: it restricts the menu. null: any.
    framework: Annotated[str, Field(strict=True)] | None = None
    # Policy that will route the turns: a name of `libra.route.catalogue`, or path.py:Class. Default: the framework's
    # router, or cmlfq without one.
    router: str = Field(default_factory=lambda given: _router_of(given["framework"]), strict=True, min_length=1)
    # Share of a trajectory's work after its first tool return that runs in its own bucket; null: the measured share.
    router_hit: _Share | None = None

    @field_validator("framework")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        framework_named(name)
        return name

    @model_validator(mode="after")
    def _suits_framework(self) -> Self:
        can = self.carried_by
        if self.framework is None:
            return self
        if self.mode == "colocated":
            raise ValueError(
                f"mode is colocated, but {can.name} trains on separate devices: set mode to async or sync, or "
                f"leave framework out"
            )
        if self.prefill_decode and not can.pairs:
            raise ValueError(
                f"prefill_decode is true, but {can.name} has no prefill/decode pairs: remove prefill_decode"
            )
        if can.most_staleness is not None and self.staleness > can.most_staleness:
            raise ValueError(
                f"staleness is {self.staleness}, but {can.name} allows at most {can.most_staleness}: lower staleness,"
                " or leave framework out"
            )
        return self

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.batch % self.samples_per_prompt:
            raise ValueError(
                f"batch is {self.batch}, which {self.samples_per_prompt} samples_per_prompt do not divide: make batch a"
                " multiple"
            )
        if self.lora_rank is None and self.lora_targets != "all":
            raise ValueError(
                f"lora_targets is {self.lora_targets}, but lora_rank is not given: set lora_rank, or remove"
                " lora_targets"
            )
        if self.dtype == "fp32" and self.rollout_dtype is None:
            raise ValueError("dtype is fp32, but engines are priced in 8 or 16 bits: set rollout_dtype to bf16 or fp8")
        if self.dtype == "fp8" and self.execution == "eager":
            raise ValueError(
                "dtype is fp8, but eager modules multiply in 16 bits: set execution to fused, or dtype to bf16"
            )
        if self.mode != "async" and self.staleness:
            raise ValueError(
                f"staleness is {self.staleness}, but mode is {self.mode}: set staleness to 0, or mode to async"
            )
        if self.concurrency is not None and self.concurrency < self.samples_per_prompt:
            raise ValueError(
                f"concurrency is {self.concurrency}, less than a group: set concurrency to samples_per_prompt"
                f" ({self.samples_per_prompt}) or more"
            )
        if self.mode == "colocated" and self.early_gradients:
            raise ValueError(
                "early_gradients is true, but mode is colocated, and devices that generate cannot train: remove"
                " early_gradients"
            )
        if self.prefill_decode and (self.mode == "colocated" or self.kv_on_update == "refresh"):
            key, value = ("mode", "async") if self.mode == "colocated" else ("kv_on_update", "keep")
            raise ValueError(
                f"prefill_decode is true, but {key} is {getattr(self, key)}, with which pairs are not simulated: set"
                f" {key} to {value}, or leave prefill_decode out"
            )
        return self

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer fields that have their default, so that an older recipe is written unchanged."""
        written: dict[str, Any] = fields(self)
        if not self.prefill_decode:
            written.pop("prefill_decode", None)
        if self.kv_cache_dtype == "auto":
            written.pop("kv_cache_dtype", None)
        if not self.offload_optimiser:
            written.pop("offload_optimiser", None)
        if self.lora_rank is None:
            written.pop("lora_rank", None)
        if self.lora_targets == "all":
            written.pop("lora_targets", None)
        if self.framework is None:
            written.pop("framework", None)
        elif not self.router_given:
            written.pop("router", None)
        return written

    @property
    def carried_by(self) -> Framework:
        """Capabilities of the framework that carries the plan out."""
        return framework_named(self.framework)

    @property
    def router_given(self) -> bool:
        """Whether the request itself names a router."""
        return self.framework is None or "router" in self.model_fields_set

    def without_framework(self) -> Recipe:
        """The same recipe for any framework, without a router that came from the framework."""
        kept = {name: getattr(self, name) for name in self.model_fields_set if name != "framework"}
        return Recipe(**kept)

    @property
    def prompts(self) -> int:
        """Prompts of one step."""
        return self.batch // self.samples_per_prompt

    @property
    def training_bytes(self) -> TrainingBytes:
        """Bytes per trained parameter.

        AdamW needs 16 in mixed precision: 2 for weights, 2 for gradients, 4 for the master copy, 8 for moments
        (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1). AdamW needs 16 in fp32, too (4, 4, 0, 8), and
        12 with both moments in bf16. SGD without momentum needs 8. fp8 needs the bytes of bf16, plus the copies of
        weights in both orientations that Transformer Engine keeps (`cache_weight`)."""
        compute = _BYTES[self.dtype]
        master = 0 if self.dtype == "fp32" else _BYTES["fp32"]
        copies = _FP8_COPIES if self.dtype == "fp8" else 0
        states = master + _MOMENTS[self.optimiser]
        return TrainingBytes(compute, compute, states, copies=copies, offloaded=self.offload_optimiser)


def load_recipe(path: Path | str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a request file such as `examples/request.yaml`; `overrides` replace its values. Raises `ConfigError`."""
    return read_section(path, Recipe, "examples/request.yaml", overrides)
