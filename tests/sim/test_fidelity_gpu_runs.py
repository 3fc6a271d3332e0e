"""Files of engines that ran on GPUs, and their workloads in the simulator. The files here are made by it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.gpu_data import CaseRequest, read_grid, read_run
from benchmarks.fidelity.gpu_runs import Sessions, requests, served
from libra.config.yaml_file import ConfigError
from libra.cost.graphs import capture_sizes
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost

CONFIG = EngineConfig(max_model_len=4096, kv_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512)
ENGINE = EngineSpec("engine", CONFIG, AffineCost(ticks(0.01), per_new_token=ticks(1e-5), per_context_token=10))
TRAINED = {
    **{"model": "qwen3-1.7b", "recompute": True, "seq": 512, "batch": 16, "param_dtype": "torch.bfloat16"},
    **{"forward_backward": 0.4, "optimizer": 0.02, "peak_bytes": 16e9},
}


def asked(prompt: int, out: int, arrival: float = 0.0, cached: int = 0, **more: Any) -> CaseRequest:
    return CaseRequest(
        arrival=arrival, first=arrival + 0.5, end=arrival + 0.9, prompt=prompt, out=out, cached=cached, **more
    )


def session(name: str, *turns: tuple[int, int], start: float = 0.0) -> list[CaseRequest]:
    return [asked(prompt, out, start + turn, 32, session=name, turn=turn) for turn, (prompt, out) in enumerate(turns)]


def test_prompts_share_what_the_workload_says() -> None:
    first, second, other = requests([asked(100, 5, group=group) for group in (0, 0, 1)])
    assert first.chain is not None and second.chain is not None and other.chain is not None
    assert first.chain.parent is second.chain.parent is not other.chain.parent
    assert (first.chain.fork, second.chain.fork) == (100, 100)
    chains = [it.chain for it in requests([*session("a", (100, 5), (150, 5)), *session("b", (80, 5))])]
    assert chains[1].parent is chains[0]  # type: ignore[union-attr]
    assert chains[0].parent is chains[2].parent  # type: ignore[union-attr]
    assert [chain.fork for chain in chains] == [32, 100, 32]  # type: ignore[union-attr]
    assert requests([asked(100, 5)])[0].chain is None


def test_a_turn_comes_when_the_last_one_has_ended_and_a_session_when_another_has() -> None:
    case = [
        *session("a", (100, 5), (150, 5)),
        *session("b", (80, 9)),
        *session("c", (90, 3), start=5.0),  # after the first session had ended
    ]
    times = {out: (arrival, end) for (arrival, _, end, _), out in zip(served(case, ENGINE), range(4), strict=True)}
    assert times[0][0] == times[2][0] == 0
    assert times[1][0] == times[0][1]
    assert times[3][0] == min(times[1][1], times[2][1])
    assert Sessions(case).describe() == {"name": "sessions", "sessions": 3, "together": 2}


def test_an_open_loop_keeps_its_arrivals() -> None:
    found = served([asked(100, 5, 0.5), asked(50, 2, 0.1)], ENGINE)
    assert sorted(arrival for arrival, *_ in found) == [0.1, 0.5]


def document() -> dict[str, Any]:
    facts = {"model": "qwen3-8b", "gpu": "NVIDIA H100 80GB HBM3", "torch": "2", "vllm": "0", "async_scheduling": False}
    facts |= {"cudagraph_mode": "FULL_AND_PIECEWISE", "capture_sizes": list(capture_sizes(256, 2048))}
    facts |= {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "chunked_prefill": True}
    facts |= {"num_gpu_blocks": 20_000, "block_size": 16}
    rows = [
        {"arrival": i / 9, "first": i / 9 + 0.02, "end": i / 9 + 1, "prompt": 64, "out": 90, "cached": 0}
        for i in range(20)
    ]
    return {"facts": facts, "cases": {"open": {"requests": rows}}}


def write_steps(path: Path) -> int:
    """Iterations of a grid, and one of another case; returns how many the grid has."""
    names = "case start_s us decodes decode_ctx prefills prefill_tokens prefill_ctx preempted waiting running sched_us"
    rows, at = [], 1.0

    def step(us: int, decodes: int, context: int, prefills: int, tokens: int, before: int) -> None:
        nonlocal at
        pairs = int(tokens * (before + tokens / max(1, prefills) / 2))
        rows.append(["grid", at, us, decodes, context, prefills, tokens, pairs, 0, 0, prefills, 9])
        at += us / 1e6

    for held in (512, 4096):
        for batch in (1, 2, 4, 8, 16):
            at += 0.1 * held / 512 + batch * (2e-4 + 3e-7 * (held + 16))  # a prompt is made; requests are taken in
            step(12_000 + 400 * batch, 0, 0, batch, 16 * batch, held)
            for turn in range(3):
                step(9_000, batch, batch * (held + 17 + turn), 0, 0, 0)
    step(50_000, 1, 600, 1, 2047, 0)
    step(14_000, 1, 601, 1, 100, 2047)
    rows.append(["other", at, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0])
    with gzip.open(path, "wt") as file:
        csv.writer(file).writerows([names.split(), *rows])
    return len(rows) - 1


def test_a_file_is_read_with_its_grid(tmp_path: Path) -> None:
    run = read_run(tmp_path / "engine.json", document())
    assert (run.gpu.name, run.facts.model) == ("H100", "qwen3-8b")
    assert (run.config.kv_blocks, run.config.max_num_seqs) == (19_999, 256)
    count = write_steps(tmp_path / "engine_steps.csv.gz")
    grid, intake = read_grid(tmp_path / "engine.json", run)
    assert intake == pytest.approx((2e-4, 3e-7), rel=0.05)
    admitted = [it for it in grid if it.chunks]
    assert admitted[0].chunks == ((16, 512),) and admitted[0].admitted == (1, 528, 512)
    assert admitted[-1].chunks == ((100, 2047),) and admitted[-1].admitted == (0, 0, 0)
    assert sum(it.times for it in grid) == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"gpu": "TPU"}}, "facts.gpu: TPU is none of"),
        ({"facts": {"gpu": "NVIDIA H100 PCIe"}}, "facts.gpu: NVIDIA H100 PCIe is none of"),
        ({"facts": {"max_num_seqs": None}}, "facts.max_num_seqs: this key is required"),
        ({"facts": {"num_gpu_blocks": "many"}}, "facts.num_gpu_blocks: "),
        ({"facts": {"chunked_prefill": 1}}, "facts.chunked_prefill: "),
        ({"facts": {"pipeline_parallel_size": 2}}, "facts.pipeline_parallel_size: "),
        ({"facts": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "facts.cudagraph_mode: FULL_DECODE_ONLY is not priced"),
        ({"facts": {"max_model_len": 100}}, "facts.max_model_len is 100, and a request of 154 tokens was served"),
        ({"cases": {"none": {"requests": []}}}, "cases.none.requests: give 1 or more"),
        ({"cases": {"cut": {"requests": [{"arrival": 3, "first": 2, "end": 4, "prompt": 1, "out": 1}]}}}, "first is 2"),
    ],
)
def test_a_file_of_another_format_is_refused(change: dict[str, Any], message: str) -> None:
    made = document()
    for key, value in change.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=rf"engine.json: .*{message}"):
        read_run(Path("engine.json"), made)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no file in it has facts and cases"),
        ({"engine.json": "{"}, "engine.json: not JSON"),
        ({"engine.json": json.dumps(document())}, "engine_steps.csv.gz: cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_predicted_is_refused(
    files: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["--gpu-runs", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_read_takes_no_other_engine_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document()
    made["cases"]["long"] = {"error": "out of memory"}  # what failed is left out
    write_steps(tmp_path / "engine_steps.csv.gz")
    (tmp_path / "engine.json").write_text(json.dumps(made))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "torn.json").write_text(json.dumps(document()))
    (tmp_path / "torn_steps.csv.gz").write_bytes(gzip.compress(b"case,us\n" * 99)[:-9])
    lost = {**TRAINED, "seq": 32768, "batch": 1, "error": "out of memory", "param_dtype": None}
    (tmp_path / "training.json").write_text(json.dumps([TRAINED, lost, {**TRAINED, "model": "such"}, 3]))
    rows = tmp_path / "rows.jsonl"
    assert main(["--gpu-runs", str(tmp_path), "--json", str(rows), "--save", str(tmp_path)]) == 2
    told = capsys.readouterr()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    cases = {row["case"] for row in found}
    assert {"engine, fit", "engine, fitted", "engine, open, fitted", "engine, open, default", "training"} <= cases
    assert not any("torn" in case or "long" in case for case in cases)
    assert (tmp_path / "engine.host.json").is_file()
    for begins in (
        *("broken.json: not JSON", "torn_steps.csv.gz: cannot be read"),
        *("training.json: [2].model: 'such'", "training.json: [3]: expected a mapping"),
    ):
        assert sum(f"{tmp_path}/{begins}" in line for line in told.err.splitlines()) == 1, begins
