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
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.command import command_line, show
from benchmarks.rows import Row, never
from libra.config.yaml_file import ConfigError
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from tests.oracles.transformers_class import made_parameters

DATA = Path(__file__).parents[1] / "../shared/data/public/models"
LARGEST = 0.005  # error of parameters, as a share
READ = 85  # of the 89 configurations of the package
_CONTEXT = 32_768  # tokens of the sequence whose KV is printed, with 16 bits a number

PUBLISHED: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


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


def read_rows(title: str, found: list[Read]) -> Iterator[Row]:
    """Parameters of each configuration, beside the published total and those of the class."""
    for it in found:
        if it.model is None:
            continue
        kv = it.model.kv_bytes_per_token(2, context=_CONTEXT) / 1024
        note = f"{it.family}; {it.model.active_parameters / 1e9:,.2f} active; KV {kv:,.1f} KiB a token"
        note += "" if it.error is None else f"; {100 * it.error:+.2f} % beside {it.published} published"
        note += "" if it.exact is None else "; equal to the class" if it.exact else f"; {it.made} of the class"
        yield Row(f"{title}: {it.name}", "parameters", it.model.parameters / 1e9, "billions", note=note)


def summary(title: str, found: list[Read], least: int | None) -> Iterator[Row]:
    read = [it for it in found if it.model is not None]
    errors = [abs(it.error) for it in read if it.error is not None]
    made = [it.exact for it in read if it.exact is not None]
    goal, met = (None, None) if least is None else (f"at least {least}", len(read) >= least)
    refused = [f"{it.name}: {it.why}" for it in found if it.model is None]
    yield Row(title, "read", len(read), f"of {len(found)}", goal, met, "; ".join(refused))
    if made:
        yield Row(title, "equal to Transformers' class", sum(made), f"of {len(made)}", "all", all(made))
    if errors:
        yield Row(title, "largest error beside published totals", 100 * max(errors), "%")
        yield Row(title, "mean of these errors", 100 * math.fsum(errors) / len(errors), "%")
    wrong = (it.name for it in read if not it.met)
    yield never(title, "neither equal nor within 0.5 % or rounding", wrong, f"{len(read)} files")


def rows(options: Namespace) -> Iterator[Row]:
    for title, folder in (("aiconfigurator_core", package_folder()), ("data", options.data)):
        if folder is None or not folder.is_dir():
            print(f"{title}: skipped, it is not there")
            continue
        found = list(read_folder(folder, options.only, options.oracle))
        yield from read_rows(title, found)
        yield from summary(title, found, READ if title == "aiconfigurator_core" and not options.only else None)


if __name__ == "__main__":
    parser = command_line("models", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of more configurations")
    parser.add_argument("--oracle", action="store_true", help="make each model on the meta device")
    parser.add_argument("--only", default="", help="only files with this text in their name")
    show(parser, rows)
