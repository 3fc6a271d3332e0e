"""Parameters of models beside published totals.

Invariant: a case is a config.json, read as every command reads it. Totals are those of the checkpoints' safetensors
index, or of the model card where it gives four digits.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase
from libra.config.yaml_file import ConfigError
from libra.hardware.model_file import load_model

LARGEST = 0.005
_TOTALS = {
    "Kimi-K2": 1026.4e9,
    "Kimi-K2-as-deepseek_v3": 1026.4e9,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Moonlight-16B-A3B": 15.96e9,
    "Phi-4": 14_659_507_200,
    "Qwen2-57B-A14B": 57.409e9,
    "Qwen2.5-7B-Instruct-1M": 7_615_616_512,
    "Qwen3-32B-FP8": 32_762_123_264,
    "Qwen3-4B-saved-by-transformers-5": 4_022_468_096,
    "Qwen3-Coder-480B": 480.15e9,
    "Seed-OSS-36B": 36_151_104_512,
    "vicuna-7b-v1.5-no-kv-heads": 6_738_415_616,
}


def parameters_group(folder: Path) -> CaseGroup:
    cases = []
    for path in sorted(folder.glob("*_config.json")):
        name = path.stem.removesuffix("_config")
        if name in _TOTALS:
            cases.append(_case(path, name, _TOTALS[name]))
    return CaseGroup("parameters", "of the whole model", cases)


def _case(path: Path, name: str, published: float) -> PublicCase:
    try:
        model = load_model(path)
    except ConfigError as error:
        return PublicCase(name, published, None, LARGEST, str(error).partition(": ")[2])
    return PublicCase(name, published, model.parameters, LARGEST)
