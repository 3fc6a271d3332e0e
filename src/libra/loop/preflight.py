"""Checks of a run's configuration before anything is started.

Invariant: an impossible run is refused in one line with the key and the remedy, and leaves no file behind.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from libra.backends.chat_format import ChatFormat
from libra.backends.devices import inventory, slot_devices
from libra.backends.tiny_model import kv_bytes_per_token
from libra.config.cache import cache_directory
from libra.config.extras import install_command, missing_library
from libra.config.input_file import read_input
from libra.config.rooms import offered
from libra.config.run import (
    ClusterConfig,
    ConfigError,
    MetricsConfig,
    ModelConfig,
    RunConfig,
    ShapeConfig,
    StartConfig,
    TrainingConfig,
)
from libra.cost.engine_memory import context_bytes, held_bytes
from libra.cost.quantization import AS_STORED
from libra.cost.train_memory import CONTEXT as TRAINER_CONTEXT
from libra.cost.train_memory import LOGIT_CHUNK
from libra.environments.protocol import Environment
from libra.environments.served import ServedEnvironment
from libra.hardware.model_file import load_model
from libra.loop.run_directory import can_be_written, check_not_running, check_run_directory
from libra.loop.tracking import check_tracking
from libra.loop.warmup import no_demonstrations
from libra.plan.options.slots import longest_context
from libra.route.custom import load_policy
from libra.serve.span_endpoint import span_endpoint

# Memory of the process that imports the libraries, and of each worker on top, as proportional set size on the tiny
# models of the examples: whole runs with four workers peaked at 3.0 to 3.9 GiB (`peak_memory_bytes` of a summary). A
# larger model adds its weights, see `_check_memory`.
FORK_SERVER_BYTES = 900 << 20
WORKER_BYTES = 700 << 20
_RAY_SECONDS = 10.0  # in which a running cluster accepts a connection
# Float32 weights and two moments, four gradients of the ring, and the activations of a micro-batch as one copy.
_TRAINED_COPIES = 8
# Bytes per parameter on a GPU: float32 weights, two moments and a gradient, and one temporary vector at start or step.
TRAINED_BYTES, _STATE_BYTES = 20, 16
# Bytes of a logit in the widest type, and of a logit in the chunk for log-probs: three copies in float32.
_LOGIT_BYTES, _CHUNK_BYTES = 4, 12


def check(config: RunConfig, resume: bool, overwrite: bool) -> None:
    """Check the whole configuration. Raises `ConfigError`. Checks for a live run in the same directory first, since
    that run also uses the memory and the port.
    """
    check_not_running(config.run_directory)
    _check_launcher(config.cluster)
    devices = slot_devices(config.cluster) if config.cluster.launcher == "local" else ()
    _check_model_directory(config.model.directory)
    servers = 0 if config.lending is None else config.lending.servers
    if devices:
        _check_gpus(config)
    elif config.cluster.placement is not None and any(len(slot) > 1 for slot in config.cluster.placement):
        most = max(config.cluster.placement, key=len)
        raise ConfigError(
            f"cluster.placement: a replica or an engine on devices {', '.join(map(str, most))}, but a CPU slot is one"
            " device; give one device for each slot, or plan for engines and training on one device each"
        )
    if not devices and config.cluster.ray_address is None:  # workers run here; Ray knows the memory of other machines
        borrowers = min(servers, config.lent_devices)  # engines on an agent's devices use the memory of its machine
        kv_bytes = max(shape.kv_tokens for shape in config.engines.values()) * _kv_bytes(config.model)
        _check_memory(config.cluster, config.training, config.model, servers + borrowers, kv_bytes)
        _check_cores(config.cluster, servers)
    if config.cluster.ray_address is None:
        _check_port(config.cluster.port)
    _check_engines(config.all_engines, config.start)
    if config.lending is not None:
        for check_lending in offered("preflight"):
            check_lending(config.lending, config.cluster)
    _check_policy(config.routing.policy)
    check_tracking(config)
    _check_spans(config.otel)
    _check_metrics(config.metrics, config.cluster.port)
    _check_cache()
    check_run_directory(config, resume, overwrite)


def check_environment(config: RunConfig, environment: Environment | ServedEnvironment) -> None:
    """Check that an environment that plays its own episodes has a model with a chat template, and enough tasks. Raises
    `ConfigError`.
    """
    if not isinstance(environment, ServedEnvironment):
        return
    if config.model.directory is None or config.warm_up.steps > 0:
        raise ConfigError(no_demonstrations(config.environment.kind))
    ChatFormat(config.model.directory)
    environment.prompts("train", config.environment.train_prompts, config.seed)
    environment.prompts("heldout", config.environment.heldout_prompts, config.seed)


def _check_spans(otel: str | None) -> None:
    try:
        collector = span_endpoint(otel, os.environ, "otel")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if collector is not None and (library := missing_library("otel")) is not None:
        raise ConfigError(f"otel: {library} is not installed; {install_command('otel')}, or leave it out")


def _check_cache() -> None:
    """Check that the directory for warm models and measured costs can be written; a home may be read-only."""
    if not can_be_written(cache := cache_directory()):
        raise ConfigError(f"{cache} cannot be written; set XDG_CACHE_HOME to a directory that you may write to")


def _check_launcher(cluster: ClusterConfig) -> None:
    if cluster.launcher == "ray" and find_spec("ray") is None:
        raise ConfigError(
            f"cluster.launcher: Ray is not installed, but launcher is ray; {install_command('ray')}, or use local"
        )
    if cluster.ray_address not in (None, "auto"):
        _check_ray_address(cluster.ray_address)


def _check_ray_address(address: str) -> None:
    """Check the address here, since Ray itself would retry a wrong one for minutes."""
    remedy = "run libra on a node of the cluster, and give auto, or the HOST:PORT that `ray start` printed"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or address.startswith("ray://"):
        raise ConfigError(f"cluster.ray_address: {address} is not the address of a Ray cluster; {remedy}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_RAY_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cluster.ray_address: no Ray cluster answers at {address} ({error}); {remedy}") from None


def _check_model_directory(directory: Path | None) -> None:
    if directory is None:
        return
    if not directory.is_dir():
        raise ConfigError(
            f"model.directory: {directory} does not exist; give a directory in Hugging Face layout, or remove the key"
            " to make a tiny model"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"model.directory: {directory} has no {name}; give a directory in Hugging Face layout")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model.directory: {directory} has no *.safetensors weights; save the model there first")
    _model_config(directory)


def _check_memory(
    cluster: ClusterConfig, training: TrainingConfig, model: ModelConfig, beside: int, kv_bytes: int
) -> None:
    """`beside` counts servers and the engines on their devices, in addition to the workers; `kv_bytes` is one engine's
    KV."""
    free = psutil.virtual_memory().available
    each = WORKER_BYTES + max(_TRAINED_COPIES * _weight_bytes(model), kv_bytes)
    peers = (cluster.core + cluster.hybrid) * (training.processes - 1)
    others = FORK_SERVER_BYTES + beside * WORKER_BYTES + peers * (each if training.sharding == "none" else WORKER_BYTES)
    needed = others + cluster.slots * each
    if needed > free:
        fit = max(0, int((free - others) // each))
        raise ConfigError(
            f"cluster.slots: {cluster.slots} workers need about {needed / 2**30:.1f} GiB, but"
            f" {free / 2**30:.1f} GiB are free; use at most {fit}, or free some memory"
        )


def _model_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_input(directory / "config.json"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"model.directory: {directory / 'config.json'} is not a JSON object; save the model there again"
        )
    return config


def _weight_bytes(model: ModelConfig) -> int:
    """Float32 bytes of the model's weights."""
    directory = model.directory
    if directory is not None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        dtype = _model_config(directory).get("dtype", "bfloat16")
        return stored * (1 if dtype == "float32" else 2)
    attention = model.hidden_size * model.head_dim * 2 * (model.heads + model.kv_heads)
    return 4 * model.layers * (attention + 9 * model.hidden_size**2)


def _kv_bytes(model: ModelConfig) -> int:
    """Float32 bytes of one token's KV in an engine."""
    if model.directory is not None:
        try:
            return kv_bytes_per_token(model.directory, "float32")
        except KeyError as error:
            raise ConfigError(
                f"model.directory: {model.directory / 'config.json'} has no {error.args[0]}; save the model there again"
            ) from None
    return 4 * 2 * model.layers * model.kv_heads * model.head_dim


def _check_gpus(config: RunConfig) -> None:
    """Check that each slot's GPUs have memory for a replica, and for an engine of each shape."""
    cluster, training = config.cluster, config.training
    if config.lending is not None and config.lending.servers:
        raise ConfigError("lending.servers: the run's own servers need CPU slots; set cluster.device to cpu")
    if training.processes != cluster.replica_gpus:
        raise ConfigError(
            f"training.processes: {training.processes}, but a slot has {cluster.replica_gpus} GPU(s), one for each"
            f" process; set it to {cluster.replica_gpus}"
        )
    if config.model.directory is None:  # the tiny model fits any GPU
        return
    model = load_model(config.model.directory / "config.json")
    room = cluster.share * min(gpu.memory for gpu in inventory())
    parts = cluster.replica_gpus if training.sharding == "fsdp2" else 1
    tokens = max(training.micro_batch_tokens, longest_context(config.engines))
    logits = model.vocab * (_LOGIT_BYTES * tokens + _CHUNK_BYTES * min(tokens, LOGIT_CHUNK))
    share = model.parameters / parts
    needs = {"a training replica": max(TRAINED_BYTES * share, _STATE_BYTES * share + logits) + TRAINER_CONTEXT}
    if cluster.hybrid and any(shape.sleeps for shape in config.engines.values()):  # an engine sleeps on the same GPUs
        needs["a training replica"] += context_bytes(cluster.engine_gpus)
    for name, shape in config.engines.items():
        budget = shape.max_num_batched_tokens or shape.max_model_len
        held = held_bytes(model, cluster.engine_gpus, batched_tokens=budget, seqs=shape.max_num_seqs)
        kv = shape.kv_tokens * AS_STORED.kv_bytes_per_token(model, cluster.engine_gpus)
        needs[f"engine {name} (engines.{name}.kv_tokens)"] = held + kv
    for who, needed in needs.items():
        if needed > room:
            raise ConfigError(
                f"cluster.share: {who} needs about {needed / 2**30:.1f} GiB of each of its GPUs, but a slot has"
                f" {room / 2**30:.1f} GiB; give more of a GPU, more GPUs a slot, a smaller model, cache or micro-batch"
            )


def _check_cores(cluster: ClusterConfig, servers: int) -> None:
    cores = len(os.sched_getaffinity(0))
    asked = (cluster.slots + servers) * cluster.share
    if asked > cores:
        beside = f" and {servers} servers" if servers else ""
        raise ConfigError(
            f"cluster.slots: {cluster.slots} slots{beside} of {cluster.share} core need {asked:.2f} cores, but"
            f" {cores} are here; use at most {max(0, int(cores / cluster.share) - servers)} slots, or a smaller"
            " cluster.share"
        )


def _check_engines(engines: Mapping[str, ShapeConfig], start: StartConfig) -> None:
    for name, shape in engines.items():
        if shape.kv_tokens < shape.max_model_len:
            raise ConfigError(
                f"engines.{name}.kv_tokens: {shape.kv_tokens} tokens cannot hold one context of"
                f" {shape.max_model_len}; give at least engines.{name}.max_model_len"
            )
    for bucket in start.buckets:
        holds = engines[bucket.shape].max_model_len
        if bucket.up_to > holds:
            raise ConfigError(
                f"start.buckets: {bucket.shape!r} is to serve contexts up to {bucket.up_to} tokens but has room for"
                f" {holds}; lower up_to, or raise engines.{bucket.shape}.max_model_len"
            )
    longest = longest_context(engines)
    last = start.buckets[-1]
    if engines[last.shape].max_model_len < longest:
        raise ConfigError(
            f"start.buckets: the last bucket uses {last.shape!r}, which holds"
            f" {engines[last.shape].max_model_len} tokens; end with the shape that holds {longest}"
        )


def _check_policy(policy: str) -> None:
    try:
        made = load_policy(policy)
    except ValueError as error:
        raise ConfigError(f"routing.policy: {error}") from None
    lacking = [method for method in ("snapshot", "restore") if not callable(getattr(made, method, None))]
    if lacking:
        raise ConfigError(f"routing.policy: {policy} lacks {', '.join(lacking)}, which checkpoints of a run need")


def _check_port(port: int) -> None:
    if port != 0:
        try_port("cluster.port", "127.0.0.1", port, "give a free port, or 0 for any")


def _check_metrics(metrics: MetricsConfig, training_port: int) -> None:
    host, port = metrics.host, metrics.port
    if port is None:
        return
    if port == training_port:
        raise ConfigError(f"metrics.port: {port} is also cluster.port, where training replicas meet; give another port")
    try_port("metrics.port", host, port, "give a free port, or leave it out")


def try_port(key: str, host: str, port: int, remedy: str) -> None:
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # an invalid name raises UnicodeError
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {port} cannot be used on {host} ({why}); {remedy}") from None
