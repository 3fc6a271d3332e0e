"""Models that Transformers itself makes from a configuration."""

from __future__ import annotations

from typing import Any

_NOT_MADE = "stepfun-ai--Step-3.7-Flash"  # its flat files are for a wrapped class, which Transformers cannot make


def made_parameters(data: dict[str, Any], name: str = "") -> int | None:
    """Number of parameters of the model that Transformers makes on the meta device; None: Transformers has no class."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = data.get("model_type")
    given = {key: value for key, value in data.items() if key not in ("quantization_config", "auto_map", "model_type")}
    inner = given.get("text_config")
    if isinstance(inner, dict):
        given["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    if name.startswith(_NOT_MADE):
        return None
    try:
        config = AutoConfig.for_model(kind, **given)
    except (KeyError, ValueError):
        return None
    auto = AutoModelForImageTextToText if "vision_config" in data else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        return None
    with torch.device("meta"):
        model = auto.from_config(config)
    return sum(int(parameter.numel()) for parameter in model.parameters() if parameter.requires_grad)
