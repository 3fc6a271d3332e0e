"""Model configurations as Libra reads them: parameters beside published totals and beside Transformers' own classes.

The command: `python -m benchmarks.models [--data DIR] [--oracle] [--only TEXT] [--json FILE]`. It reads
each config.json of the installed package `aiconfigurator_core` and of the data folder. `--oracle` also makes each model
on PyTorch's meta device, where the installed Transformers has its class, and counts parameters there. Exit status 0,
whatever is met.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import command_line
from benchmarks.rows import Row, never, report
from libra.config.yaml_file import ConfigError
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model

DATA = Path(__file__).parents[1] / "../shared/data/public/models"
LARGEST = 0.005  # error of parameters, as a share
READ = 85  # of the 89 configurations of the package
_CONTEXT = 32_768  # tokens of the sequence whose KV is printed, with 16 bits a number

# Totals in billions (T: trillions), meant as published: by the safetensors index of the checkpoint where there are four
# digits or more, else by the model card, with its digits. They were not looked up again for this list; Transformers'
# own class (`--oracle`) is the check wherever it exists. MTP layers are not part of them. Keys begin the names of
# files; of those that do, the longest counts.
PUBLISHED: dict[str, str] = {
    "MiniMax-M2": "228.7",
    "Qwen3-0.6B": "0.5960",
    "Qwen3-1.7B": "1.7206",
    "Qwen3-4B": "4.0225",
    "Qwen3-8B": "8.1907",
    "Qwen3-32B": "32.762",
    "Qwen3-235B": "235.09",
    "Qwen3-30B": "30.532",
    "Qwen3-Coder-480B": "480.15",
    "Qwen3-Next-80B": "80",
    "Qwen3-VL-2B": "2.1275",
    "Qwen3-VL-4B": "4.4378",
    "Qwen3-VL-8B": "8.7671",
    "Qwen3-VL-32B": "33",
    "Qwen3-VL-30B": "31.07",
    "Qwen3-VL-235B": "236",
    "Qwen3.5-122B": "122",
    "Qwen3.5-27B": "27",
    "Qwen3.5-35B": "35",
    "Qwen3.5-397B": "397",
    "Qwen3.6-27B": "27",
    "Qwen3.6-35B": "35",
    "Qwen2.5-7B": "7.6156",
    "Qwen2-57B": "57.409",
    "MiMo-V2-Flash": "309",
    "DeepSeek-R1": "671",
    "DeepSeek-V3": "671",
    "DeepSeek-V4-Flash": "284",
    "DeepSeek-V4-Pro": "1.6T",
    "gemma-4-26B": "26",
    "Gemma-4-26B": "26",
    "Gemma-4-31B": "31",
    "Llama-4-Maverick": "401.58",
    "Llama-4-Scout": "108.64",
    "Meta-Llama-3.1-405B": "405.85",
    "Meta-Llama-3.1-70B": "70.554",
    "Llama-3.1-70B": "70.554",
    "Meta-Llama-3.1-8B": "8.0303",
    "Mixtral-8x22B": "140.62",
    "Mixtral-8x7B": "46.703",
    "Kimi-K2": "1026.4",
    "Kimi-K2.": "1T",
    "Kimi-K3": "2.8T",
    "GLM-5": "744",
    "GLM-4.5-Air": "106.85",
    "GLM-4.6": "352.80",
    "Llama-3_3-Nemotron-Super-49B": "49.867",
    "NVIDIA-Nemotron-3-Nano-30B": "31.6",
    "NVIDIA-Nemotron-3-Super-120B": "120.6",
    "NVIDIA-Nemotron-3-Ultra-550B": "550",
    "Nemotron-H-56B": "56",
    "gpt-oss-120b": "116.83",
    "gpt-oss-20b": "20.91",
    "Step-3.7-Flash": "196",
    "Mistral-7B": "7.2417",
    "Mistral-Nemo": "12.248",
    "Mistral-Small-3.2": "24.01",
    "Moonlight-16B": "15.96",
    "Phi-4": "14.660",
    "Seed-OSS-36B": "36.151",
    "vicuna-7b": "6.7384",
}


@dataclass(frozen=True, slots=True)
class Read:
    """One configuration: what was read of it, or why it was refused."""

    name: str
    family: str
    model: ModelSpec | None
    why: str = ""
    made: int | None = None  # parameters of Transformers' class

    @property
    def published(self) -> str | None:
        short = self.name.rpartition("--")[2]
        return PUBLISHED.get(max((key for key in PUBLISHED if short.startswith(key)), key=len, default=""))

    @property
    def reference(self) -> tuple[float, float] | None:
        """The published total, and the largest error that its digits allow; None where it is not known."""
        if self.published is None:
            return None
        digits, trillions = self.published.removesuffix("T"), self.published.endswith("T")
        rounded = 0.5 * 10.0 ** -len(digits.partition(".")[2]) / float(digits)
        return float(digits) * (1e12 if trillions else 1e9), max(LARGEST, rounded)

    @property
    def error(self) -> float | None:
        if self.model is None or self.reference is None:
            return None
        return self.model.parameters / self.reference[0] - 1

    @property
    def exact(self) -> bool | None:
        """Whether parameters are those of Transformers' class; None where there is none, or it was not made."""
        return None if self.model is None or self.made is None else self.model.parameters == self.made

    @property
    def met(self) -> bool:
        """Whether the class agrees; where there is none, whether the published total does."""
        if self.model is None or self.exact is not None:
            return bool(self.exact)
        return self.error is None or self.reference is None or abs(self.error) <= self.reference[1]


def package_folder() -> Path | None:
    """The configurations of the installed package; None where it is not installed."""
    found = importlib.util.find_spec("aiconfigurator_core")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model_configs"


def read_folder(folder: Path, only: str = "", oracle: bool = False) -> Iterator[Read]:
    for path in sorted(folder.glob("*config.json")):
        name = path.name.removesuffix("_config.json")
        if path.name.endswith("hf_quant_config.json") or only not in name:
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        family = str(data.get("model_type"))
        try:
            model = load_model(path)
        except ConfigError as error:
            yield Read(name, family, None, str(error).partition(": ")[2])
            continue
        yield Read(name, family, model, made=made_parameters(data, name) if oracle else None)


# Files of the package that Transformers' class does not take as they are.
_NOT_MADE = {
    "stepfun-ai--Step-3.7-Flash": "a flat file of a wrapped class",
    "stepfun-ai--Step-3.7-Flash-FP8": "a flat file of a wrapped class",
}


def made_parameters(data: dict[str, Any], name: str = "") -> int | None:
    """Parameters of the model that Transformers makes of a configuration, on the meta device; None: it has no class."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = data.get("model_type")
    given = {key: value for key, value in data.items() if key not in ("quantization_config", "auto_map", "model_type")}
    inner = given.get("text_config")
    if isinstance(inner, dict):
        given["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    if name in _NOT_MADE:
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


def main() -> None:
    parser = command_line("models", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of more configurations")
    parser.add_argument("--oracle", action="store_true", help="make each model on the meta device")
    parser.add_argument("--only", default="", help="only files with this text in their name")
    given = parser.parse_args()
    told: list[Row] = []
    for title, folder in (("aiconfigurator_core", package_folder()), ("data", given.data)):
        if folder is None or not folder.is_dir():
            print(f"{title}: skipped, it is not there")
            continue
        found = list(read_folder(folder, given.only, given.oracle))
        told += rows(title, found)
        told += summary(title, found, READ if title == "aiconfigurator_core" and not given.only else None)
    report(told, given.json)


def rows(title: str, found: list[Read]) -> Iterator[Row]:
    """Parameters of each configuration, beside the published total and those of the class."""
    for it in found:
        if it.model is None:
            continue
        kv = it.model.kv_bytes_per_token(2, context=_CONTEXT) / 1024
        note = f"{it.family}; {it.model.active_parameters / 1e9:,.2f} active; KV {kv:,.1f} KiB a token"
        note += "" if it.error is None else f"; {100 * it.error:+.2f} % beside {it.published} published"
        note += "" if it.exact is None else "; equal to the class" if it.exact else f"; {it.made} of the class"
        yield Row(f"{title}: {it.name}", "parameters", it.model.parameters / 1e9, "billions", note=note)


def summary(title: str, found: list[Read], least: int | None) -> list[Row]:
    read = [it for it in found if it.model is not None]
    errors = [abs(it.error) for it in read if it.error is not None]
    made = [it.exact for it in read if it.exact is not None]
    goal, met = (None, None) if least is None else (f"at least {least}", len(read) >= least)
    refused = [f"{it.name}: {it.why}" for it in found if it.model is None]
    rows = [Row(title, "read", len(read), f"of {len(found)}", goal, met, "; ".join(refused))]
    if made:
        rows.append(Row(title, "equal to Transformers' class", sum(made), f"of {len(made)}", "all", all(made)))
    if errors:
        rows.append(Row(title, "largest error beside published totals", 100 * max(errors), "%"))
        rows.append(Row(title, "mean of these errors", 100 * math.fsum(errors) / len(errors), "%"))
    wrong = (it.name for it in read if not it.met)
    return [*rows, never(title, "neither equal nor within 0.5 % or rounding", wrong, f"{len(read)} files")]


if __name__ == "__main__":
    main()
