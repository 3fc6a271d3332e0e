"""What can be known to be wrong before anything is started.

Invariant: a run that cannot work is refused here in one line that names the key and the remedy, and leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from libra.config.run import ConfigError, RunConfig
from libra.loop.checkpoint import latest_checkpoint
from libra.loop.run_lock import LOCK
from libra.records.disk import write_whole, writing
from libra.route.catalogue import policy_named, policy_restored

# Memory of the process that imports the libraries, and of one worker beside it, as proportional set size on the tiny
# models of the examples: whole runs with four workers peaked at 3.0 to 3.9 GiB (`peak_memory_bytes` of a summary). A
# larger model adds its weights, see `_check_memory`.
FORK_SERVER_BYTES = 900 << 20
WORKER_BYTES = 700 << 20
_RESUMED_AS_STARTED = (
    (None, "seed"),
    ("environment", "kind"),
    ("environment", "train_prompts"),
    ("training", "prompts_per_step"),
    ("training", "samples_per_prompt"),
    ("training", "precision"),
)
_RAY_SECONDS = 10.0  # in which a cluster that is there takes a connection
# Float32 weights and two moments, the four gradients of the ring, and the activations of a micro-batch as one more.
_TRAINED_COPIES = 8


def check(config: RunConfig, resume: bool, overwrite: bool) -> None:
    """Raises `ConfigError`."""
    _check_launcher(config)
    _check_model_directory(config)
    if config.cluster.ray_address is None:  # the workers run here; what other machines have, Ray knows
        _check_memory(config)
        _check_cores(config)
        _check_port(config)
    _check_engines(config)
    _check_policy(config)
    _check_metrics(config)
    _check_run_directory(config, resume, overwrite)


def prepare_run_directory(config: RunConfig, resume: bool, overwrite: bool) -> RunConfig:
    """Empty the run directory if `overwrite`; `config.json` marks it as a run's from its first moment. Its lock is
    held, and what was checked before that is checked again: another run may have begun and ended meanwhile. Returns the
    configuration of the run: one that is resumed keeps the arithmetic that `auto` once chose. Raises `ConfigError`,
    `DiskError`."""
    directory = config.run_directory
    _check_run_directory(config, resume, overwrite)
    if overwrite:
        with writing(directory):
            # What marks it as a run's goes last: who is interrupted here can do it again.
            for path in sorted(_files(directory), key=lambda path: path.name == "config.json"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if resume and config.training.precision == "auto":
        chosen = json.loads((directory / "config.json").read_text())["training"]["precision"]
        config = config if chosen == "auto" else config.computing_in(chosen)
    record_config(config)
    return config


def record_config(config: RunConfig) -> None:
    """Raises `DiskError`."""
    write_whole(config.run_directory / "config.json", config.model_dump_json(indent=1) + "\n")


def _check_launcher(config: RunConfig) -> None:
    cluster = config.cluster
    if cluster.launcher == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "cluster.launcher: Ray is not installed, and launcher is ray; pip install 'libra-rl[ray]', or use local"
        )
    if cluster.ray_address not in (None, "auto"):
        _check_ray_address(cluster.ray_address)


def _check_ray_address(address: str) -> None:
    """Ray itself would try a wrong one for minutes."""
    remedy = "run libra on a node of the cluster, and give auto, or the HOST:PORT that `ray start` printed"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or address.startswith("ray://"):
        raise ConfigError(f"cluster.ray_address: {address} is not the address of a Ray cluster; {remedy}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_RAY_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cluster.ray_address: nothing answers at {address} ({error}); {remedy}") from None


def _check_model_directory(config: RunConfig) -> None:
    directory = config.model.directory
    if directory is None:
        return
    if not directory.is_dir():
        raise ConfigError(
            f"model.directory: {directory} does not exist; give a directory in Hugging Face layout, or remove the key"
            " to make a tiny model"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"model.directory: {directory} holds no {name}; give a directory in Hugging Face layout")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model.directory: {directory} holds no *.safetensors weights; save the model there first")
    if _model_config(directory).get("tie_word_embeddings", False):
        # vLLM's CPU backend keeps a packed copy of a tied output layer, which a weight update leaves behind.
        raise ConfigError(
            f"model.directory: {directory} ties its word embeddings, which engines on CPU cannot update; save it with"
            " tie_word_embeddings false and an lm_head of its own"
        )


def _check_memory(config: RunConfig) -> None:
    free = psutil.virtual_memory().available
    training, trained = config.training, _TRAINED_COPIES * _weight_bytes(config)
    each = WORKER_BYTES + trained
    peers = (config.cluster.core + config.cluster.hybrid) * (training.processes - 1)
    others = FORK_SERVER_BYTES + peers * (each if training.sharding == "none" else WORKER_BYTES)
    needed = others + config.cluster.slots * each
    if needed > free:
        fit = max(0, int((free - others) // each))
        raise ConfigError(
            f"cluster.slots: {config.cluster.slots} workers need about {needed / 2**30:.1f} GiB and"
            f" {free / 2**30:.1f} GiB are free; use at most {fit}, or free some memory"
        )


def _model_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"model.directory: {directory / 'config.json'} is not a JSON object; save the model there again"
        )
    return config


def _weight_bytes(config: RunConfig) -> int:
    """Float32 bytes of the model's weights."""
    directory = config.model.directory
    if directory is not None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        dtype = _model_config(directory).get("dtype", "bfloat16")
        return stored * (1 if dtype == "float32" else 2)
    shape = config.model
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    return 4 * shape.layers * (attention + 9 * shape.hidden_size**2)


def _check_cores(config: RunConfig) -> None:
    cores = len(os.sched_getaffinity(0))
    asked = config.cluster.slots * config.cluster.share
    if asked > cores:
        raise ConfigError(
            f"cluster.slots: {config.cluster.slots} slots of {config.cluster.share} core need {asked:.2f} cores and"
            f" {cores} are here; use at most {int(cores / config.cluster.share)} slots, or a smaller cluster.share"
        )


def _check_engines(config: RunConfig) -> None:
    for name, shape in config.engines.items():
        if shape.kv_tokens < shape.max_model_len:
            raise ConfigError(
                f"engines.{name}.kv_tokens: {shape.kv_tokens} tokens cannot hold one context of"
                f" {shape.max_model_len}; give at least engines.{name}.max_model_len"
            )
    for bucket in config.start.buckets:
        holds = config.engines[bucket.shape].max_model_len
        if bucket.up_to > holds:
            raise ConfigError(
                f"start.buckets: {bucket.shape!r} is to serve contexts up to {bucket.up_to} tokens and holds {holds};"
                f" lower up_to, or raise engines.{bucket.shape}.max_model_len"
            )
    longest = max(shape.max_model_len for shape in config.engines.values())
    last = config.start.buckets[-1]
    if config.engines[last.shape].max_model_len < longest:
        raise ConfigError(
            f"start.buckets: the last bucket uses {last.shape!r}, which holds"
            f" {config.engines[last.shape].max_model_len} tokens; end with the shape that holds {longest}"
        )


def _check_policy(config: RunConfig) -> None:
    try:
        policy_named(config.routing.policy)
    except ValueError as error:
        raise ConfigError(f"routing.policy: {error}") from None


def _check_port(config: RunConfig) -> None:
    port = config.cluster.port
    if port != 0:
        _try_port("cluster.port", "127.0.0.1", port, "give a free port, or 0 for any")


def _check_metrics(config: RunConfig) -> None:
    host, port = config.metrics.host, config.metrics.port
    if port is None:
        return
    for library in ("aiohttp", "prometheus_client"):
        if find_spec(library) is None:
            raise ConfigError(f"metrics.port: {library} is not installed: pip install 'libra-rl[http]'")
    if port == config.cluster.port:
        raise ConfigError(f"metrics.port: {port} is cluster.port too, where training replicas meet; give another one")
    _try_port("metrics.port", host, port, "give a free port, or leave it out")


def _try_port(key: str, host: str, port: int, remedy: str) -> None:
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # a name that is none is no OSError
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {port} cannot be used on {host} ({why}); {remedy}") from None


def _check_run_directory(config: RunConfig, resume: bool, overwrite: bool) -> None:
    directory = config.run_directory
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: one goes on from what the other deletes")
    nearest = next(
        parent
        for parent in (directory, *directory.absolute().parents)
        if os.path.exists(parent)  # noqa: PTH110 - Path.exists raises where one may not even look
    )
    if not nearest.is_dir() or not _writable(nearest):
        raise ConfigError(f"directory: {directory} cannot be written; give a directory that you may write to")
    used = directory.is_dir() and bool(_files(directory))
    if resume and not used:
        raise ConfigError(f"name: there is no run to resume in {directory}; start it without --resume")
    if resume:
        path, state = latest_checkpoint(directory)
        _check_resumed(config, directory / "config.json")
        try:
            policy_restored(config.routing.policy, state.policy)
        except ValueError as error:
            raise ConfigError(f"routing.policy: {path}: {error}") from None
    if used and overwrite and not (directory / "config.json").is_file():
        raise ConfigError(
            f"name: {directory} holds files but no run, so --overwrite would delete something else; give another --name"
        )
    if used and not resume and not overwrite:
        raise ConfigError(f"name: {directory} holds an earlier run; use --resume, --overwrite, or another --name")


def _check_resumed(config: RunConfig, started_with: Path) -> None:
    """Groups that are under way must mean the same prompts and be of the same size, and steps that are made again must
    be those that were made."""
    before = json.loads(started_with.read_text())
    now = config.model_dump(mode="json")
    for section, key in _RESUMED_AS_STARTED:
        old, new = (before, now) if section is None else (before[section], now[section])
        if old[key] != new[key] and new[key] != "auto":  # which keeps what it chose then
            name = key if section is None else f"{section}.{key}"
            raise ConfigError(
                f"{name}: the run was started with {old[key]} and cannot go on with {new[key]}; give the same, or start"
                " again with --overwrite"
            )


def _files(directory: Path) -> list[Path]:
    """What a run has left in its directory; the lock says nothing of that."""
    return [path for path in directory.iterdir() if path.name != LOCK]


def _writable(directory: Path) -> bool:
    """Whether a file can really be made there: root passes every permission bit, and a read-only disk none."""
    probe = directory / f".libra-probe-{os.getpid()}"
    try:
        probe.touch()
    except OSError:
        return False
    probe.unlink()
    return True
