"""Model configurations as Libra reads them: parameters beside published totals and beside Transformers' own classes.

The command: `python -m benchmarks.models [--data DIR] [--oracle] [--only TEXT] [--json FILE]`. It reads each config.json
of the installed package `aiconfigurator_core` and of the data folder. `--oracle` also makes each model on PyTorch's meta
device, where the installed Transformers has its class, and counts parameters there. Exit status 0, whatever is met.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.rows import Row, report, write_rows
from libra.config.yaml_file import ConfigError
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model

DATA = Path(__file__).parents[1] / "../shared/data/public/models"
LARGEST = 0.005  # error of parameters, as a share
READ = 85  # of the 89 configurations of the package

# Totals in billions (T: trillions), as published: by the safetensors index of the checkpoint where there are four digits or more, else
# by the model card, with its digits. MTP layers are not part of them. Keys are the longest that begin a file's name.
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
        """Parameters to compare with, and the largest error by which they may differ: those of the class, else the
        published ones, which are rounded to their last digit."""
        if self.made is not None:
            return float(self.made), 0.0
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
    def met(self) -> bool:
        return self.model is not None and (
            self.error is None or self.reference is None or abs(self.error) <= self.reference[1]
        )


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
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of more configurations")
    parser.add_argument("--oracle", action="store_true", help="make each model on the meta device")
    parser.add_argument("--only", default="", help="only files with this text in their name")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, a JSON line each")
    given = parser.parse_args()
    console, rows = Console(), []
    for title, folder in (("aiconfigurator_core", package_folder()), ("data", given.data)):
        if folder is None or not folder.is_dir():
            console.print(f"{title}: skipped, it is not there")
            continue
        found = list(read_folder(folder, given.only, given.oracle))
        console.print(table_of(title, found))
        rows += summary(title, found, READ if title == "aiconfigurator_core" and not given.only else None)
    report(rows, None)
    if given.json is not None:
        write_rows(rows, given.json)


def table_of(title: str, found: list[Read]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("configuration", "family", "parameters", "active", "published", "made", "error", "met", "KV", "refused"):
        table.add_column(column, justify="left" if column in ("configuration", "family", "met", "refused") else "right")
    for it in found:
        model = it.model
        if model is None:
            table.add_row(escape(it.name), it.family, *[""] * 6, "", escape(it.why))
            continue
        table.add_row(
            escape(it.name),
            it.family,
            f"{model.parameters / 1e9:,.3f}",
            f"{model.active_parameters / 1e9:,.2f}",
            it.published or "",
            "" if it.made is None else f"{it.made / 1e9:,.3f}",
            "" if it.error is None else "exact" if it.error == 0 else f"{it.error:+.2%}",
            "yes" if it.met else "no",
            f"{model.kv_bytes_per_token(2, context=32768) / 1024:,.1f}",
            "",
        )
    table.caption = "billions of parameters; KV in KiB a token of a sequence of 32,768, 16 bits a number"
    return table


def summary(title: str, found: list[Read], least: int | None) -> list[Row]:
    read = [it for it in found if it.model is not None]
    errors = [abs(it.error) for it in read if it.error is not None]
    exact = sum(it.made is not None and it.error == 0 for it in read)
    rows = [Row(title, "read", len(read), f"of {len(found)}", least and f"at least {least}", least and len(read) >= least)]
    rows.append(Row(title, "equal to Transformers' class", exact, f"of {sum(it.made is not None for it in read)}"))
    if errors:
        rows.append(Row(title, "largest error", 100 * max(errors), "%"))
        rows.append(Row(title, "mean error", 100 * math.fsum(errors) / len(errors), "%"))
    wrong = [it.name for it in read if not it.met]
    rows.append(Row(title, "beyond 0.5 % and rounding", len(wrong), "configurations", "none", not wrong))
    return rows


if __name__ == "__main__":
    main()
