"""The frameworks with plan exports, and their writers. A new framework is a row of `libra.config.frameworks`, a module
with a function `emit` here, and a row below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from libra.config.frameworks import OWN, framework_named
from libra.config.yaml_file import unknown
from libra.export import areal, nemo_rl, prime_rl, skyrl, slime, trl, verl, vllm
from libra.export.header import header
from libra.export.kubernetes import manifests
from libra.export.serve_line import ServeLine, serve_lines
from libra.export.slurm import batch_script
from libra.export.split import DeviceSplit, split_of
from libra.plan.plan import Plan

Format = Literal["sh", "toml", "yaml"]


@dataclass(frozen=True, slots=True)
class Emitter:
    """The writer of one framework, and the syntax of its output."""

    emit: Callable[[DeviceSplit], str]
    format: Format
    written: frozenset[str] = frozenset()  # keys of the recipe that only some writers can set


EMITTERS: Mapping[str, Emitter] = MappingProxyType(
    {
        "slime": Emitter(slime.emit, "sh", frozenset({"offload_optimiser"})),
        "miles": Emitter(slime.emit, "sh", frozenset({"offload_optimiser"})),
        "vime": Emitter(slime.emit, "sh", frozenset({"offload_optimiser"})),
        "verl": Emitter(verl.emit, "sh"),
        "prime-rl": Emitter(prime_rl.emit, "toml", frozenset({"recompute", "offload_optimiser"})),
        "skyrl": Emitter(skyrl.emit, "sh"),
        "trl": Emitter(trl.emit, "sh", frozenset({"dtype", "rollout_dtype", "kv_cache_dtype"})),
        "nemo-rl": Emitter(nemo_rl.emit, "yaml", frozenset({"kv_on_update"})),
        "areal": Emitter(areal.emit, "sh"),
        "vllm": Emitter(vllm.emit, "sh", frozenset({"dtype", "rollout_dtype", "kv_cache_dtype"})),
    }
)


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as the configuration of a framework."""

    split: DeviceSplit
    format: Format
    text: str


LAUNCHERS: Mapping[str, Callable[[Sequence[ServeLine], str], str]] = MappingProxyType(
    {"slurm": batch_script, "k8s": manifests}
)


def launch_file(plan: Plan, launcher: str) -> Exported:
    """A file for `launcher` that starts the plan's engines, and the router in front of them. Raises ValueError like
    `export`.
    """
    split = split_of(plan, framework_named("vllm"))
    lines = serve_lines(split, {}, {})
    return Exported(split, launch_format(launcher), launched(lines, split.recipe.router, launcher))


def launched(lines: Sequence[ServeLine], router: str, launcher: str) -> str:
    """A file for `launcher` that starts these engines and a router. Raises ValueError for an unknown launcher, and like
    `gateway_file`.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"--launch: {unknown('launcher', launcher, LAUNCHERS)}")
    return LAUNCHERS[launcher](lines, router)


def launch_format(launcher: str) -> Format:
    return "yaml" if launcher == "k8s" else "sh"


def export(plan: Plan, name: str) -> Exported:
    """The plan for the named framework. Raises ValueError for a name without an export, and `ExportError` for a plan
    that the framework cannot express.
    """
    framework = framework_named(name)
    if framework is OWN:
        raise ValueError("libra needs no export: give the plan to libra run --plan")
    emitter = EMITTERS[framework.name]
    split = split_of(plan, framework)
    return Exported(split, emitter.format, header(split, emitter.written) + emitter.emit(split))
