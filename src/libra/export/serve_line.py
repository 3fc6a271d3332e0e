"""One engine as a command line.

Flags: `vllm/engine/arg_utils.py` of vLLM, whose installed parser reads them in `tests/export`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra.config.recipe import Recipe
from libra.export.split import DeviceSplit, Engines

FIRST_PORT = 8000
SIDE_CHANNEL = 5600
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks for which vLLM reserves memory
# Prefill and decode engines transfer KV by NIXL, through vLLM's connector.
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

Flag = bool | int | float | str | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ServeLine:
    """`vllm serve` on some GPUs of one node. A flag that is True has no value; a flag that is False is left out."""

    host: str  # a placeholder: the class of nodes and the node's number
    gpus: Sequence[int]
    port: int
    model: str
    flags: Mapping[str, Flag]
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    bucket: int = 0
    up_to: int | None = None  # tokens of the longest context that the engine serves; None: the model's limit

    @property
    def name(self) -> str:
        """The engine's name in lists of engines."""
        return f"{self.host}-{self.port}"

    @property
    def paired(self) -> bool:
        """Whether the engine sends KV to another engine, or receives KV from another one."""
        return "kv-transfer-config" in self.flags

    @property
    def arguments(self) -> list[str]:
        """The arguments after `vllm serve MODEL`, without the port and unquoted."""
        words = []
        for name, value in self.flags.items():
            if value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", _written(value)]
        return words

    @property
    def command(self) -> str:
        """The shell line, without the note."""
        words = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, self.gpus))}"]
        environment = {**self.environment, **self._side_channel}
        words += [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        words += ["vllm serve", shlex.quote(self.model), shlex.join(self.arguments), f"--port {self.port}"]
        return " ".join(words)

    @property
    def _side_channel(self) -> dict[str, str]:
        """Address at which an engine offers its KV: one port for each of its data-parallel ranks, at most eight."""
        if not self.paired:
            return {}
        port = SIDE_CHANNEL + 8 * (self.port - FIRST_PORT)
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": self.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


def _written(value: Flag) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def engine_flags(recipe: Recipe, engines: Engines) -> dict[str, Flag]:
    """The flags of an engine of a plan."""
    flags: dict[str, Flag] = {
        "tensor-parallel-size": engines.tp,
        "max-num-seqs": engines.max_num_seqs,
        "max-num-batched-tokens": recipe.max_batched_tokens,
        "max-model-len": engines.up_to,
        "gpu-memory-utilization": recipe.gpu_memory_utilization,
    }
    if recipe.dtype == "fp16" and recipe.rollout_dtype is None:
        flags["dtype"] = "float16"
    if recipe.rollout_dtype not in (None, "bf16"):
        flags["quantization"] = str(recipe.rollout_dtype)
    if recipe.kv_cache_dtype != "auto":
        flags["kv-cache-dtype"] = recipe.kv_cache_dtype
    if recipe.lora_rank is not None:
        flags["enable-lora"] = True
        flags["max-lora-rank"] = next((it for it in _LORA_RANKS if it >= recipe.lora_rank), recipe.lora_rank)
    if engines.role != "generate":
        flags["kv-transfer-config"] = TRANSFER
    return flags


def serve_lines(split: DeviceSplit, environment: Mapping[str, str], more: Mapping[str, Flag]) -> tuple[ServeLine, ...]:
    """A line for each engine of the plan, by bucket; all lines get `environment` and the flags in `more`. Ports count
    from `FIRST_PORT` on each node.
    """
    lines = []
    used: dict[str, int] = {}
    for engines in split.engines:
        flags = engine_flags(split.recipe, engines) | dict(more)
        for place in engines.places:
            host = f"{place.pool}-{place.nodes[0]}"
            port = FIRST_PORT + used.setdefault(host, 0)
            used[host] += 1
            role = "" if engines.role == "generate" else f"{engines.role}, "
            note = f"{role}contexts of up to {engines.up_to:,} tokens"
            bucket, up_to = engines.bucket, engines.up_to
            lines.append(ServeLine(host, place.gpus, port, split.model, flags, note, environment, bucket, up_to))
    return tuple(lines)


def script(lines: Sequence[ServeLine]) -> str:
    """The lines, each under a comment that names its node."""
    first = "# Run each engine's line in its own shell: the engine serves until it is stopped.\n"
    return first + "".join(
        f"# on {line.host}{f': {line.note}' if line.note else ''}\n{line.command}\n" for line in lines
    )
