"""Kinds of layers: a mixer of tokens and an MLP, either of which may be absent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from libra.hardware.attention import Attention
from libra.hardware.checks import require_at_least
from libra.hardware.context import ALL, Retained
from libra.hardware.latent import CompressedAttention, LatentAttention
from libra.hardware.matrix import parameters
from libra.hardware.mlp import MLP, Experts
from libra.hardware.state_space import Mamba, Mamba2
from libra.hardware.states import GatedDeltaNet, KimiDelta, Lightning, ShortConvolution

Mixer = (
    Attention
    | LatentAttention
    | CompressedAttention
    | GatedDeltaNet
    | KimiDelta
    | Lightning
    | Mamba
    | Mamba2
    | ShortConvolution
)
_BY_KIND = Field(discriminator="kind")


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer, or of several, on one device."""

    mixer: float = 0.0
    dense: float = 0.0  # MLPs that all tokens pass
    shared: float = 0.0  # experts that all tokens pass
    routed: float = 0.0  # routed experts
    plain: float = 0.0  # norms, routers and everything else that is never quantised

    @property
    def total(self) -> float:
        return self.mixer + self.dense + self.shared + self.routed + self.plain

    def __add__(self, other: LayerParameters) -> LayerParameters:
        return LayerParameters(
            self.mixer + other.mixer,
            self.dense + other.dense,
            self.shared + other.shared,
            self.routed + other.routed,
            self.plain + other.plain,
        )

    def __mul__(self, count: float) -> LayerParameters:
        return LayerParameters(
            count * self.mixer, count * self.dense, count * self.shared, count * self.routed, count * self.plain
        )


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer: its mixer, its MLP, and other parameters."""

    mixer: Annotated[Mixer, _BY_KIND] | None
    mlp: Annotated[MLP | Experts, _BY_KIND] | None
    norms: int = 2  # number of norms, each as wide as the hidden state
    other: int = 0  # further parameters, which every device has

    def __post_init__(self) -> None:
        require_at_least(0, norms=self.norms, other=self.other)
        if self.mixer is None and self.mlp is None:
            raise ValueError("a layer has neither a mixer nor an MLP; leave it out")

    @property
    def experts(self) -> Experts | None:
        return self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def dense(self) -> MLP | None:
        return self.mlp if isinstance(self.mlp, MLP) else None

    @property
    def parts(self) -> int:
        """Number of parts (mixer and MLP); with tensor parallelism, each part ends in an all-reduce."""
        return (self.mixer is not None) + (self.mlp is not None)

    def mixer_parameters(self, hidden: int, tp: int = 1) -> float:
        """Parameters of the mixer on one of `tp` devices. Heads are divided, and parameters that all heads share are
        repeated. With more devices than KV heads, KV heads are repeated (Megatron-LM and vLLM). The down-projections of
        latent attention are always repeated.
        """
        if self.mixer is None:
            return 0.0
        return parameters(self.mixer.matrices(hidden), tp) + self.mixer.vectors(hidden, tp)

    def parameters(self, hidden: int, tp: int = 1, ep: int = 1) -> LayerParameters:
        """Parameters on one device, if `tp` devices divide the layer and `ep` replicas of the layer divide its
        experts."""
        plain = float(self.norms * hidden + self.other)
        mixer, experts = self.mixer_parameters(hidden, tp), self.experts
        if experts is None:
            return LayerParameters(mixer, self.dense.parameters(hidden) / tp if self.dense else 0.0, plain=plain)
        return LayerParameters(
            mixer,
            shared=experts.of_shared(hidden) / tp,
            routed=experts.of_one(hidden) * experts.count / ep / tp,
            plain=plain + experts.of_router(hidden),
        )

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        """Memory of a sequence on one of `tp` devices."""
        return () if self.mixer is None else self.mixer.kept(tp)

    def kv_bytes(self, context: float, number: float, tp: int = 1) -> float:
        """Bytes of a sequence of `context` tokens on one of `tp` devices. One number of KV takes `number` bytes."""
        return sum(part.bytes(context, number) for part in self.kept(tp))

    def key_flops(self, mean: float) -> float:
        """FLOPs of a forward pass per key. `mean` is the mean number of a token's keys, including keys beyond its
        reach."""
        reads = () if self.mixer is None else self.mixer.reads()
        return sum(it.pair_flops * (1.0 if it.reach == ALL else it.reach.share(mean)) for it in reads)
