"""Types in which an engine stores weights and KV, and computes matrix products.

Invariant: memory, transfers and times use the same bytes. Names are vLLM's: `quantization` for weights, and
`kv_cache_dtype`. An engine without `quantization` stores weights in the checkpoint's format. With the checkpoint's own
format as `quantization`, the same matrices keep 16 bits as in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra.config.recipe import Recipe
from libra.config.yaml_file import unknown
from libra.hardware.gpu import GPU
from libra.hardware.gpus import record_of
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import BF16, KeptShares, MatrixKind, NumberFormat, WeightFormat

ACTIVATION_BYTES = 2  # bytes of an activation between layers, and of a weight that is not quantised

# Group sizes as in vLLM's loaders: 128 for AWQ (with a zero point) and GPTQ, 16 for NVFP4, and 32 for MXFP4, which
# stores routed experts alone.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    it.name: it
    for it in (
        BF16,
        WeightFormat("fp8", NumberFormat(8), "fp8"),
        WeightFormat("awq", NumberFormat(4, 128, 16 + 4)),
        WeightFormat("gptq", NumberFormat(4, 128, 16)),
        WeightFormat("modelopt_fp4", NumberFormat(4, 16, 8), "fp4"),
        WeightFormat("mxfp4", NumberFormat(4, 32, 8), kept=KeptShares(attention=1, dense=1, shared=1)),
    )
}
KV_FORMATS: Mapping[str, NumberFormat] = {
    "auto": BF16.number,
    "bfloat16": BF16.number,
    "fp8": NumberFormat(8),
    "fp8_e4m3": NumberFormat(8),
    "fp8_e5m2": NumberFormat(8),
    "nvfp4": NumberFormat(4, 16, 8),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization settings of one engine. For an unknown name, raises a ValueError whose message begins with the
    key.
    """

    quantization: str | None = None  # None: as the checkpoint stores weights
    kv_cache_dtype: str = "auto"  # auto: the checkpoint's type of KV, otherwise 16 bits

    def __post_init__(self) -> None:
        if self.quantization is not None and self.quantization not in WEIGHT_FORMATS:
            raise ValueError(f"quantization: {unknown('quantization', self.quantization, WEIGHT_FORMATS)}")
        if self.kv_cache_dtype not in KV_FORMATS:
            raise ValueError(f"kv_cache_dtype: {unknown('type', self.kv_cache_dtype, KV_FORMATS)}")

    def weights(self, model: ModelSpec) -> WeightFormat:
        """The format of the model's weights in this engine."""
        own = model.stored
        if self.quantization is None:
            return BF16 if own is None else own
        return own if own is not None and own.name == self.quantization else WEIGHT_FORMATS[self.quantization]

    def note(self, model: ModelSpec) -> str | None:
        """Note on the engine's weight format if the checkpoint is quantised; otherwise None. A key may replace the
        checkpoint's format.
        """
        own = model.stored
        if own is None:
            return None
        if self.weights(model) is own:
            return f"engines store {model.name} in its checkpoint's format: {own.described}"
        return f"engines store {model.name} in {self.quantization} (key quantization); its checkpoint: {own.described}"

    def kv_number(self, model: ModelSpec) -> NumberFormat:
        own = model.stored
        return KV_FORMATS[own.kv_cache_dtype if self.kv_cache_dtype == "auto" and own else self.kv_cache_dtype]

    def name(self, model: ModelSpec) -> str:
        """The type of weights, and of KV unless it has 16 bits."""
        weights, kv = self.weights(model).described, self.kv_number(model)
        if kv == BF16.number:
            return weights
        own = model.stored
        dtype = own.kv_cache_dtype if self.kv_cache_dtype == "auto" and own else self.kv_cache_dtype
        return f"{weights}, KV {dtype}"

    def refusal(self, model: ModelSpec) -> str | None:
        """Reason why the model cannot be stored in this way; None if it can."""
        if self.weights(model).kept.only_experts and model.experts is None:
            return (
                f"quantization is {self.weights(model).name}, which is for routed experts, but {model.name} has "
                f"none: choose another"
            )
        if self.kv_number(model) == KV_FORMATS["nvfp4"] and model.latent:
            return f"kv_cache_dtype is nvfp4, but {model.name} has latent vectors, not keys and values: choose fp8"
        return None

    def tp_refusal(self, model: ModelSpec, tp: int, routed: bool = True) -> str | None:
        """Reason why `tp` devices cannot divide weights stored in square blocks with a shared scale; None if they can.
        Without `routed`, routed experts are on other devices.
        """
        stored = self.weights(model)
        block, own = stored.block, {it.kind for it in stored.own}
        if not block:
            return None
        widths: list[tuple[str, MatrixKind, int]] = [
            ("num_attention_heads * head_dim", "attention", it.mixer.width) for it in model.kinds if it.mixer
        ]
        widths += [("intermediate_size", "dense", it.dense.intermediate) for it in model.kinds if it.dense]
        if model.experts is not None:
            if routed:
                widths.append(("moe_intermediate_size", "experts", model.experts.intermediate))
            if model.experts.shared_intermediate:
                widths.append(("shared experts", "shared", model.experts.shared_intermediate))
        for field, kind, width in widths:
            if stored.kept.of(kind) < 1 and kind not in own and width % (tp * block):
                remedy = f"choose a smaller tp{', or expert parallelism (ep)' if kind == 'experts' else ''}"
                return f"weight_block_size is {block}: tp {tp} cuts {field} {width:,} within a block; {remedy}"
        return None

    # Bytes

    def matrix_bytes(self, model: ModelSpec, kind: MatrixKind) -> float:
        """Mean bytes of a weight of this kind."""
        return self.weights(model).bytes_of(kind)

    def weight_bytes(self, model: ModelSpec, tp: int = 1, pp: int = 1, ep: int = 1) -> float:
        """Bytes on one device of the heaviest pipeline stage; see `ModelSpec.device_parameters`."""
        stored, held = self.weights(model), model.device_parameters(tp, pp, ep)
        if stored == BF16:
            return ACTIVATION_BYTES * held.total
        parts: Mapping[MatrixKind, float] = {"attention": held.mixer, "shared": held.shared, "experts": held.routed}
        quantised = sum(stored.bytes_of(kind) * size for kind, size in parts.items())
        return ACTIVATION_BYTES * held.plain + quantised + stored.bytes_of("dense") * held.dense

    def version_bytes(self, model: ModelSpec) -> float:
        """Bytes of all trained weights: the size of an update."""
        if self.weights(model) == BF16:
            return ACTIVATION_BYTES * model.trained_parameters
        return self.weight_bytes(model) - ACTIVATION_BYTES * model.tower

    def kv_bytes_per_token(self, model: ModelSpec, tp: int = 1, pp: int = 1, context: float | None = None) -> float:
        """Bytes in the KV cache of one device; see `ModelSpec.kv_bytes_per_token`."""
        return model.kv_bytes_per_token(self.kv_number(model).bytes, tp, pp, context)

    def kv_bytes(self, model: ModelSpec, context: float, tp: int = 1, pp: int = 1) -> float:
        """Bytes of a sequence of `context` tokens on one device; see `ModelSpec.kv_bytes`."""
        return model.kv_bytes(context, self.kv_number(model).bytes, tp, pp)

    # Products

    def faster(self, gpu: GPU, model: ModelSpec, kind: MatrixKind) -> float:
        """Speed of the GPU's products with matrices of this kind, relative to bf16; 1 for matrices that keep 16
        bits.
        """
        stored = self.weights(model)
        kept = stored.kept.of(kind)
        return 1 / (kept + (1 - kept) / record_of(gpu).faster.get(stored.product_of(kind), 1.0))


AS_STORED = Quantization()


def rollout_quantization(recipe: Recipe) -> Quantization:
    """Quantization of the engines of a recipe."""
    return Quantization(recipe.rollout_dtype, recipe.kv_cache_dtype)
