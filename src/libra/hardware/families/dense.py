"""Families with grouped-query attention and one dense MLP in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware.attention import Attention
from libra.hardware.context import ALL, Reach
from libra.hardware.families.fields import Fields
from libra.hardware.families.parts import Norm, attention, head_dim, layer_count, reaches, switched_reaches
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind
from libra.hardware.mlp import MLP


@dataclass(frozen=True, slots=True)
class Dense:
    """Options of a family. Calling the value reads the layers of a configuration."""

    qkv_bias: bool | str = False  # or the name of the field with the value
    out_bias: str | None = None  # name of the field that tells whether the output projection has a bias
    mlp_bias: str | None = None
    qk_norm: Norm = "none"
    own_head_dim: bool = False  # whether head_dim is required
    norms: int = 2
    windows: Literal["none", "all", "switch"] = "none"  # all: if a width is given; switch: by Qwen's fields
    every: int = 0  # without layer_types, each `every`-th layer sees all keys
    pattern: str = "sliding_window_pattern"  # name of the field with `every`
    gated: bool = True
    layer_norm: bool = False  # whether norms have a bias, too
    norm_field: str | None = None  # name of the field that tells whether queries and keys have norms

    def __call__(self, fields: Fields) -> Stack:
        layers, hidden = layer_count(fields), fields.count("hidden_size")
        bias = self.qkv_bias if isinstance(self.qkv_bias, bool) else fields.flag(self.qkv_bias)
        normed = self.norm_field is None or fields.flag(self.norm_field)
        mlp = MLP(
            fields.count("intermediate_size"),
            gated=self.gated,
            bias=self.mlp_bias is not None and fields.flag(self.mlp_bias),
        )
        more = self.norms * hidden if self.layer_norm else 0
        made = [
            LayerKind(
                attention(
                    fields,
                    qkv_bias=bias,
                    out_bias=self.out_bias is not None and fields.flag(self.out_bias),
                    qk_norm=self.qk_norm if normed else "none",
                    own_head_dim=self.own_head_dim,
                    reach=reach,
                ),
                mlp,
                norms=self.norms,
                other=more,
            )
            for reach in self._reaches(fields, layers)
        ]
        return Stack(made, hidden if self.layer_norm else 0)

    def _reaches(self, fields: Fields, layers: int) -> list[Reach]:
        if self.windows == "switch":
            return switched_reaches(fields, layers)
        if self.windows == "all":
            given = fields.value(self.pattern)
            every = given if type(given) is int and given > 0 else self.every
            return reaches(fields, layers, every)
        if fields.given("layer_types"):
            return reaches(fields, layers)
        return [ALL] * layers


def nemotron_nas(fields: Fields) -> Stack:
    """Nemotron-NAS: a search has removed, replaced or narrowed the attention or MLP of layers (`block_configs`)."""
    layers, hidden, heads = layer_count(fields), fields.count("hidden_size"), fields.count("num_attention_heads")
    dim = head_dim(fields, heads)
    blocks = fields.pattern("block_configs", layers)
    if blocks is None or not all(isinstance(block, dict) for block in blocks):
        raise fields.error("block_configs", f"expected an object for each of {layers} layers; add them")
    made = []
    for number, block in enumerate(blocks):
        one = Fields(block, f"{fields.path}block_configs[{number}].")
        mixer, mlp = one.part("attention"), one.part("ffn")
        if mixer is None or mlp is None:
            raise one.error("attention", "expected objects attention and ffn; add them")
        for part in (mixer, mlp):
            part.refuse("replace_with_linear", "only attention and MLPs are supported")
            part.refuse("sparsify", "only whole matrices are supported")
        mixer.refuse("num_sink_tokens", "only attention to all keys is supported")
        window = mixer.count("window_length", minimum=0, otherwise=0)
        own = None
        if not mixer.flag("no_op"):
            group = mixer.count("n_heads_in_group")
            if heads % group:
                raise mixer.error("n_heads_in_group", f"{group} does not divide the {heads} heads")
            own = Attention(heads, heads // group, dim, reach=Reach(window))
        wide = None if mlp.flag("no_op") else MLP(_intermediate(mlp, hidden))
        if own is None and wide is None:
            raise one.error("attention", "a layer has neither attention nor an MLP; leave it out")
        made.append(LayerKind(own, wide, norms=(own is not None) + (wide is not None)))
    return Stack(made)


def _intermediate(fields: Fields, hidden: int) -> int:
    """Width of an MLP: given, or a multiple of the hidden width, rounded up to a multiple of 256 (vLLM,
    `nemotron_nas`)."""
    if not fields.given("ffn_mult"):
        return fields.count("intermediate_size")
    factor = fields.value("ffn_mult")
    if type(factor) not in (int, float) or not 0 < factor <= 1000:
        raise fields.error("ffn_mult", f"expected a number above 0 (got {factor!r})")
    return -(-int(2 * factor * hidden / 3) // 256) * 256
