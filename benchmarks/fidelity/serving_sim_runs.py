"""Runs of vLLM that LLMServingSim 2 publishes (MIT licence), as files that `--gpu-runs` reads.

    git clone https://github.com/casys-kaist/LLMServingSim
    python -m benchmarks.fidelity.serving_sim_runs LLMServingSim RUNS
    python -m benchmarks.fidelity --gpu-runs RUNS

Of the clone are read `bench/examples/HARDWARE/MODEL` (`config.json`, `vllm/meta.json`, `vllm/requests.jsonl`) and
`profiler/perf/HARDWARE/ORG/MODEL/bf16` (see `serving_sim_tables`), and `hardware.yaml` in `profiler/perf/HARDWARE` with
several GPUs. Nothing is downloaded. Settings that older runs do not tell are vLLM's defaults.

Invariant: what is written is what was measured there, summed over the layers; nothing of a run's own times is in its
prices. A run that cannot be read is named, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fidelity.serving_sim_tables import layer_tables
from libra.config.yaml_file import ConfigError
from libra.cost.graphs import capture_sizes
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model

# Of every run that says them.
_SETTINGS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "tensor_parallel_size": 1}
_BLOCK = 16
_VALUE = 2  # bytes of a weight, or of a number of the KV cache


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
    meta = _json(run / "vllm" / "meta.json") if (run / "vllm" / "meta.json").is_file() else {}
    asked, resolved = _SETTINGS | meta.get("engine_kwargs", {}), meta.get("resolved_config", {})
    engine, scheduler = resolved.get("model_config", {}), resolved.get("scheduler_config", {})
    cache, device = meta.get("kv_cache", {}), meta.get("hardware", {})
    if engine.get("quantization") or asked.get("kv_cache_dtype", "auto") != "auto":
        raise ValueError("a quantised engine is not predicted from tables of layers")
    hardware, name = instances[0]["hardware"], instances[0]["model_name"]
    tp, dp = asked["tensor_parallel_size"], asked.get("data_parallel_size") or len(instances)
    model = load_model(name)
    if dp > 1 and (model.experts is None or not asked.get("enable_expert_parallel", True)):
        raise ValueError("data-parallel ranks that divide no experts are not predicted from tables of layers")
    if dp != len(instances):
        raise ValueError(f"config.json has {len(instances)} instances, vllm/meta.json {dp} data-parallel ranks")
    perf = clone / "profiler" / "perf" / hardware
    tables = perf / name / "bf16" / "meta.yaml"
    timed = yaml.safe_load(tables.read_text("utf-8")) if not meta else {}
    seqs, budget = asked["max_num_seqs"], asked["max_num_batched_tokens"]
    facts = {
        "model": name,
        "gpu": device.get("device_name", timed.get("gpu", hardware)),
        "vllm": meta.get("vllm_version", timed.get("vllm_version", "unknown")),
        "torch": device.get("torch_version", "unknown"),
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "capture_sizes": resolved.get("compilation_config", {}).get("cudagraph_capture_sizes")
        or capture_sizes(seqs, budget),
        "max_num_batched_tokens": scheduler.get("max_num_batched_tokens", budget),
        "max_num_seqs": scheduler.get("max_num_seqs", seqs),
        "chunked_prefill": scheduler.get("enable_chunked_prefill", True),
        "async_scheduling": scheduler.get("async_scheduling", True),
        # vLLM tells those of all ranks together
        "num_gpu_blocks": cache.get("num_gpu_blocks", 0) // dp or _blocks(instances[0]["npu_mem"], perf, model, tp, dp),
        "block_size": cache.get("block_size", _BLOCK),
        "max_model_len": engine.get("max_model_len", model.max_context),
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
    }
    requests = [json.loads(line) for line in (run / "vllm" / "requests.jsonl").read_text("utf-8").splitlines() if line]
    layers = layer_tables(perf / name / "bf16", perf / "hardware.yaml", model, tp, dp)
    return {"facts": facts, "grid": [], "layers": layers, "cases": {"sharegpt": {"requests": _requests(requests)}}}


def _blocks(memory: Mapping[str, float], perf: Path, model: ModelSpec, tp: int, dp: int) -> int:
    """KV blocks of a rank, where the run does not say them: the memory that the project's own configuration gives the
    engine of a GPU, less weights."""
    spec = yaml.safe_load((perf / "hardware.yaml").read_text("utf-8"))["spec"]
    size = memory.get("mem_size") or spec["memory_total_gib"]
    left = memory["mem_util"] * size * 2**30 - _VALUE * model.device_parameters(tp, ep=dp).total
    return int(left / (_BLOCK * model.kv_bytes_per_token(_VALUE, tp)))


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
