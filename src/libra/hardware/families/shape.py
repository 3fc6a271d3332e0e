"""Reader of unknown families by their fields.

Invariant: a configuration of an unknown family is read only if other families have all of its fields that may change
the shape; otherwise `model_file` refuses it. Norms and biases without a field are not counted, since they are less than
a thousandth of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from libra.hardware.families.deepseek import deepseek, indexed
from libra.hardware.families.dense import Dense
from libra.hardware.families.fields import Fields
from libra.hardware.families.hybrid import kimi_linear, lfm2, nemotron_h, qwen_next
from libra.hardware.families.moe import Sparse, qwen_moe
from libra.hardware.families.stack import Family, Stack

# Activations of gated products; others may have an MLP of two matrices.
_GATED = ("silu", "swish", "swiglu", "gelu_pytorch_tanh", "situ", "swigluoai")
_BIASES = ("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias", "bias")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def by_shape(fields: Fields) -> Family | None:
    """A reader for the fields of an unknown family; None if they do not suffice."""
    if fields.value(fields.first("hidden_act", "hidden_activation")) not in _GATED:
        return None
    return Family(_reader(fields), known=False)


def _reader(fields: Fields) -> Callable[[Fields], Stack]:
    for field, reader in (
        ("linear_attn_config", kimi_linear),
        ("hybrid_override_pattern", nemotron_h),
        ("layers_block_type", nemotron_h),
        ("linear_num_value_heads", qwen_next),
        ("conv_L_cache", lfm2),
        ("index_topk", indexed),
        ("kv_lora_rank", deepseek),
    ):
        if fields.given(field):
            return reader
    bias = fields.first(*_BIASES)
    normed = fields.first("use_qk_norm", "qk_norm")
    if fields.given("decoder_sparse_step"):
        return lambda it: qwen_moe(
            it, qkv_bias=False, qk_norm="head" if it.flag(normed) else "none", own_head_dim=False
        )
    if any(fields.given(name) for name in _COUNTS):
        return Sparse(bias, qk_norm="head", norm_field=normed)
    return Dense(bias, mlp_bias="mlp_bias", qk_norm="head", norm_field=normed, windows="all")
