"""Files of engines that ran on GPUs, and their workloads in the simulator. The files here are made by it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.gpu_cases import Sessions, measured_outcomes, predicted_outcomes, requests
from benchmarks.fidelity.gpu_data import CaseRequest, read_runs
from benchmarks.fidelity.gpu_runs import predict_all
from benchmarks.fidelity.gpu_training import price_steps
from libra.config.yaml_file import ConfigError
from libra.cost.graphs import capture_sizes
from libra.cost.quantization import Quantization
from libra.hardware.cluster import GPUS
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import AffineCost

CONFIG = EngineConfig(max_model_len=4096, kv_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512)
COST = AffineCost(ticks(0.01), per_new_token=ticks(1e-5), per_context_token=10)


def session(name: str, *turns: tuple[int, int], start: float = 0.0) -> list[CaseRequest]:
    return [
        CaseRequest(start + turn, start + turn + 0.5, start + turn + 0.9, prompt, output, 32, None, name, turn)
        for turn, (prompt, output) in enumerate(turns)
    ]


def test_prompts_share_what_the_workload_says() -> None:
    group = [CaseRequest(0, 1, 2, 100, 5, 0, group=group) for group in (0, 0, 1)]
    first, second, other = requests(group)
    assert first.chain is not None and second.chain is not None and other.chain is not None
    assert first.chain.parent is second.chain.parent is not other.chain.parent
    assert (first.chain.fork, second.chain.fork) == (100, 100)
    turns = requests([*session("a", (100, 5), (150, 5)), *session("b", (80, 5))])
    chains = [request.chain for request in turns]
    assert all(chain is not None for chain in chains)
    assert chains[1].parent is chains[0]  # type: ignore[union-attr]
    assert chains[0].parent is chains[2].parent  # type: ignore[union-attr]
    assert [chain.fork for chain in chains] == [32, 100, 32]  # type: ignore[union-attr]
    assert requests([CaseRequest(0, 1, 2, 100, 5, 0)])[0].chain is None


def test_a_turn_comes_when_the_last_one_has_ended_and_a_session_when_another_has() -> None:
    case = [
        *session("a", (100, 5), (150, 5)),
        *session("b", (80, 9)),
        *session("c", (90, 3), start=5.0),  # after the first session had ended
    ]
    served = {it.number: it for it in predicted_outcomes(case, CONFIG, COST)}
    assert served[0].arrival == served[2].arrival == 0
    assert served[1].arrival == served[0].finish
    assert served[3].arrival == min(served[1].finish, served[2].finish)
    assert served[1].cached_tokens == 96  # of the prompt before, in whole blocks
    assert Sessions(case).describe() == {"name": "sessions", "sessions": 3, "together": 2}


def test_an_open_loop_keeps_its_arrivals() -> None:
    case = [CaseRequest(0.5, 1, 2, 100, 5, 0), CaseRequest(0.1, 1, 2, 50, 2, 0)]
    assert [it.arrival for it in predicted_outcomes(case, CONFIG, COST)] == [ticks(0.5), ticks(0.1)]
    assert [it.finish for it in measured_outcomes(case)] == [ticks(2), ticks(2)]


def document() -> dict[str, Any]:
    """An engine whose decodes take 8 ms and 10 us a request, and chunks 12 ms, or 30 beyond the graphs."""
    facts = {"model": "qwen3-8b", "gpu": "NVIDIA H100 80GB HBM3", "torch": "2", "vllm": "0", "async_scheduling": False}
    facts |= {"cudagraph_mode": "FULL_AND_PIECEWISE", "capture_sizes": list(capture_sizes(256, 2048))}
    facts |= {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "chunked_prefill": True}
    facts |= {"num_gpu_blocks": 20_000, "block_size": 16}
    grid: list[dict[str, Any]] = [
        {"kind": "decode", "batch": batch, "ctx": 256, "us": 8000 + 10 * batch, "n": 33} for batch in range(1, 40, 2)
    ]
    grid += [{"kind": "prefill", "tokens": n, "ctx": 0, "us": 12e3, "n": 4} for n in (16, 64, 256)]
    grid += [{"kind": "prefills", "parts": 4, "tokens": 256, "us": 30e3, "n": 4}]
    grid += [{"kind": "mixed", "batch": 8, "ctx": 256, "tokens": 2048, "samples": [[1920, 50e3], [128, 15e3]]}]
    rows = [
        {"arrival": i / 9, "first": i / 9 + 0.02, "end": i / 9 + 1, "prompt": 64, "out": 90, "cached": 0}
        for i in range(20)
    ]
    return {"facts": facts, "grid": grid, "cases": {"open": {"requests": rows}}}


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(document()))
    (tmp_path / "training.json").write_text("[]")
    (run,) = read_runs(tmp_path)
    assert (run.name, run.gpu.name, run.model.name, run.tp) == ("engine", "H100", "Qwen/Qwen3-8B", 1)
    assert (run.config.kv_blocks, run.config.max_num_seqs) == (19_999, 256)
    assert run.intake is None
    decode, rest, chunk = run.grid[1], run.grid[-1], run.grid[-2]
    assert (decode.decodes, decode.context, decode.shared) == (3, 768, 512)
    assert (chunk.chunks, chunk.admitted) == (((1920, 0),), (1, 1920, 0))
    assert (rest.chunks, rest.admitted) == (((128, 1920),), (0, 0, 0))


def test_steps_tell_what_admissions_and_arrivals_take(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(document()))
    names = "case start_s us decodes decode_ctx prefills prefill_tokens prefill_ctx preempted waiting running sched_us"
    rows, at = [], 1.0

    def step(us: int, decodes: int, context: int, prefills: int, tokens: int, before: int) -> None:
        nonlocal at
        pairs = int(tokens * (before + tokens / max(1, prefills) / 2))
        rows.append(["grid", at, us, decodes, context, prefills, tokens, pairs, 0, 0, prefills, 9])
        at += us / 1e6

    for held in (512, 4096):
        for batch in (1, 2, 4, 8):
            at += 0.1 * held / 512 + batch * (2e-4 + 3e-7 * (held + 16))  # a prompt is made; requests are taken in
            step(12_000 + 400 * batch, 0, 0, batch, 16 * batch, held)
            for turn in range(3):
                step(9_000, batch, batch * (held + 17 + turn), 0, 0, 0)
    step(50_000, 1, 600, 1, 2047, 0)
    step(14_000, 1, 601, 1, 100, 2047)
    rows.append(["other", at, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0])
    with gzip.open(tmp_path / "engine_steps.csv.gz", "wt") as file:
        csv.writer(file).writerows([names.split(), *rows])
    (run,) = read_runs(tmp_path)
    assert run.intake is not None
    assert (run.intake.request, run.intake.token) == pytest.approx((2e-4, 3e-7), rel=0.05)
    admitted = [it for it in run.grid if it.chunks]
    assert admitted[0].chunks == ((16, 512),) and admitted[0].admitted == (1, 528, 512)
    assert admitted[-1].chunks == ((100, 2047),) and admitted[-1].admitted == (0, 0, 0)
    assert sum(it.times for it in run.grid) == len(rows) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"gpu": "TPU"}}, "facts.gpu is TPU"),
        ({"facts": {"max_num_seqs": None}}, "max_num_seqs"),
        ({"facts": {"gpu": "NVIDIA H100 PCIe"}}, "facts.gpu is NVIDIA H100 PCIe"),
        ({"facts": {"num_gpu_blocks": "many"}}, "facts.num_gpu_blocks is 'many', not a whole number"),
        ({"facts": {"chunked_prefill": 1}}, "facts.chunked_prefill is 1, not true or false"),
        ({"facts": {"tensor_parallel_size": 0}}, "facts.tensor_parallel_size is 0"),
        ({"facts": {"pipeline_parallel_size": 2}}, "facts.pipeline_parallel_size is more than 1"),
        ({"facts": {"data_parallel_size": 2}}, "facts.data_parallel_size is more than 1"),
        ({"facts": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "facts.cudagraph_mode is FULL_DECODE_ONLY"),
        ({"facts": {"dtype": "float32"}}, "facts.dtype is float32"),
        ({"facts": {"max_model_len": 100}}, "facts.max_model_len is 100, and a request of 154 tokens was served"),
        ({"facts": 7}, "facts is 7, not an object"),
        ({"grid": [{"kind": "odd"}]}, r"grid\[0\].kind is odd"),
        ({"grid": [{"kind": "decode", "batch": 1, "ctx": 9}]}, r"grid\[0\].us is missing"),
        ({"grid": [{"kind": "decode", "batch": 1, "ctx": 9, "us": 0}]}, r"grid\[0\].us is 0"),
        ({"grid": [{"kind": "prefill", "tokens": 9, "us": float("nan")}]}, r"grid\[0\].us is nan"),
        ({"grid": [{"kind": "mixed", "tokens": 9, "samples": [3]}]}, r"grid\[0\].samples is no list of pairs"),
        ({"grid": 7}, "grid is 7, not a list of objects"),
        ({"cases": {"none": {"requests": []}}}, "no request of none has ended"),
        (
            {"cases": {"cut": {"requests": [{"arrival": 0, "first": None}]}}},
            r"cases.cut.requests\[0\].first is missing",
        ),
        (
            {"cases": {"cut": {"requests": [{"arrival": 3, "first": 2, "end": 4}]}}},
            r"cases.cut.requests\[0\].first is 2.0, not between arrival 3.0 and end 4.0",
        ),
        (
            {"cases": {"odd": {"requests": [{"arrival": 0, "first": 1, "end": 2, "session": []}]}}},
            r"cases.odd.requests\[0\].session is neither text nor a number",
        ),
    ],
)
def test_files_of_another_format_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = document()
    for key, value in change.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    (tmp_path / "engine.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=rf"engine.json.*{message}.*measure again"):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no file in it has facts, grid and cases"),
        ({"engine.json": "{"}, "engine.json: not JSON"),
        ({"engine.json": json.dumps({**document(), "grid": []})}, "engine.json: 0 iterations are too few"),
        ({"engine.json": json.dumps({"facts": {}, "cases": {}})}, "engine.json: facts.model is missing"),
    ],
)
def test_a_folder_that_cannot_be_predicted_is_refused(
    files: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["--gpu-runs", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu-runs", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}: there is no such folder; give a folder" in capsys.readouterr().err


def test_an_engine_without_workloads_is_fitted_and_training_steps_stand_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({**document(), "cases": {}}))
    assert main(["--gpu-runs", str(tmp_path)]) == 0
    assert "held out" in capsys.readouterr().out
    ran = {"model": "qwen3-1.7b", "recompute": True, "seq": 512, "batch": 16, "param_dtype": "torch.bfloat16"}
    ran |= {"forward_backward": 0.4, "optimizer": 0.02, "peak_bytes": 16e9}
    lost = {"model": "qwen3-1.7b", "recompute": False, "seq": 32768, "batch": 1, "error": "out of memory"}
    (tmp_path / "engine.json").unlink()
    (tmp_path / "steps_of_training.json").write_text(json.dumps([ran, {**lost, "peak_bytes": 84e9}]))
    main(["--gpu-runs", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "training steps, eager, H100" in shown
    # What ran out of memory has the type of the steps that ran.
    (first, second), _ = price_steps(tmp_path, GPUS["H100"])
    assert first.predicted_peak < 20e9
    fp32 = [{**ran, "param_dtype": "torch.float32"}, {**lost, "peak_bytes": 84e9}]
    (tmp_path / "steps_of_training.json").write_text(json.dumps(fp32))
    assert price_steps(tmp_path, GPUS["H100"])[0][1].predicted_peak > second.predicted_peak + 5e9


def test_the_command_prints_every_price_and_says_which_bars_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(document()))
    rows = tmp_path / "rows.json"
    status = main(["--gpu-runs", str(tmp_path), "--json", str(rows)])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert status == int(any(row["met"] is False for row in found))
    assert {row["case"] for row in found} == {
        *("engine, fit", "engine, fitted", "engine, open, fitted", "engine, open, default"),
    }
    shown = capsys.readouterr().out
    assert all(price in shown for price in ("measured", "kernels alone", "default", "fitted", "held out"))


def test_what_cannot_be_read_takes_no_other_engine_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(document()))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "short.json").write_text(json.dumps({**document(), "grid": document()["grid"][:5]}))
    made = document()
    (tmp_path / "unknown.json").write_text(json.dumps({**made, "facts": {**made["facts"], "model": "nobody/such"}}))
    (tmp_path / "torn.json").write_text(json.dumps(made))
    (tmp_path / "torn_steps.csv.gz").write_bytes(gzip.compress(b"case,us\n" * 99)[:-9])
    ran = {"model": "qwen3-1.7b", "recompute": True, "seq": 512, "batch": 16, "param_dtype": "torch.bfloat16"}
    ran |= {"forward_backward": 0.4, "optimizer": 0.02, "peak_bytes": 16e9}
    odd = {**ran, "model": "qwen3-4b", "param_dtype": "torch.float8"}
    steps = [ran, {**ran, "model": "such"}, odd, {**ran, "seq": None}, {**ran, "peak_bytes": 0}, 3]
    (tmp_path / "training.json").write_text(json.dumps(steps))
    rows = tmp_path / "rows.jsonl"
    assert main(["--gpu-runs", str(tmp_path), "--json", str(rows)]) == 2
    told = capsys.readouterr()
    assert {json.loads(line)["case"].partition(",")[0] for line in rows.read_text().splitlines()} == {
        *("engine", "training")
    }
    assert "qwen3-1.7b, 16 x 512, recomputation full" in told.out
    lines = told.err.splitlines()
    for begins in (
        "broken.json: not JSON",
        "short.json: 5 iterations are too few",
        "unknown.json: facts.model: 'nobody/such'",
        "torn.json: torn_steps.csv.gz cannot be read",
        "training.json: [1].model: 'such'",
        "training.json: [2].param_dtype is torch.float8",
        "training.json: [3].seq is missing",
        "training.json: [4].peak_bytes is 0",
        "training.json: [5].model is missing",
    ):
        assert sum(f"{tmp_path}/{begins}" in line for line in lines) == 1, begins
    assert len(lines) == 9


def test_what_failed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document()
    (tmp_path / "engine.json").write_text(json.dumps(made))
    (whole,) = read_runs(tmp_path)
    made["grid"].insert(3, {"kind": "prefill", "tokens": 8192, "error": "out of memory"})
    made["cases"]["long"] = {"error": "out of memory"}
    made["facts"]["more"] = made["grid"][0]["more"] = {"unknown": [1]}
    (tmp_path / "engine.json").write_text(json.dumps(made))
    (run,) = read_runs(tmp_path)
    assert (run.grid, run.cases) == (whole.grid, whole.cases)
    assert run.left_out == ("long",)
    main(["--gpu-runs", str(tmp_path)])
    assert "long is left out: it failed" in capsys.readouterr().out


def test_facts_need_not_say_what_follows_from_others(tmp_path: Path) -> None:
    made = document()
    facts = made["facts"]
    for key in ("torch", "vllm"):
        del facts[key]
    facts |= {"capture_sizes": facts["capture_sizes"][::-1], "tensor_parallel_size": None, "num_gpu_blocks": 601}
    (tmp_path / "engine.json").write_text(json.dumps(made))
    (run,) = read_runs(tmp_path)
    assert run.tp == 1 and run.config.capture_sizes == capture_sizes(256, 2048)
    assert run.config.max_model_len == 600 * 16  # no more than the blocks hold
    facts |= {"cudagraph_mode": "CUDAGraphMode.NONE", "quantization": "awq_marlin", "kv_cache_dtype": "fp8"}
    (tmp_path / "engine.json").write_text(json.dumps(made))
    (run,) = read_runs(tmp_path)
    assert run.config.capture_sizes == ()
    assert run.quantization == Quantization("awq", "fp8")


def test_quantised_weights_have_their_own_kernels(tmp_path: Path) -> None:
    made = document()
    (tmp_path / "bf16.json").write_text(json.dumps(made))
    (tmp_path / "fp8.json").write_text(json.dumps({**made, "facts": {**made["facts"], "quantization": "fp8"}}))
    (bf16, fp8), refused = predict_all(tmp_path)
    assert not refused
    assert fp8.predicted["kernels alone"]["open"].tpot_mean < 0.75 * bf16.predicted["kernels alone"]["open"].tpot_mean
