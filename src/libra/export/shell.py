"""Text for a shell: arrays of arguments and files that a script writes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from libra.hardware.parallel import ParallelLayout


def array(name: str, arguments: Iterable[str]) -> str:
    """A bash array. Each line has one argument, or one flag with its values."""
    lines = "".join(f"  {argument}\n" for argument in arguments)
    return f"{name}=(\n{lines})\n"


def overrides(settings: Iterable[tuple[str, object]]) -> Iterable[str]:
    """`key=value` of Hydra and OmegaConf, quoted for the shell."""
    return (shlex.quote(f"{key}={written(value)}") for key, value in settings)


def written(value: object) -> str:
    """A value in the syntax of YAML, TOML and Hydra."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def file(name: str, text: str) -> str:
    """Shell lines that write a file."""
    return f"cat > {name} <<'END'\n{text}END\n"


def megatron_degrees(layout: ParallelLayout) -> tuple[tuple[str, int], ...]:
    """Parallel degrees, by Megatron-LM's names."""
    degrees = (
        ("tensor_model_parallel_size", layout.tp),
        ("pipeline_model_parallel_size", layout.pp),
        ("context_parallel_size", layout.cp),
        ("expert_model_parallel_size", layout.ep),
    )
    return (
        (*degrees, ("expert_tensor_parallel_size", 1 if layout.whole_experts else layout.tp))
        if layout.ep > 1
        else degrees
    )


def megatron_recompute(layout: ParallelLayout) -> tuple[tuple[str, object], ...]:
    """Megatron-LM's settings of recomputation; empty without recomputation."""
    if layout.recompute == "full":
        return (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    if layout.recompute == "selective":
        return (("recompute_granularity", "selective"), ("recompute_modules", "layernorm"))
    return ()
