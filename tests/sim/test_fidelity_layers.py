"""Runs with tables of layers, made by hand in the form that LLMServingSim 2 publishes: converted, and predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.gpu_data import read_runs
from benchmarks.fidelity.layer_tables import LayerCost, LayerTables
from benchmarks.fidelity.serving_sim_runs import convert
from benchmarks.fidelity.serving_sim_runs import main as convert_all
from libra.sim.clock import ticks
from libra.sim.engine.iteration_cost import DecodeBatch

LAYERS = 32  # of Llama-3.1-8B
SIZES = [1, 2, 4, 8, 16]
DENSE = {"embedding": 3, "layernorm": 2, "qkv_proj": 40, "rotary_emb": 2, "o_proj": 30, "gate_up_proj": 90, "act_fn": 3}
DENSE |= {"down_proj": 60, "final_layernorm": 2}
EACH = LAYERS * (2 * 2 + 40 + 2 + 30 + 90 + 3 + 60) + 3 + 2  # microseconds of all layers at one token


def attention(chunk: int, prefix: int, decodes: int, context: int) -> float:
    """Microseconds of one layer: decodes beside a chunk take half as long again as alone."""
    beside = 1.5 if chunk and decodes else 1.0
    return 5 + 0.01 * chunk * (prefix + chunk / 2) / 16 + beside * 0.01 * decodes * context


def table(header: str, rows: list[tuple[object, ...]]) -> str:
    return "\n".join([header, *(",".join(str(value) for value in row) for row in rows)]) + "\n"


def clone(folder: Path, tp: int = 1, **engine: object) -> Path:
    """A project with one run, whose requests take 20 ms to their first token and 1 s."""
    run = folder / "bench" / "examples" / "RTX9" / "Llama-3.1-8B"
    bundle = folder / "profiler" / "perf" / "RTX9" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    (run / "vllm").mkdir(parents=True)
    instance = {"model_name": "meta-llama/Llama-3.1-8B", "hardware": "RTX9", "tp_size": tp}
    (run / "config.json").write_text(json.dumps({"nodes": [{"instances": [instance]}]}))
    scheduler = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True}
    meta = {
        "vllm_version": "0.19.0",
        "engine_kwargs": {"tensor_parallel_size": tp, "data_parallel_size": 1, "kv_cache_dtype": "auto", **engine},
        "kv_cache": {"num_gpu_blocks": 1000, "block_size": 16},
        "hardware": {"torch_version": "2.10", "device_name": "NVIDIA RTX 9"},
        "resolved_config": {
            "compilation_config": {"cudagraph_capture_sizes": SIZES},
            "model_config": {"quantization": None, "max_model_len": 4096},
            "scheduler_config": {**scheduler, "async_scheduling": True},
        },
    }
    (run / "vllm" / "meta.json").write_text(json.dumps(meta))
    rows = [
        {"input_toks": 40, "output_toks": 50, "arrival_time": 1e9 + i, "queued_ts": 500.0 + i + 0.001 * (i != 1)}
        | {"first_token_ts": 500.02 + i, "last_token_ts": 501.0 + i}
        for i in range(4)
    ]
    (run / "vllm" / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    heads = [("lm_head", n, 100) for n in SIZES] + [("sampler", n, 10) for n in SIZES]
    held = [(n, kv) for n in (1, 4, 16) for kv in (16, 256, 1024)]
    shapes = [(0, 0, *one) for one in held] + [(c, p, 0, 0) for c in (16, 64) for p in (0, 256)]
    shapes += [(c, 0, *one) for c in (16, 64) for one in held if one[0] < 16]  # the largest batch was not measured
    for degree in {1, tp}:
        (bundle / f"tp{degree}").mkdir(parents=True)
        dense = [(name, n, us / degree) for name, us in DENSE.items() for n in (*SIZES, 64)]
        (bundle / f"tp{degree}" / "dense.csv").write_text(table("layer,tokens,time_us", dense))
        (bundle / f"tp{degree}" / "per_sequence.csv").write_text(table("layer,sequences,time_us", heads))
        priced = [(*shape, attention(*shape) / degree) for shape in shapes]
        header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
        (bundle / f"tp{degree}" / "attention.csv").write_text(table(header, priced))
    samples = "".join(f"    - {{bytes: {8192 * n}, us_graphed: {10.0 * n}}}\n" for n in (1, 64))
    (folder / "profiler" / "perf" / "RTX9" / "hardware.yaml").write_text(
        f"measured:\n  interconnect:\n    samples:\n{samples}"
    )
    return folder


def converted(tmp_path: Path, **given: Any) -> Path:
    written, left = convert(clone(tmp_path / "clone", **given), tmp_path / "runs")
    assert [path.name for path in written] == ["rtx9-llama-3.1-8b.json"] and not left
    return tmp_path / "runs"


def test_a_run_is_converted(tmp_path: Path) -> None:
    (run,) = read_runs(converted(tmp_path))
    assert (run.device, run.model.name) == ("NVIDIA RTX 9", "meta-llama/Llama-3.1-8B")
    assert (run.config.kv_blocks, run.config.max_num_seqs, run.config.async_scheduling) == (999, 16, True)
    assert run.config.capture_sizes == tuple(SIZES) and run.config.max_model_len == 4096
    # The clocks are as far apart as for the request that entered the engine at once.
    first, second, *_ = run.cases["sharegpt"]
    assert (first.arrival, first.first, first.end) == pytest.approx((0, 0.02, 1.0), abs=1e-6)
    assert (second.arrival, second.prompt, second.output) == (pytest.approx(1), 40, 50)


def cost(runs: Path) -> LayerCost:
    (run,) = read_runs(runs)
    assert run.layers is not None
    return LayerCost(run.layers, run.config)


def test_an_iteration_is_the_sum_of_its_layers(tmp_path: Path) -> None:
    priced = cost(converted(tmp_path))
    base, slope, _ = priced.line(DecodeBatch(3), 3 * 256)  # the graph of four, whose padding has no context
    expected = EACH + 110 + LAYERS * (5 + 0.01 * 3 * 256)
    assert base + slope * 768 == pytest.approx(ticks(expected / 1e6), rel=1e-6)
    # Prefill alone: one chunk, and one row of logits.
    assert priced.mixed(DecodeBatch(0), 0, [(64, 256)]) == pytest.approx(
        ticks((EACH + 110 + LAYERS * attention(64, 256, 0, 0)) / 1e6), rel=1e-6
    )
    # Two prompts are one kernel, of twice the tokens, each of which sees as many as in one prompt.
    two = EACH + 110 + LAYERS * (5 + 0.01 * 32 * 8 / 16)
    assert priced.mixed(DecodeBatch(0), 0, [(16, 0), (16, 0)]) == pytest.approx(ticks(two / 1e6), rel=1e-6)
    both = EACH + 110 + LAYERS * (attention(16, 0, 0, 0) + 1.5 * 0.01 * 4 * 256)
    assert priced.mixed(DecodeBatch(4), 4 * 256, [(16, 0)]) == pytest.approx(ticks(both / 1e6), rel=1e-6)


def test_tensor_parallel_layers_wait_for_two_all_reduces(tmp_path: Path) -> None:
    one, two = (cost(converted(tmp_path / str(tp), tp=tp)) for tp in (1, 2))
    single, divided = (it.mixed(DecodeBatch(0), 0, [(64, 0)]) for it in (one, two))
    reduced = 2 * LAYERS * 640e-6  # 64 tokens of 4,096 numbers of 16 bits
    assert divided == pytest.approx((single - ticks(110e-6)) / 2 + ticks(reduced + 110e-6), rel=1e-6)


def test_decodes_beside_a_chunk_take_no_less_than_alone() -> None:
    rows = [(0, 0, n, kv, 10 + n * kv) for n in (1, 8) for kv in (16, 64)]
    rows += [(c, p, 0, 0, 10 + c) for c in (16, 32) for p in (0, 16)]
    rows += [(16, 0, n, kv, 27 + n * kv / 2) for n in (1, 8) for kv in (16, 64)]
    tables = LayerTables([(1, 1.0), (64, 2.0)], [(1, 1.0), (8, 1.0)], rows)
    assert tables.beside(16, 8, 64) == tables.decodes(8, 64) == 10 + 8 * 64
    with pytest.raises(ValueError, match="no decodes alone"):
        LayerTables([(1, 1.0)], [(1, 1.0)], rows[4:])


def test_the_command_predicts_and_judges_what_was_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    assert convert_all([str(clone(tmp_path / "clone")), str(out)]) == 0
    rows = tmp_path / "rows.json"
    status = main(["--gpu-runs", str(out), "--json", str(rows)])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    barred = {row["metric"]: row["goal"] for row in found if row["met"] is not None}
    assert barred == {
        "error of makespan": "at most 2 %",
        "error of tpot_mean": "at most 2 %",
        "error of latency_mean": "at most 2.2 %",
    }
    assert status == int(any(row["met"] is False for row in found))
    assert "tables of its layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"data_parallel_size": 2}, "data-parallel ranks that divide no experts"),
        ({"kv_cache_dtype": "fp8"}, "a quantised engine"),
    ],
)
def test_what_is_left_out_is_named(engine: dict[str, object], reason: str, tmp_path: Path) -> None:
    written, left = convert(clone(tmp_path / "clone", **engine), tmp_path / "runs")
    assert not written and len(left) == 1
    assert left[0].startswith(f"RTX9/Llama-3.1-8B: {reason}")


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_all([str(tmp_path), str(tmp_path / "runs")]) == 2
    assert "give a clone of the project" in capsys.readouterr().err
