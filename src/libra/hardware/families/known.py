"""The known families: a reader of layers for each `model_type`, and the class's values for missing fields. Families
whose fields have the same meaning share a reader. To add a family, add a line here; it needs a new reader only if its
layers differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from libra.hardware.families.deepseek import deepseek, deepseek_v4, dense_latent, indexed, longcat
from libra.hardware.families.dense import Dense, nemotron_nas
from libra.hardware.families.gemma import gemma4
from libra.hardware.families.hybrid import kimi_linear, lfm2, minimax, nemotron_h, olmo_hybrid, qwen_next
from libra.hardware.families.moe import Sparse, dots, ernie, glm4_moe, hunyuan_moe, mixtral, olmoe, qwen_moe
from libra.hardware.families.moe_variants import gpt_oss, llama4, mimo_v2, minimax_m2, minimax_m3, step
from libra.hardware.families.stack import Family
from libra.hardware.families.state_space import bamba, falcon_h1, granite_hybrid, jamba

_QWEN3_MOE = partial(qwen_moe, qkv_bias=False, qk_norm="head", own_head_dim=True)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3 = _GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096}
_TIED = {"tie_word_embeddings": True}
_QWEN_NEXT = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_QWEN3_NEXT = _QWEN_NEXT | {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632,
}

FAMILIES: Mapping[str, Family] = {
    # Dense
    "llama": Family(Dense("attention_bias", "attention_bias", "mlp_bias"), ("LlamaForCausalLM",)),
    "mistral": Family(Dense(windows="all"), ("MistralForCausalLM",)),
    "ministral": Family(Dense(windows="all"), ("MinistralForCausalLM",)),
    "ministral3": Family(Dense(windows="all"), ("Ministral3ForCausalLM",)),
    "qwen2": Family(Dense(True, windows="switch"), ("Qwen2ForCausalLM",)),
    "qwen2_vl_text": Family(Dense(True, windows="switch")),
    "qwen2_5_vl_text": Family(Dense(True, windows="switch")),
    "qwen2_5_omni_text": Family(Dense(True, windows="switch")),
    "qwen3": Family(
        Dense("attention_bias", "attention_bias", qk_norm="head", own_head_dim=True, windows="switch"),
        ("Qwen3ForCausalLM",),
    ),
    "qwen3_vl_text": Family(Dense("attention_bias", "attention_bias", qk_norm="head", own_head_dim=True)),
    "mimo": Family(Dense("attention_bias", windows="switch"), ("MiMoForCausalLM",)),
    "phi3": Family(Dense(windows="all"), ("Phi3ForCausalLM",)),
    "seed_oss": Family(Dense("attention_bias", "attention_out_bias", "mlp_bias"), ("SeedOssForCausalLM",)),
    "smollm3": Family(Dense("attention_bias", "attention_bias", "mlp_bias"), ("SmolLM3ForCausalLM",), _TIED),
    "granite": Family(Dense("attention_bias", "attention_bias", "mlp_bias"), ("GraniteForCausalLM",)),
    "glm4": Family(Dense("attention_bias", norms=4), ("Glm4ForCausalLM",), {"attention_bias": True, "head_dim": 128}),
    "olmo2": Family(Dense("attention_bias", "attention_bias", qk_norm="layer"), ("Olmo2ForCausalLM",)),
    "olmo3": Family(
        Dense("attention_bias", "attention_bias", qk_norm="layer", windows="all", every=4), ("Olmo3ForCausalLM",)
    ),
    "exaone4": Family(Dense(qk_norm="head", windows="all", every=4), ("Exaone4ForCausalLM",)),
    "cohere2": Family(
        Dense("attention_bias", "attention_bias", norms=1, windows="all", every=4), ("Cohere2ForCausalLM",), _TIED
    ),
    "ernie4_5": Family(Dense("use_bias", "use_bias", "use_bias"), ("Ernie4_5ForCausalLM",), _TIED | {"head_dim": 128}),
    "hunyuan_v1_dense": Family(
        Dense("attention_bias", "attention_bias", qk_norm="head"), ("HunYuanDenseV1ForCausalLM",)
    ),
    "gemma": Family(Dense("attention_bias", "attention_bias"), ("GemmaForCausalLM",), _GEMMA),
    "gemma2": Family(
        Dense("attention_bias", "attention_bias", norms=4, windows="all", every=2),
        ("Gemma2ForCausalLM",),
        _GEMMA | {"sliding_window": 4096},
    ),
    "gemma3_text": Family(
        Dense("attention_bias", "attention_bias", qk_norm="head", norms=4, windows="all", every=6),
        ("Gemma3ForCausalLM",),
        _GEMMA3,
    ),
    "gemma4_text": Family(gemma4, ("Gemma4ForCausalLM",), _GEMMA),
    "cohere": Family(
        Dense("attention_bias", "attention_bias", qk_norm="layer", norm_field="use_qk_norm", norms=1),
        ("CohereForCausalLM",),
        _TIED,
    ),
    "arcee": Family(Dense("attention_bias", "attention_bias", "mlp_bias", gated=False), ("ArceeForCausalLM",)),
    "apertus": Family(Dense("attention_bias", "attention_bias", qk_norm="head", gated=False), ("ApertusForCausalLM",)),
    "nemotron": Family(
        Dense("attention_bias", "attention_bias", "mlp_bias", gated=False, layer_norm=True), ("NemotronForCausalLM",)
    ),
    "starcoder2": Family(
        Dense("use_bias", "use_bias", "use_bias", gated=False, layer_norm=True, windows="all"),
        ("Starcoder2ForCausalLM",),
        _TIED | {"use_bias": True},
    ),
    "internlm2": Family(Dense("bias", "bias"), ("InternLM2ForCausalLM",)),
    "glm4v_text": Family(Dense(True, norms=4)),
    "minicpm3": Family(dense_latent, ("MiniCPM3ForCausalLM",), _TIED),
    "nemotron-nas": Family(nemotron_nas, ("DeciLMForCausalLM",)),
    # Experts
    "mixtral": Family(mixtral, ("MixtralForCausalLM",)),
    "granitemoe": Family(mixtral, ("GraniteMoeForCausalLM",)),
    "granitemoeshared": Family(mixtral, ("GraniteMoeSharedForCausalLM",)),
    "olmoe": Family(olmoe, ("OlmoeForCausalLM",)),
    "flex_olmo": Family(olmoe, ("FlexOlmoForCausalLM",)),
    "qwen2_moe": Family(partial(qwen_moe, qkv_bias=True, qk_norm="none", own_head_dim=False), ("Qwen2MoeForCausalLM",)),
    "qwen3_moe": Family(_QWEN3_MOE, ("Qwen3MoeForCausalLM",)),
    "qwen3_vl_moe_text": Family(_QWEN3_MOE),
    "qwen3_omni_moe_text": Family(_QWEN3_MOE),
    "glm4_moe": Family(glm4_moe, ("Glm4MoeForCausalLM",)),
    "glm4v_moe_text": Family(glm4_moe),
    "exaone_moe": Family(Sparse(qk_norm="head", every=4), ("ExaoneMoeForCausalLM",)),
    "solar_open": Family(Sparse("attention_bias"), ("SolarOpenForCausalLM",), {"head_dim": 128}),
    "afmoe": Family(
        Sparse("attention_bias", "attention_bias", qk_norm="head", gate="channel", norms=4), ("AfmoeForCausalLM",)
    ),
    "hy_v3": Family(Sparse("attention_bias", "attention_bias", qk_norm="head"), ("HYV3ForCausalLM",)),
    "phimoe": Family(Sparse("attention_bias", "attention_bias", layer_norm=True), ("PhimoeForCausalLM",)),
    "bailing_moe": Family(
        Sparse("use_qkv_bias", "use_bias", qk_norm="head", norm_field="use_qk_norm"), ("BailingMoeForCausalLM",)
    ),
    "bailing_moe_v2": Family(
        Sparse("use_qkv_bias", "use_bias", qk_norm="head", norm_field="use_qk_norm"), ("BailingMoeV2ForCausalLM",)
    ),
    "dots1": Family(dots, ("Dots1ForCausalLM",)),
    "ernie4_5_moe": Family(ernie, ("Ernie4_5_MoeForCausalLM",), _TIED),
    "hunyuan_v1_moe": Family(hunyuan_moe, ("HunYuanMoEV1ForCausalLM",)),
    "gpt_oss": Family(gpt_oss, ("GptOssForCausalLM",)),
    "llama4_text": Family(llama4, ("Llama4ForCausalLM",)),
    "minimax_m2": Family(minimax_m2, ("MiniMaxM2ForCausalLM",)),
    "minimax_m3": Family(minimax_m3, ("MiniMaxM3ForCausalLM",)),
    "minimax_m3_vl_text": Family(minimax_m3, ("MiniMaxM3SparseForCausalLM",)),
    "mimo_v2_flash": Family(mimo_v2, ("MiMoV2FlashForCausalLM",)),
    "step3p5": Family(step, ("Step3p5ForCausalLM",)),
    "step3p7": Family(step, ("Step3p7FlashForCausalLM",)),
    # Latent attention
    "deepseek_v2": Family(deepseek, ("DeepseekV2ForCausalLM",)),
    "deepseek_v3": Family(deepseek, ("DeepseekV3ForCausalLM",)),
    "glm4_moe_lite": Family(deepseek, ("Glm4MoeLiteForCausalLM",)),
    "mistral4": Family(deepseek, ("Mistral4ForCausalLM",), {"first_k_dense_replace": 0}),
    "kimi_k2": Family(deepseek, ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")),
    "longcat_flash": Family(longcat, ("LongcatFlashForCausalLM",)),
    "deepseek_v32": Family(indexed, ("DeepseekV32ForCausalLM",)),
    "glm_moe_dsa": Family(indexed, ("GlmMoeDsaForCausalLM",)),
    "deepseek_v4": Family(deepseek_v4, ("DeepseekV4ForCausalLM",)),
    "deepseek_ref": Family(deepseek_v4, ("DeepseekV4ForCausalLM",)),
    # States
    "qwen3_next": Family(qwen_next, ("Qwen3NextForCausalLM",), _QWEN3_NEXT),
    "qwen3_5_text": Family(qwen_next, ("Qwen3_5ForCausalLM",), _QWEN_NEXT),
    "qwen3_5_moe_text": Family(qwen_next, ("Qwen3_5MoeForCausalLM",), _QWEN_NEXT),
    "olmo_hybrid": Family(olmo_hybrid, ("OlmoHybridForCausalLM",)),
    "minimax": Family(minimax, ("MiniMaxForCausalLM",)),
    "minimax_text_01": Family(minimax, ("MiniMaxText01ForCausalLM",)),
    "minimax_m1": Family(minimax, ("MiniMaxM1ForCausalLM",)),
    "bamba": Family(bamba, ("BambaForCausalLM",)),
    "jamba": Family(jamba, ("JambaForCausalLM",)),
    "kimi_linear": Family(kimi_linear, ("KimiLinearForCausalLM",)),
    "nemotron_h": Family(nemotron_h, ("NemotronHForCausalLM",)),
    "granitemoehybrid": Family(granite_hybrid, ("GraniteMoeHybridForCausalLM",)),
    "falcon_h1": Family(falcon_h1, ("FalconH1ForCausalLM",)),
    "lfm2": Family(lfm2, ("Lfm2ForCausalLM",), _TIED),
    "lfm2_moe": Family(lfm2, ("Lfm2MoeForCausalLM",), _TIED),
}

# Families of the language model, by the family of a wrapper whose inner configuration names none.
WRAPPED: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
