"""Runs of vLLM that LLMServingSim 2 publishes (MIT licence), as files that `--gpu-runs` reads.

    git clone https://github.com/casys-kaist/LLMServingSim
    python -m benchmarks.fidelity.serving_sim_runs LLMServingSim RUNS
    python -m benchmarks.fidelity --gpu-runs RUNS

Of the clone are read `bench/examples/HARDWARE/MODEL` (`config.json`, `vllm/meta.json`, `vllm/requests.jsonl`) and
`profiler/perf/HARDWARE/ORG/MODEL/bf16` (`tpN/dense.csv`, `per_sequence.csv`, `attention.csv`), and `hardware.yaml` in
`profiler/perf/HARDWARE` with tensor parallelism. Nothing is downloaded.

Invariant: what is written is what was measured there, summed over the layers; nothing of a run's own times is in its
prices. A run that cannot be read is named, with the reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fidelity.layer_tables import price_at
from libra.config.yaml_file import ConfigError
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model

_ONCE = frozenset({"embedding", "final_layernorm"})
_TWICE = frozenset({"layernorm"})  # before attention and after it
_EACH = frozenset({"qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj"})
_HEAD = frozenset({"lm_head", "sampler"})


def convert(clone: Path, out: Path) -> tuple[list[Path], list[str]]:
    """Write a file for each run; returns them, and which runs were left out and why. Raises `ConfigError` where the
    clone has no runs."""
    configs = sorted(clone.glob("bench/examples/*/*/config.json"))
    if not configs:
        raise ConfigError(
            f"{clone}: there is no bench/examples/HARDWARE/MODEL/config.json: give a clone of the project"
        )
    out.mkdir(parents=True, exist_ok=True)
    written, left = [], []
    for config in configs:
        run = config.parent
        name = f"{run.parent.name}-{run.name}".casefold()
        try:
            document = _document(clone, run)
        except (ConfigError, OSError, KeyError, TypeError, ValueError) as error:
            left.append(f"{run.parent.name}/{run.name}: {error}")
            continue
        path = out / f"{name}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        written.append(path)
    return written, left


def _document(clone: Path, run: Path) -> dict[str, Any]:
    nodes = _json(run / "config.json")["nodes"]
    instances = [instance for node in nodes for instance in node["instances"]]
    meta = _json(run / "vllm" / "meta.json")
    asked, resolved = meta["engine_kwargs"], meta["resolved_config"]
    if len(instances) > 1 or asked["data_parallel_size"] > 1:
        raise ValueError("data-parallel ranks are not predicted from tables of layers")
    if resolved["model_config"].get("quantization") or asked["kv_cache_dtype"] != "auto":
        raise ValueError("a quantised engine is not predicted from tables of layers")
    hardware, name, tp = instances[0]["hardware"], instances[0]["model_name"], asked["tensor_parallel_size"]
    model = load_model(name)
    if model.experts is not None:
        raise ValueError("experts are not predicted from tables of layers")
    scheduler, cache = resolved["scheduler_config"], meta["kv_cache"]
    perf = clone / "profiler" / "perf" / hardware
    facts = {
        "model": name,
        "gpu": meta["hardware"]["device_name"],
        "vllm": meta["vllm_version"],
        "torch": meta["hardware"]["torch_version"],
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "capture_sizes": resolved["compilation_config"]["cudagraph_capture_sizes"],
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "max_num_seqs": scheduler["max_num_seqs"],
        "chunked_prefill": scheduler["enable_chunked_prefill"],
        "async_scheduling": scheduler["async_scheduling"],
        "num_gpu_blocks": cache["num_gpu_blocks"],
        "block_size": cache["block_size"],
        "max_model_len": resolved["model_config"]["max_model_len"],
        "tensor_parallel_size": tp,
    }
    requests = [json.loads(line) for line in (run / "vllm" / "requests.jsonl").read_text("utf-8").splitlines() if line]
    reduce = _all_reduce(perf / "hardware.yaml", model) if tp > 1 else ()
    layers = _layers(perf / name / "bf16", model, tp, reduce)
    return {"facts": facts, "grid": [], "layers": layers, "cases": {"sharegpt": {"requests": _requests(requests)}}}


def _requests(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arrivals are on the wall clock, all else on the engine's: the nearest of all pairs of a request's arrival and its
    entry into the engine says how far apart the clocks are."""
    apart = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    begun = min(row["arrival_time"] for row in rows) + apart
    return [
        {
            "arrival": row["arrival_time"] + apart - begun,
            "first": row["first_token_ts"] - begun,
            "end": row["last_token_ts"] - begun,
            "prompt": row["input_toks"],
            "out": row["output_toks"],
            "cached": 0,
        }
        for row in rows
    ]


def _layers(bundle: Path, model: ModelSpec, tp: int, reduce: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Microseconds of all layers. What tensor parallelism does not divide is only in the table of one GPU."""
    dense, whole = (_columns(bundle / f"tp{degree}" / "dense.csv", "tokens") for degree in (tp, 1))
    head, alone = (_columns(bundle / f"tp{degree}" / "per_sequence.csv", "sequences") for degree in (tp, 1))
    dense, head = whole | dense, alone | head
    unknown = sorted((dense.keys() - _ONCE - _TWICE - _EACH) | (head.keys() - _HEAD))
    if unknown:
        raise ValueError(f"{bundle.name}: layers {', '.join(unknown)} are not known")
    times = {name: 1 if name in _ONCE else model.layers * (2 if name in _TWICE else 1) for name in dense}
    return {
        "tokens": [
            (count, us + 2 * model.layers * (price_at(reduce, count) if reduce else 0.0))
            for count, us in _summed(dense, times)
        ],
        "sequences": _summed(head, dict.fromkeys(head, 1)),
        "attention": _attention(bundle / f"tp{tp}" / "attention.csv", model.layers),
    }


def _columns(path: Path, axis: str) -> dict[str, dict[int, float]]:
    """By layer and size."""
    found: dict[str, dict[int, float]] = {}
    for row in _csv(path):
        found.setdefault(row["layer"], {})[int(row[axis])] = float(row["time_us"])
    return found


def _summed(layers: Mapping[str, Mapping[int, float]], times: Mapping[str, int]) -> list[tuple[int, float]]:
    sizes = sorted(set.intersection(*(set(points) for points in layers.values())))
    return [(size, sum(times[name] * points[size] for name, points in layers.items())) for size in sizes]


def _attention(path: Path, layers: int) -> list[tuple[float, ...]]:
    """Newer tables have a chunk's keys, its own among them; older ones what was before it."""
    found: list[tuple[float, ...]] = []
    for row in _csv(path):
        chunk = int(row.get("prefill_tokens", row.get("prefill_chunk", "")))
        prefix = int(row["prefill_key"]) - chunk if "prefill_key" in row else int(row["kv_prefill"])
        if row.get("decode_q_len", "1") in ("0", "1"):
            decodes = int(row["n_decode"]), int(row["kv_decode"])
            found.append((chunk, max(0, prefix), *decodes, layers * float(row["time_us"])))
    return found


def _all_reduce(path: Path, model: ModelSpec) -> list[tuple[float, float]]:
    """(tokens, microseconds) of the all-reduce of a layer's output, in 16 bits."""
    measured = yaml.safe_load(path.read_text(encoding="utf-8"))["measured"]["interconnect"]
    samples = [it for it in measured["samples"] if it.get("collective", "all_reduce") == "all_reduce"]
    return sorted((it["bytes"] / (2 * model.hidden), it["us_graphed"]) for it in samples)


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.serving_sim_runs")
    parser.add_argument("clone", type=Path, help="of https://github.com/casys-kaist/LLMServingSim")
    parser.add_argument("out", type=Path, help="folder for --gpu-runs")
    options = parser.parse_args(given)
    try:
        written, left = convert(options.clone, options.out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for path in written:
        print(path)
    for reason in left:
        print(f"left out: {reason}", file=sys.stderr)
    return 0 if written else 2


if __name__ == "__main__":
    sys.exit(main())
