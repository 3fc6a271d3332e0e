"""How an engine stores weights and KV, and in which type its matrix products are computed.

Invariant: memory, transfers and times read the same bytes. Names are vLLM's: `quantization`, of weights, and
`kv_cache_dtype`. Scales of whole matrices or channels are too few to count; those of groups count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from libra.config.recipe import Recipe
from libra.config.yaml_file import unknown
from libra.hardware.cluster import GPU
from libra.hardware.model import ModelSpec

ACTIVATION_BYTES = 2  # of a number that goes from layer to layer, and of weights that stay as they are
Product = Literal["bf16", "fp8", "fp4"]

# Dense products as many times as fast as in bf16, by data sheets. Other GPUs have no tensor cores for such numbers:
# weights are widened as they are read, as vLLM's Marlin kernels do.
_EIGHT: Mapping[Product, float] = {"fp8": 2.0}
_FASTER: Mapping[str, Mapping[Product, float]] = {
    "H100": _EIGHT,
    "H800": _EIGHT,
    "H200": _EIGHT,
    "L4": _EIGHT,
    "L40S": _EIGHT,
    "B200": {"fp8": 2.0, "fp4": 4.0},
}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Numbers of `bits`; `group` of them share what takes `scale_bits`."""

    bits: int
    group: int = 1
    scale_bits: int = 0

    @property
    def bytes(self) -> float:
        """Of a number, with its part of the scale."""
        return (self.bits + self.scale_bits / self.group) / 8


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A `quantization` of vLLM's. The matrices of layers are quantised; embeddings, the output head, norms and routers
    stay in 16 bits, and with `experts_only` all but routed experts."""

    number: NumberFormat
    product: Product = "bf16"
    experts_only: bool = False


_BF16 = NumberFormat(16)
# Groups as in vLLM's loaders: 128 of AWQ and GPTQ (with a zero point in AWQ), 16 of NVFP4, 32 of MXFP4.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat(NumberFormat(8), "fp8"),
    "awq": WeightFormat(NumberFormat(4, 128, 16 + 4)),
    "gptq": WeightFormat(NumberFormat(4, 128, 16)),
    "modelopt_fp4": WeightFormat(NumberFormat(4, 16, 8), "fp4"),
    "mxfp4": WeightFormat(NumberFormat(4, 32, 8), experts_only=True),
}
KV_FORMATS: Mapping[str, NumberFormat] = {
    "auto": _BF16,
    "bfloat16": _BF16,
    "fp8": NumberFormat(8),
    "fp8_e4m3": NumberFormat(8),
    "fp8_e5m2": NumberFormat(8),
    "nvfp4": NumberFormat(4, 16, 8),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of one engine. Raises ValueError that opens with the key where a name is not known."""

    quantization: str | None = None  # None: weights of 16 bits
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.quantization is not None and self.quantization not in WEIGHT_FORMATS:
            raise ValueError(f"quantization: {unknown('quantization', self.quantization, WEIGHT_FORMATS)}")
        if self.kv_cache_dtype not in KV_FORMATS:
            raise ValueError(f"kv_cache_dtype: {unknown('type', self.kv_cache_dtype, KV_FORMATS)}")

    @property
    def name(self) -> str:
        weights = self.quantization or "bf16"
        return weights if self.kv_number == _BF16 else f"{weights}, KV {self.kv_cache_dtype}"

    @property
    def kv_number(self) -> NumberFormat:
        return KV_FORMATS[self.kv_cache_dtype]

    def refusal(self, model: ModelSpec) -> str | None:
        """Why the model cannot be stored like this; None where it can."""
        if self._weights.experts_only and model.experts is None:
            return (
                f"quantization is {self.quantization}, which is of routed experts, and {model.name} has none: take"
                " another one"
            )
        if self.kv_cache_dtype == "nvfp4" and model.latent is not None:
            return f"kv_cache_dtype is nvfp4, which is of keys and values; {model.name} has latent ones: take fp8"
        return None

    # Bytes

    @property
    def matrix_bytes(self) -> float:
        """Of a weight of attention, or of an MLP that all tokens take."""
        return ACTIVATION_BYTES if self._weights.experts_only else self._weights.number.bytes

    @property
    def expert_bytes(self) -> float:
        """Of a weight of a routed expert."""
        return self._weights.number.bytes

    def weight_bytes(self, model: ModelSpec, tp: int = 1, pp: int = 1, ep: int = 1) -> float:
        """On one device of the heaviest pipeline stage; see `ModelSpec.device_parameters`."""
        total = model.device_parameters(tp, pp, ep)
        if self.quantization is None:
            return ACTIVATION_BYTES * total
        routed, kept = model.device_routed_parameters(tp, pp, ep), model.unquantized_parameters(tp, pp)
        return ACTIVATION_BYTES * kept + self.matrix_bytes * (total - routed - kept) + self.expert_bytes * routed

    def version_bytes(self, model: ModelSpec) -> float:
        """Of all weights: what an update sends."""
        return ACTIVATION_BYTES * model.parameters if self.quantization is None else self.weight_bytes(model)

    def kv_bytes_per_token(self, model: ModelSpec, tp: int = 1, pp: int = 1) -> float:
        """In the KV cache of one device; see `ModelSpec.kv_bytes_per_token`."""
        return model.kv_bytes_per_token(self.kv_number.bytes, tp, pp)

    # Products

    def faster(self, gpu: GPU) -> float:
        """Times as fast as in bf16 that the GPU multiplies quantised matrices."""
        return _FASTER.get(gpu.name, {}).get(self._weights.product, 1.0)

    @property
    def _weights(self) -> WeightFormat:
        return WeightFormat(_BF16) if self.quantization is None else WEIGHT_FORMATS[self.quantization]


UNQUANTIZED = Quantization()


def rollout_quantization(recipe: Recipe) -> Quantization:
    """Of the engines of a recipe."""
    weights = recipe.rollout_dtype
    return Quantization(None if weights in (None, "bf16") else weights, recipe.kv_cache_dtype)
