"""Engine profiles from the kernel tables of aiconfigurator-core (NVIDIA, Apache-2.0): measured vLLM, offline.

Invariant: tables are sampled once, into a grid; nothing asks them again. A GPU or a model that they do not have is an
error that says so, never a neighbour's numbers. A800 and H800 are A100 and H100 with a slower link: their grids are
those of the faster sister plus the difference that the model of `cost.roofline` finds between the two all-reduces, and
the source says so.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from libra.cost.grid import Array, EngineGrid, EngineProfile
from libra.cost.sources.rates import rates
from libra.cost.sources.roofline import BATCHES, CHUNKS, CONTEXTS, PREFIXES, all_reduce_seconds, require_degree
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.model import ModelSpec

_WIDTH = 2  # bytes of a number: the tables are read in bf16


@dataclass(frozen=True, slots=True)
class _System:
    name: str  # as the tables call it
    vllm: str  # version that was measured
    sister: str | None = None  # the GPU whose tables these are, where they are another's


_SYSTEMS = {
    "A100": _System("a100_sxm", "0.14.0"),
    "A800": _System("a100_sxm", "0.14.0", sister="A100"),
    "H100": _System("h100_sxm", "0.24.0"),
    "H800": _System("h100_sxm", "0.24.0", sister="H100"),
    "H200": _System("h200_sxm", "0.24.0"),
    "B200": _System("b200_sxm", "0.24.0"),
    "L40S": _System("l40s", "0.24.0"),
}


class NoTablesError(ValueError):
    """The tables are not installed, or do not have what was asked for; a roofline always has."""


def tables(gpu: GPU, model: ModelSpec, tps: Iterable[int], *, intra_bandwidth: float | None = None) -> EngineProfile:
    """The profile of a model in bf16 at the given degrees, from tables.

    `intra_bandwidth` is bytes/s of a GPU to its neighbours in one direction, the GPU's own link unless told; where it
    differs from that of the GPU that was measured, all-reduces are corrected as for A800. Raises `NoTablesError` where
    the package or its data is missing, ValueError where a degree does not divide the model.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError
    except ModuleNotFoundError:
        raise NoTablesError(
            "aiconfigurator-core is not installed; pip install 'libra-rl[aic]', or use a roofline"
        ) from None
    system = _SYSTEMS.get(gpu.name)
    if system is None:
        raise NoTablesError(f"there are no tables for {gpu.name}, only for {', '.join(_SYSTEMS)}; use a roofline")
    link = gpu.link if intra_bandwidth is None else intra_bandwidth
    measured = GPUS[system.sister or gpu.name]
    slower = link != measured.link
    engines = []
    with tempfile.TemporaryDirectory() as folder, _quiet():
        (Path(folder) / "config.json").write_text(json.dumps(_configuration(model)), encoding="utf-8")
        for tp in sorted(set(tps)):
            require_degree(model, tp)
            experts = {} if model.experts is None else {"moe_tp_size": tp}
            try:
                engine = EngineHandle.compile(
                    folder, system.name, "vllm", tp_size=tp, backend_version=system.vllm, **experts
                )
                decode, prefill = _sampled(engine)
            except PerfDataNotAvailableError as error:
                raise NoTablesError(
                    f"the tables for {gpu.name} lack kernels of {model.name} at tp {tp}: leave tp {tp} out, or use a"
                    f" roofline ({str(error).partition(' at /')[0]})"
                ) from None
            if slower:
                decode = decode + _difference(gpu, link, measured, model, tp, BATCHES)
                prefill = prefill + _difference(gpu, link, measured, model, tp, CHUNKS)
            engines.append(EngineGrid(tp, BATCHES, CONTEXTS, _rows(decode), CHUNKS, PREFIXES, _rows(prefill)))
    source = f"tables: aiconfigurator-core {version('aiconfigurator-core')}, {system.name}, vLLM {system.vllm}"
    if slower:
        source += f"; all-reduces modelled at {link / 1e9:g} GB/s instead of {measured.name}'s {measured.link / 1e9:g}"
    return EngineProfile(gpu.name, model.name, "bf16", source, tuple(engines))


def _sampled(engine: Any) -> tuple[Array, Array]:
    """Seconds of decode [batch, context] and of prefill [chunk, prefix]; the tables count the prefix as input."""
    decode = [[engine.predict_decode_latency(batch, context, 2) for context in CONTEXTS] for batch in BATCHES]
    prefill = [[engine.predict_prefill_latency(1, prefix + chunk, prefix) for prefix in PREFIXES] for chunk in CHUNKS]
    return np.array(decode) / 1e3, np.array(prefill) / 1e3


def _difference(gpu: GPU, link: float, measured: GPU, model: ModelSpec, tp: int, tokens: tuple[int, ...]) -> Array:
    """[tokens, 1] seconds by which two all-reduces a layer are slower on `link` than where the tables were measured."""
    size = np.array(tokens, dtype=float)[:, None] * model.hidden * _WIDTH
    here = all_reduce_seconds(rates(gpu), link, tp, size)
    there = all_reduce_seconds(rates(measured), measured.link, tp, size)
    difference: Array = 2 * model.layers * (here - there)
    return difference


def _rows(seconds: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in seconds.tolist())


def _configuration(model: ModelSpec) -> dict[str, object]:
    """The config.json that describes the model to the tables. Raises `NoTablesError` where it would not."""
    if model.latent is not None:
        raise NoTablesError(
            f"{model.name} has latent attention, of which the tables know single models; use a roofline"
        )
    common: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_context,
        "tie_word_embeddings": model.tied,
        "torch_dtype": "bfloat16",
    }
    if model.experts is None:
        return common
    if model.experts.layers != model.layers or model.experts.shared_intermediate:
        raise NoTablesError(f"{model.name} has dense layers or shared experts beside its experts; use a roofline")
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": model.experts.count,
        "num_experts_per_tok": model.experts.active,
        "moe_intermediate_size": model.experts.intermediate,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the package's warnings of fallback rows, which concern kernels that are not asked for."""
    logger = logging.getLogger("aiconfigurator_core")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
