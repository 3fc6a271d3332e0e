"""Engine profiles from the kernel tables of aiconfigurator-core (NVIDIA, Apache-2.0), which were measured with vLLM.

Invariant: tables are sampled once into a grid, and not read again. A GPU or model that the tables lack is an error; no
similar entry replaces it. A800 and H800 are A100 and H100 with a slower link: their grids add the difference of the two
all-reduces, as modelled by the roofline, and the source says so.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from libra.config.extras import install_command
from libra.cost.afd import StageGrid, token_copies
from libra.cost.grid import Array, EngineGrid, EngineProfile
from libra.cost.quantization import ACTIVATION_BYTES, AS_STORED, Quantization
from libra.cost.sources.layer_kernels import all_reduce_seconds
from libra.cost.sources.rates import rates
from libra.cost.sources.roofline import BATCHES, CHUNKS, CONTEXTS, PREFIXES, TOKENS, require_degree
from libra.hardware.gpu import GPU
from libra.hardware.gpu_record import TableSystem
from libra.hardware.gpus import GPUS, RECORDS, record_of
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import BF16


class NoTablesError(ValueError):
    """The tables are not installed, or lack the requested times. A roofline can replace them.

    The text is only the reason; `asked` adds the remedy if the user requested tables by name.
    """

    @property
    def asked(self) -> str:
        """The reason and the remedy, for a user who requested tables."""
        return f"{self}: give --profile roofline"


def tables(
    gpu: GPU,
    model: ModelSpec,
    tps: Iterable[int],
    *,
    quantization: Quantization = AS_STORED,
    intra_bandwidth: float | None = None,
) -> EngineProfile:
    """The profile of a model at the given degrees, from tables.

    `intra_bandwidth` is bytes/s of a GPU to its neighbours in one direction, by default the GPU's own link. If it
    differs from the measured GPU's link, all-reduces are corrected as for A800. Raises `NoTablesError` if the package
    or its data is missing, ValueError if a degree does not divide the model.
    """
    link = gpu.link if intra_bandwidth is None else intra_bandwidth
    system = table_system(gpu)
    measured = GPUS[system.sister or gpu.name]
    slower = link != measured.link
    engines = []
    for tp in sorted(set(tps)):
        require_degree(model, tp)
        with _engine(gpu, model, tp, quantization) as engine:
            decode, prefill = _sampled(engine)
        if slower:
            decode = decode + 2 * _difference(gpu, link, measured, model, tp, BATCHES)
            prefill = prefill + 2 * _difference(gpu, link, measured, model, tp, CHUNKS)
        engines.append(EngineGrid(tp, BATCHES, CONTEXTS, _rows(decode), CHUNKS, PREFIXES, _rows(prefill)))
    return EngineProfile(gpu.name, model.name, quantization.name(model), _source(gpu, link), tuple(engines))


def stage_tables(
    gpu: GPU,
    model: ModelSpec,
    tp: int,
    ffn: int,
    *,
    ffn_gpu: GPU | None = None,
    quantization: Quantization = AS_STORED,
) -> StageGrid:
    """Stage times with attention on ranks of `tp` GPUs and FFN on `ffn` GPUs, which may be of another type. In the
    tables, tokens choose experts by a power law. Raises like `tables`.
    """
    require_degree(model, tp)
    measured = GPUS[table_system(gpu).sister or gpu.name]
    with _engine(gpu, model, tp, quantization) as engine:
        decode = np.array([[_attention(engine, batch, context) for context in CONTEXTS] for batch in BATCHES])
        prefill = np.array([[_prompt(engine, chunk, prefix) for prefix in PREFIXES] for chunk in CHUNKS])
        outside = [sum(_of_decode(engine, tokens, 1, _HEAD)) for tokens in TOKENS]
    if gpu.link != measured.link:
        decode = decode + _difference(gpu, gpu.link, measured, model, tp, BATCHES)
        prefill = prefill + _difference(gpu, gpu.link, measured, model, tp, CHUNKS)
    other = gpu if ffn_gpu is None else ffn_gpu
    each = TOKENS[:15]  # of an FFN rank
    with _engine(other, model, 1, quantization, moe_ep_size=ffn, attention_dp_size=ffn) as engine:
        experts = [sum(_of_decode(engine, tokens, 1, _EXPERTS)) / model.layers for tokens in each]
    # More tokens never cost less, though measured tables decrease here and there.
    outside, experts = (np.maximum.accumulate(it).tolist() for it in (outside, experts))
    beyond = max(ffn * each[-1], each[-1])
    axis = tuple(tokens for tokens in TOKENS if tokens <= beyond)
    source = _source(gpu, gpu.link)
    return StageGrid(
        attention=EngineGrid(tp, BATCHES, CONTEXTS, _rows(decode), CHUNKS, PREFIXES, _rows(prefill)),
        layers=model.sparse_layers,
        dense=model.dense_layers,
        tokens=axis,
        outside=tuple(outside[: len(axis)]),
        head=tuple(outside[: len(axis)]),  # there are no layers without experts
        experts=tuple(np.interp(np.array(axis) / ffn, each, experts).tolist()),
        ffn=ffn,
        token_bytes=ACTIVATION_BYTES * model.hidden * token_copies(model, ffn),
        source=source if other == gpu else f"{source}; FFN: {_source(other, other.link)}",
    )


# Operators of an iteration that are not part of the layers of attention ranks. The price of links includes dispatch.
# The tables' dispatch before the experts stays: it is their name for the all-reduce of attention.
_HEAD = ("embedding", "logits_gemm")
_EXPERTS = ("moe",)
_ELSEWHERE = (*_HEAD, *_EXPERTS, "moe_post_dispatch")


def _attention(engine: Any, batch: int, context: int) -> float:
    return sum(_of_decode(engine, batch, context)) - sum(_of_decode(engine, batch, context, _ELSEWHERE))


def _of_decode(engine: Any, batch: int, context: int, names: Iterable[str] | None = None) -> Iterator[float]:
    return _seconds(engine.decode_step_per_op(batch, context, 2), names)


def _prompt(engine: Any, chunk: int, prefix: int) -> float:
    """Seconds of an attention rank; the tables count the prefix as input."""
    found, _ = engine.run_static_per_op(batch_size=1, isl=prefix + chunk, osl=2, prefix=prefix, mode="static_ctx")
    return sum(_seconds(found)) - sum(_seconds(found, _ELSEWHERE))


def _seconds(operators: Iterable[tuple[str, float, float, str]], names: Iterable[str] | None = None) -> Iterator[float]:
    """Seconds of the named operators, or of all operators; names in the tables begin with the phase."""
    for name, milliseconds, *_ in operators:
        if names is None or name.partition("_")[2] in names:
            yield milliseconds / 1e3


def table_system(gpu: GPU) -> TableSystem:
    """The tables of this GPU. Raises `NoTablesError` if there are none."""
    system = record_of(gpu).tables
    if system is None:
        known = ", ".join(name for name, record in RECORDS.items() if record.tables is not None)
        raise NoTablesError(f"there are no tables for {gpu.name}, only for {known}")
    return system


def _source(gpu: GPU, link: float) -> str:
    system = table_system(gpu)
    measured = GPUS[system.sister or gpu.name]
    source = f"tables: aiconfigurator-core {version('aiconfigurator-core')}, {system.name}, vLLM {system.vllm}"
    if link != measured.link:
        source += f"; all-reduces modelled at {link / 1e9:g} GB/s instead of {measured.name}'s {measured.link / 1e9:g}"
    return source


@contextmanager
def _engine(gpu: GPU, model: ModelSpec, tp: int, quantization: Quantization, **parallel: int) -> Iterator[Any]:
    """The tables of one engine. Raises `NoTablesError` if there are none; a later query may raise it, too."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.errors import MissingSystemFlopsError, PerfDataNotAvailableError
    except ModuleNotFoundError:
        raise NoTablesError(f"aiconfigurator-core is not installed; {install_command('aic')}") from None
    system = table_system(gpu)
    experts = {} if model.experts is None else {"moe_tp_size": tp}
    modes = table_modes(gpu, quantization, model)
    if modes.get("moe_quant_mode") == "fp8_block" and model.experts and model.experts.intermediate % (tp * _BLOCK):
        raise NoTablesError(
            f"the tables for {gpu.name} have experts of fp8 in blocks of {_BLOCK}, and the width in {model.name},"
            f" {model.experts.intermediate} / {tp}, is no multiple: leave tp {tp} out"
        )
    with tempfile.TemporaryDirectory() as folder, quietly():
        (Path(folder) / "config.json").write_text(json.dumps(_configuration(model)), encoding="utf-8")
        try:
            yield EngineHandle.compile(
                folder, system.name, "vllm", tp_size=tp, backend_version=system.vllm, **experts, **modes, **parallel
            )
        except MissingSystemFlopsError:
            raise NoTablesError(f"{gpu.name} has no tensor cores for {quantization.name(model)}") from None
        except PerfDataNotAvailableError as error:
            raise NoTablesError(
                f"the tables for {gpu.name} lack kernels of {model.name} at tp {tp}: leave tp {tp} out"
                f" ({str(error).partition(' at /')[0]})"
            ) from None


# The tables' names of quantised weights. KV has 16 bits or is fp8 there.
_WEIGHTS = {"fp8": "fp8", "modelopt_fp4": "nvfp4"}
# The tables' fp8 experts are those of ModelOpt, whose activations have fixed scales. On Hopper they run FlashInfer's
# kernels, twice as slow as bf16. vLLM's `fp8` has dynamic scales and runs Triton's kernels on Hopper, as with fp8 in
# blocks, which the tables have.
_BLOCK = 128


def table_modes(gpu: GPU, quantization: Quantization, model: ModelSpec) -> dict[str, str]:
    """The quantisation modes of the tables. Raises `NoTablesError` for settings without tables."""
    stored, modes = quantization.weights(model), {}
    weights, kv = stored.name, quantization.kv_number(model)
    if not stored.whole:
        raise NoTablesError(f"there are no tables of weights in {stored.described}")
    if stored != BF16:
        if weights not in _WEIGHTS:
            raise NoTablesError(f"there are no tables of {weights} weights, only of {', '.join(_WEIGHTS)}")
        modes["gemm_quant_mode"] = _WEIGHTS[weights]
        if model.experts is not None:
            in_blocks = weights == "fp8" and record_of(gpu).architecture == "hopper"
            modes["moe_quant_mode"] = "fp8_block" if in_blocks else _WEIGHTS[weights]
    if kv != BF16.number:
        if kv.bytes != 1:
            raise NoTablesError(f"there are no tables of KV in {quantization.kv_cache_dtype}")
        modes["kvcache_quant_mode"] = "fp8"
    return modes


def _sampled(engine: Any) -> tuple[Array, Array]:
    """Seconds of decode [batch, context] and of prefill [chunk, prefix]. The tables count the prefix as input."""
    decode = [[engine.predict_decode_latency(batch, context, 2) for context in CONTEXTS] for batch in BATCHES]
    prefill = [[engine.predict_prefill_latency(1, prefix + chunk, prefix) for prefix in PREFIXES] for chunk in CHUNKS]
    seconds = np.array(decode) / 1e3
    # Measured times decrease in places. Times without context must not, since times beyond the last point are
    # extrapolated from them, so raise the last row.
    first, second = CONTEXTS[:2]
    alone = seconds[:, 0] - (seconds[:, 1] - seconds[:, 0]) * first / (second - first)
    seconds[-1] += max(0.0, alone[-2] - alone[-1])
    return seconds, np.array(prefill) / 1e3


def _difference(gpu: GPU, link: float, measured: GPU, model: ModelSpec, tp: int, tokens: tuple[int, ...]) -> Array:
    """[tokens, 1] additional seconds of one all-reduce per layer on `link`, compared with the measured GPU's link."""
    size = np.array(tokens, dtype=float)[:, None] * model.hidden * ACTIVATION_BYTES
    here = all_reduce_seconds(rates(gpu), link, tp, size)
    there = all_reduce_seconds(rates(measured), measured.link, tp, size)
    difference: Array = model.layers * (here - there)
    return difference


def _rows(seconds: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in seconds.tolist())


def _configuration(model: ModelSpec) -> dict[str, object]:
    """The config.json that describes the model to the tables. Raises `NoTablesError` if no config.json can."""
    if model.latent:
        raise NoTablesError(f"{model.name} has latent attention, which the tables cover for few models only")
    attention, experts = model.plain_attention, model.experts
    gated = all(kind.dense is None or kind.dense.gated for kind in model.kinds) and (experts is None or experts.gated)
    if attention is None or not gated or (experts is not None and experts.latent):
        raise NoTablesError(f"the tables have no times for the layers of {model.name}")
    common: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_context,
        "tie_word_embeddings": model.tied,
        "torch_dtype": "bfloat16",
    }
    if experts is None:
        return common
    if model.sparse_layers != model.layers or experts.shared_intermediate:
        raise NoTablesError(f"{model.name} has dense layers or shared experts in addition to routed experts")
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.intermediate,
    }


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the package's warnings about fallback rows, which concern kernels outside the request."""
    logger = logging.getLogger("aiconfigurator_core")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
