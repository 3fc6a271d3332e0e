"""An engine in a file, with the model and hardware that its keys name.

Invariant: the engine's model and GPU are known, and the model can be divided over the engine's GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra.config.recipe import Recipe
from libra.config.units import RATES, quantity
from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import Profiling
from libra.cost.host import NAMED_HOSTS
from libra.cost.quantization import Quantization
from libra.cost.unmeasured import unmeasured
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.cluster_file import gpu_of
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.engines_keys import EngineSection, NodeSection, RanksSection

_LARGE = 70 * 2.0**30  # bytes: vLLM runs 1,024 sequences on GPUs with this memory or more
_NODE = 8  # assumed GPUs of a node, unless tensor parallelism needs more


@dataclass(frozen=True, slots=True)
class DescribedEngine:
    """An engine in a file. `note` gets a line on unusual parts, such as the source of times."""

    section: EngineSection
    model: ModelSpec
    nodes: NodeClass
    beside: Path  # the directory of the file; paths in the file are relative to it
    note: Callable[[str], None]
    profiling: Profiling  # of the engine's vLLM version

    @property
    def gpu(self) -> GPU:
        return self.nodes.gpu

    @property
    def tp(self) -> int:
        return self.section.tensor_parallel_size

    @property
    def gpus(self) -> int:
        """Number of GPUs of an engine, or of one of its ranks."""
        return self.tp * self.section.pipeline_parallel_size

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        given = self.section.max_model_len
        return self.model.max_context if given is None else given

    @property
    def seqs(self) -> int:
        """Most requests in a batch: the given number, or vLLM's default for the GPU (`EngineArgs.get_batch_defaults`).
        The default is 1,024 for GPUs of 70 GiB or more except A100, 256 for others, and at most
        `max_num_batched_tokens`."""
        given, gpu = self.section.max_num_seqs, self.gpu
        if given is not None:
            return given
        most = 1024 if gpu.usable >= _LARGE and "a100" not in gpu.name.lower() else 256
        return min(most, self.section.max_num_batched_tokens)

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.section.quantization, self.section.kv_cache_dtype)

    @property
    def kv_bytes(self) -> float:
        """KV bytes of a token, on all devices together."""
        return self.tp * self.quantization.kv_bytes_per_token(self.model, self.tp, context=self.longest)

    @property
    def recipe(self) -> Recipe:
        """The recipe with which profiles of the engine's times are found."""
        weights, kv = self.section.quantization, self.section.kv_cache_dtype
        return Recipe(batch=1, samples_per_prompt=1, max_length=self.longest, rollout_dtype=weights, kv_cache_dtype=kv)

    @property
    def source(self) -> str:
        """Source of the engine's times."""
        given = self.section.profile
        return given if given in ("auto", "tables", "roofline") else str(self.beside / given)

    @property
    def host(self) -> str:
        """Source of the host overhead."""
        given = self.section.host
        return given if given in ("none", *NAMED_HOSTS) else str(self.beside / given)


def described_engine(
    section: EngineSection, key: str, beside: Path, note: Callable[[str], None] = lambda _: None
) -> DescribedEngine:
    """Make the engine of the section at `key`. Raises ValueError that begins with the key."""
    try:
        model = load_model(section.model, note)
    except ConfigError as error:
        raise ValueError(f"{key}.model: {error}") from None
    gpu = gpu_of(section.gpu, f"{key}.gpu")
    refused = model.tp_refusal(section.tensor_parallel_size)
    if refused is not None:
        raise ValueError(f"{key}.tensor_parallel_size: {model.name}: {refused}")
    try:
        nodes = _nodes(section, gpu)
        profiling = Profiling() if section.vllm_version is None else Profiling.of(section.vllm_version)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    engine = DescribedEngine(section, model, nodes, beside, note, profiling)
    whole_experts = section.afd is not None or section.enable_expert_parallel
    refused = engine.quantization.refusal(model)
    if refused is not None:
        raise ValueError(f"{key}.{refused}")
    refused = engine.quantization.tp_refusal(model, engine.tp, routed=not whole_experts)
    if refused is not None:
        raise ValueError(f"{key}.tensor_parallel_size: {model.name}: {refused}")
    for told in (engine.quantization.note(model), unmeasured(model)):
        if told is not None:
            note(told)
    return engine


def _nodes(section: EngineSection, gpu: GPU) -> NodeClass:
    """The nodes that an engine runs on. Raises ValueError that begins with the key."""
    tp, told, network = section.tensor_parallel_size, section.node, section.network_bandwidth
    if told is None:
        try:
            return NodeClass(section.name, 1, max(_NODE, tp), gpu, gpu.link, inter_bandwidth=_NODE * network)
        except ValueError as error:
            key = "network_bandwidth" if str(error).startswith("inter") else "gpu"
            raise ValueError(f"{key}: {error}") from None
    if tp > told.gpus:
        raise ValueError(
            f"node.gpus is {told.gpus}, fewer than tensor_parallel_size, {tp}: lower tensor_parallel_size, which stays"
            " within a node"
        )
    if network != RanksSection().network_bandwidth:
        raise ValueError("network_bandwidth is given, but node has inter_bandwidth: leave one of them out")
    try:
        intra = gpu.link if told.intra_bandwidth is None else _rate("intra_bandwidth", told)
        return NodeClass(section.name, 1, told.gpus, gpu, intra, inter_bandwidth=_rate("inter_bandwidth", told))
    except ValueError as error:
        raise ValueError(f"node.{error}") from None


def _rate(key: str, section: NodeSection) -> float:
    return quantity(key, getattr(section, key), RATES)
