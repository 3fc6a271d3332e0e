"""Tables in the forms that LLMServingSim 2 has published over time, made by hand: read alike, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fidelity.gpu_cases import predicted_outcomes
from benchmarks.fidelity.gpu_data import read_runs
from benchmarks.fidelity.gpu_runs import predict_all
from benchmarks.fidelity.layer_tables import LayerCost, RanksCost
from benchmarks.fidelity.serving_sim_runs import convert
from benchmarks.fidelity.serving_sim_tables import layer_tables
from libra.hardware.model_file import load_model
from libra.sim.clock import ticks
from libra.sim.engine.group_cost import Graph
from libra.sim.engine.iteration_cost import DecodeBatch
from tests.sim.test_fidelity_layers import attention, clone, table

NAME = "Qwen/Qwen3-30B-A3B-Instruct-2507"
DEEP = 48  # layers of it


def bundle(folder: Path) -> Path:
    return folder / "profiler" / "perf" / "RTX9" / "meta-llama" / "Llama-3.1-8B" / "bf16"


def newer(folder: Path) -> Path:
    """The same attention by what tokens of prompts see in the mean, prompts that are shorter than that chunk among
    them, and contexts that differ."""
    path = bundle(clone(folder)) / "tp1" / "attention.csv"
    held = [(n, kv) for n in (1, 4, 16) for kv in (16, 256, 1024)]
    rows: list[tuple[object, ...]] = [("attention", 0, 0.0, *one, 1, attention(0, 0, *one)) for one in held]
    for chunk in (16, 64):
        for seen in (4.0, chunk / 2, 256 + chunk / 2):
            us = attention(chunk, 0, 0, 0) + 0.01 * chunk * (seen - chunk / 2) / 16
            rows.append(("attention", chunk, seen, 0, 0, 1, us))
            rows += [("attention", chunk, seen, n, kv, 1, us + 1.5 * 0.01 * n * kv) for n, kv in held if n < 16]
    rows.append(("attention", 0, 0.0, 4, 256, 3, 1e6))  # with drafts
    path.write_text(table("layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us", rows))
    return folder


def cost(clone_folder: Path, out: Path) -> LayerCost:
    written, left = convert(clone_folder, out)
    assert written and not left
    (run,) = read_runs(out)
    assert run.layers is not None
    return LayerCost(run.layers, run.config)


def test_newer_attention_is_read_as_older(tmp_path: Path) -> None:
    old, new = cost(clone(tmp_path / "a"), tmp_path / "old"), cost(newer(tmp_path / "b"), tmp_path / "new")
    shapes = [(0, [(16, 0)]), (0, [(64, 256)]), (4, [(16, 0)]), (0, [(32, 128)]), (2, [(40, 10), (8, 0)])]
    for count, chunks in shapes:
        assert new.mixed(DecodeBatch(count), 256 * count, chunks) == pytest.approx(
            old.mixed(DecodeBatch(count), 256 * count, chunks), rel=1e-6
        )
    assert new.line(DecodeBatch(4), 1024) == old.line(DecodeBatch(4), 1024)


def test_contexts_that_differ_count_as_longer_ones(tmp_path: Path) -> None:
    """A batch of which one in four is longer takes a third of the way from even ones of its mean to even ones of its
    longest: of lengths 100 and 500, 100 tokens of context more at a standard deviation of 173."""
    folder = clone(tmp_path / "clone")
    rows = [
        ("attention", regime, 4, 1, pc, 0, 100, 500, 200, 20.0, 50.0, 30.0)
        for regime, pc in (("pure", 0), ("mixed", 16))
    ]
    header = "layer,regime,n,nb,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us"
    (bundle(folder) / "tp1" / "skew.csv").write_text(table(header, rows))
    priced = cost(folder, tmp_path / "runs")
    assert priced.uneven
    even, spread = DecodeBatch(4), DecodeBatch(4, spread=round(4 * 173.205))
    base, slope, _ = priced.line(spread, 1024)
    assert base + slope * 1024 == pytest.approx(sum_of(priced.line(even, 1024 + 400), 1024 + 400), rel=1e-4)
    assert priced.mixed(spread, 1024, [(16, 0)]) == priced.mixed(even, 1424, [(16, 0)])


def sum_of(line: tuple[int, int, int], context: int) -> int:
    return line[0] + line[1] * context


def test_an_older_run_says_little_of_its_engine(tmp_path: Path) -> None:
    """Settings are the defaults then, and KV blocks those of the memory that the project's configuration gives it."""
    folder = clone(tmp_path / "clone")
    run = folder / "bench" / "examples" / "RTX9" / "Llama-3.1-8B"
    document = json.loads((run / "config.json").read_text())
    document["nodes"][0]["instances"][0]["npu_mem"] = {"mem_size": 24, "mem_util": 0.833919}
    (run / "config.json").write_text(json.dumps(document))
    (run / "vllm" / "meta.json").unlink()
    (bundle(folder) / "meta.yaml").write_text("gpu: NVIDIA RTX 9\nvllm_version: 0.19.0\n")
    with (folder / "profiler" / "perf" / "RTX9" / "hardware.yaml").open("a") as file:
        file.write("spec:\n  memory_total_gib: 48\n")
    written, left = convert(folder, tmp_path / "runs")
    assert not left
    facts = json.loads(written[0].read_text())["facts"]
    assert (facts["max_num_seqs"], facts["max_num_batched_tokens"], facts["max_model_len"]) == (128, 2048, 131072)
    assert (facts["vllm"], facts["capture_sizes"][-1], facts["async_scheduling"]) == ("0.19.0", 256, True)
    assert facts["num_gpu_blocks"] == pytest.approx(2588, abs=3)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "attention.csv",
            "layer,prefill_chunk,prefill_key,n_decode,kv_decode,time_us\nindexer,0,0,1,16,5\n",
            "indexer",
        ),
        ("dense.csv", "layer,tokens,time_us\ngdn_in_proj,1,5\n", "gdn_in_proj"),
        ("attention.csv", None, "attention.csv"),
    ],
)
def test_layers_that_are_not_known_are_named(name: str, text: str | None, reason: str, tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    path = bundle(folder) / "tp1" / name
    path.unlink() if text is None else path.write_text(text)
    written, left = convert(folder, tmp_path / "runs")
    assert not written and reason in left[0]


def experts_clone(
    folder: Path, *, parts: bool = False, collectives: tuple[str, ...] = ("all_gather", "reduce_scatter")
) -> Path:
    """Two data-parallel GPUs that divide 128 experts. Experts take 10 us and 2 for each that is met, and parts of a
    GPU's own tokens 1 us each."""
    clone(folder)
    (folder / "bench" / "examples" / "RTX9" / "Llama-3.1-8B").rename(
        run := folder / "bench" / "examples" / "RTX9" / "A3B"
    )
    instance = {"model_name": NAME, "hardware": "RTX9", "tp_size": 1, "ep_size": 2}
    (run / "config.json").write_text(json.dumps({"nodes": [{"instances": [instance, instance]}]}))
    meta = json.loads((run / "vllm" / "meta.json").read_text())
    meta["engine_kwargs"] |= {"data_parallel_size": 2, "enable_expert_parallel": True}
    (run / "vllm" / "meta.json").write_text(json.dumps(meta))
    target = folder / "profiler" / "perf" / "RTX9" / Path(NAME) / "bf16"
    target.parent.mkdir(parents=True)
    bundle(folder).rename(target)
    sizes = (1, 2, 8, 64, 128)
    dense = [(name, n, us) for name, us in (("layernorm", 2), ("qkv_proj", 30), ("o_proj", 20)) for n in (1, 64)]
    (target / "tp1" / "dense.csv").write_text(table("layer,tokens,time_us", dense))
    rows = [(ep, n, met, 10.0 + 2 * met) for ep in (1, 2) for n in sizes for met in (4, 8, 32, 64)]
    (target / "tp1" / "moe.csv").write_text(table("ep,tokens,activated_experts,time_us", rows))
    if parts:
        entries = [
            {"target": {"tp": 1, "dp": 2, "ep": 2, "rank": rank, "sequence_parallel": False}, "path": "p"}
            for rank in (0, 1)
        ]
        (target / "tp1" / "moe_components.json").write_text(json.dumps({"entries": entries}))
        (target / "tp1" / "p").mkdir()
        lines: list[tuple[object, ...]] = []
        for mode in ("eager", "graph"):
            lines += [(part, mode, n, -1, -1, 1.0) for part in ("gate_routing", "finalize_copy") for n in (1, 64)]
            lines += [("experts", mode, n, met, met, 10.0 + 2 * met) for n in sizes for met in (0, 4, 8, 32, 64)]
        header = "component,mode,tokens,activated_experts,local_assignments,time_us"
        (target / "tp1" / "p" / "components.csv").write_text(table(header, lines))
    samples = "".join(
        f"    - {{collective: {name}, bytes: {size}, us_graphed: 7.0}}\n"
        for name in collectives
        for size in (4096, 1 << 20)
    )
    (folder / "profiler" / "perf" / "RTX9" / "hardware.yaml").write_text(
        f"measured:\n  interconnect:\n    samples:\n{samples}"
    )
    return folder


@pytest.mark.parametrize(
    ("parts", "collectives", "more"),
    [
        (False, ("all_gather", "reduce_scatter"), 14),
        (True, ("all_gather", "reduce_scatter"), 14 + 2),
        (False, ("all_reduce",), 7),  # does what the two do
    ],
)
def test_ranks_wait_for_experts_and_their_exchange(
    parts: bool, collectives: tuple[str, ...], more: float, tmp_path: Path
) -> None:
    _, left = convert(experts_clone(tmp_path / "clone", parts=parts, collectives=collectives), tmp_path / "runs")
    assert not left
    (run,) = read_runs(tmp_path / "runs")
    assert run.layers is not None and run.dp == 2
    assert run.config.kv_blocks == 1000 // 2 - 1  # vLLM tells those of both
    priced = RanksCost(run.layers, run.config)
    met = 64 * (1 - (1 - 8 / 128) ** 8)  # of a GPU's experts by eight tokens of both
    expected = DEEP * (10 + 2 * met + more)
    for graph in (Graph("FULL", 4), Graph("PIECEWISE", 4), Graph("NONE")):
        (line,) = priced.together(graph, 8, 4, 0.0, 0).lines
        assert line == (1, pytest.approx(ticks(expected / 1e6), rel=1e-6))
    # A rank's own part has no experts, and is padded to the graph of all.
    own = sum_of(priced.rank(Graph("FULL", 16)).line(DecodeBatch(4), 1024), 1024)
    assert own == sum_of(priced.rank(Graph("FULL", 16)).line(DecodeBatch(16), 1024), 1024)
    assert own == pytest.approx(ticks((DEEP * (2 * 2 + 30 + 20 + 5 + 0.01 * 1024) + 110) / 1e6), rel=1e-6)


def test_the_run_of_two_ranks_is_predicted(tmp_path: Path) -> None:
    convert(experts_clone(tmp_path / "clone"), tmp_path / "runs")
    (run,) = read_runs(tmp_path / "runs")
    assert run.layers is not None
    ranks = RanksCost(run.layers, run.config)
    case = run.cases["sharegpt"]
    ended = predicted_outcomes(case, run.config, ranks.rank(Graph("NONE")), (2, ranks))
    assert [it.output_tokens for it in ended] == [it.output for it in case]
    ((one,), ()) = predict_all(tmp_path / "runs")
    assert one.fitted is None and set(one.predicted) == {"layers"}


def test_experts_that_were_not_divided_so_are_refused(tmp_path: Path) -> None:
    folder = experts_clone(tmp_path / "clone")
    perf = folder / "profiler" / "perf" / "RTX9"
    tables = perf / Path(NAME) / "bf16"
    model = load_model(NAME)
    assert layer_tables(tables, perf / "hardware.yaml", model, 1, 1)["experts"]
    with pytest.raises(ValueError, match=r"moe.csv has no experts divided over 4 GPUs"):
        layer_tables(tables, perf / "hardware.yaml", model, 1, 4)
    (tables / "tp2").mkdir()
    for name in ("dense.csv", "per_sequence.csv", "attention.csv"):
        (tables / "tp2" / name).write_bytes((tables / "tp1" / name).read_bytes())
    (perf / "hardware.yaml").write_text("measured: {interconnect: null}\n")
    with pytest.raises(ValueError, match=r"hardware.yaml has no all_reduce"):
        layer_tables(tables, perf / "hardware.yaml", model, 2, 1)
