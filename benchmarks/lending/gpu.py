"""Two vLLM engines on one GPU: what each way of sharing it gives rollouts and costs users.

Invariant: both engines are real and live throughout; every way serves the same requests, and a miss is attributable
where the same request meets the SLO alone.

    python -m benchmarks.lending gpu [--model DIR] [--rollout-model DIR] [--rates 4,12] [--json FILE]

Without directories the models have the shapes of Qwen3-8B and 4B, and random weights. Takes less than six minutes on an
H100 or H200. `--cpu` does the same with two tiny models on this machine's cores: that it works, not how well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command_line
from benchmarks.lending._two_engines import ROLES, Engine, Mode, Phase, Setting
from benchmarks.rows import Row, none, report
from libra.lend.gate import Slo

_MODES: tuple[Mode, ...] = ("alone", "no gate", "serve first", "gate")
_USE = 0.8
_START = 300.0  # seconds in which an engine has to start
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
_SHAPES = {
    "serving": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "rollout": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("lending gpu", __doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="that serves (default: 8B, random weights)")
    parser.add_argument("--rollout-model", type=Path, metavar="DIR", help="default: 4B, random weights")
    parser.add_argument("--rates", default="4,12", help="requests a second (default: 4,12)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way at each rate (default: 20)")
    parser.add_argument("--asynchronous", action="store_true", help="the serving engine's steps overlap")
    parser.add_argument("--cpu", action="store_true", help="two tiny models on this machine's cores")
    options = parser.parse_args(arguments)
    try:
        rates = [float(rate) for rate in options.rates.split(",")]
    except ValueError:
        parser.error(f"--rates {options.rates}: give numbers with commas between them, such as 4,12")
    if min(rates) <= 0 or options.seconds <= 0:
        parser.error("--rates and --seconds are above 0")
    hardware = _hardware(options.cpu)
    if hardware is None:
        print(
            "benchmarks.lending gpu: PyTorch sees no GPU here; run it where there is one, or with --cpu",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        slo, setting = (_on_cpu if options.cpu else _on_gpu)(directory, options)
        rows = measured(setting, slo, rates, options.seconds)
    print(f"{hardware}; {datetime.now(UTC):%Y-%m-%d}")
    report(rows, None)
    if options.json is not None:
        facts = {"hardware": hardware, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        lines = [json.dumps({**facts, **asdict(row)}) + "\n" for row in rows]
        options.json.write_text("".join(lines), encoding="utf-8")
    return 0


def _hardware(cpu: bool) -> str | None:
    import torch

    if cpu:
        return f"{os.cpu_count()} cores, PyTorch {torch.__version__}"
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def _on_gpu(directory: Path, options: argparse.Namespace) -> tuple[Slo, Setting]:
    models = {"serving": options.model, "rollout": options.rollout_model}
    for name, given in models.items():
        if given is None:
            models[name] = directory / name
            models[name].mkdir()
            (models[name] / "config.json").write_text(json.dumps(_SHAPES[name]), encoding="utf-8")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    slo = Slo(ttft=0.5, tpot=0.05)
    return slo, Setting(
        Engine(str(models["serving"]), "bfloat16", False, 20 << 30, 8192, 128, 2048, options.asynchronous),
        Engine(str(models["rollout"]), "bfloat16", False, 16 << 30, 8192, 64, 512),
        str(directory / "device"),
        pace=slo.pace(_USE),
        longest=0.05,
        shortest=0.008,
        turns=64,
        prompt=(900, 6000),
        output=(130, 1000),
        turn_prompt=(64, 512),
        turn_output=(128, 2048),
    )


def _on_cpu(directory: Path, options: argparse.Namespace) -> tuple[Slo, Setting]:
    from benchmarks.fidelity.models import write_model
    from libra.backends.launch.fork_server import WORKER_ENVIRONMENT

    os.environ.update(WORKER_ENVIRONMENT)
    for name in _SHAPES:
        write_model(directory / name, "tiny")
    slo = Slo(ttft=1.0, tpot=0.2)
    return slo, Setting(
        Engine(str(directory / "serving"), "float32", True, 64 << 20, 512, 16, 128, options.asynchronous),
        Engine(str(directory / "rollout"), "float32", True, 64 << 20, 512, 16, 128),
        str(directory / "device"),
        pace=slo.pace(_USE),
        longest=0.05,
        shortest=0.004,
        turns=8,
        prompt=(60, 200),
        output=(30, 60),
        turn_prompt=(10, 60),
        turn_output=(20, 100),
    )


def measured(setting: Setting, slo: Slo, rates: Sequence[float], seconds: float) -> list[Row]:
    """Rows of every way at every rate. Before them lending is learnt for as long as one of them takes."""
    from libra.lend.backend.lender_token import LenderToken

    phases = [Phase("gate", rates[0], seconds), *(Phase(mode, rate, seconds) for rate in rates for mode in _MODES)]
    engines = _Processes(setting)
    try:
        lender = LenderToken(Path(setting.device))
        lender.extend(float("inf"))
        said = [engines.run(phase) for phase in phases]
        lender.close()
    finally:
        engines.stop()
    rows, alone = list[Row](), said[1]
    for phase, outcome in zip(phases[1:], said[1:], strict=True):
        alone = outcome if phase.mode == "alone" else alone
        rows += _rows(phase, outcome, alone, slo)
    return rows


class _Processes:
    """Both engines, each in a process of its own."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = {}, {}
        # The serving engine makes the device's file, and compiles what the other then finds in a cache.
        for name, role in ROLES.items():
            self._pipes[name], theirs = context.Pipe()
            self._processes[name] = context.Process(target=role, args=(theirs, setting), daemon=True)
            self._processes[name].start()
            theirs.close()
            try:
                if not self._pipes[name].poll(_START):
                    raise EOFError
                self._pipes[name].recv_bytes()
            except EOFError:
                self.stop()
                raise SystemExit(f"the {name} engine did not start; what it printed says why") from None

    def run(self, phase: Phase) -> dict[str, dict[str, Any]]:
        begin = time.monotonic() + 0.1
        for pipe in self._pipes.values():
            pipe.send_bytes(json.dumps([*phase, begin]).encode())
        return {name: json.loads(pipe.recv_bytes()) for name, pipe in self._pipes.items()}

    def stop(self) -> None:
        for pipe in self._pipes.values():
            try:
                pipe.send_bytes(b"null")
            except OSError:
                continue
        for process in self._processes.values():
            process.join(20)
            process.kill()


def _rows(phase: Phase, said: dict[str, dict[str, Any]], alone: dict[str, dict[str, Any]], slo: Slo) -> list[Row]:
    case, serving, rollout = f"{phase.rate:g} requests/s, {phase.mode}", said["serving"], said["rollout"]
    found, first = _Latencies(serving, slo), _Latencies(alone["serving"], slo)
    blamed = sum(missed and not first.missed.get(arrival, True) for arrival, missed in found.missed.items())
    rows = [
        Row(case, "requests", len(serving["requests"]), ""),
        *(_tail(case, "TTFT", found.ttft, (50, 99))),
        *(_tail(case, "TPOT", found.tpot, (50, 99))),
        Row(case, "misses", sum(found.missed.values()), ""),
        (none if phase.mode == "gate" else Row)(case, "attributable misses", blamed, ""),
        *(_tail(case, "serving step without its wait", [step[0] for step in serving["steps"]], (50, 99, 99.9, 100))),
        *(_tail(case, "wait for the token", serving["waits"], (50, 99, 100))),
    ]
    after, between = ([it[0] for it in serving["steps"] if it[1] is lent and it[2]] for lent in (True, False))
    if len(after) >= 20 and len(between) >= 20:
        switch = float(np.median(after) - np.median(between))
        rows.append(Row(case, "a decode step after a grant takes longer by", 1e3 * switch, "ms"))
    if phase.mode != "alone":
        rows += [
            Row(case, "rollout", rollout["tokens"] / phase.seconds, "tokens/s"),
            *(_tail(case, "rollout step", rollout["steps"], (50, 99, 100))),
        ]
    if phase.mode in ("serve first", "gate"):
        rows += [
            Row(case, "lent", rollout["lent"] / phase.seconds, "of the time"),
            Row(case, "overstayed grants", rollout["overstayed"], ""),
        ]
    if rollout["bounded"]:
        rows.append(Row(case, "rollout steps over their bound", rollout["over"] / rollout["bounded"], "of them"))
    return rows


class _Latencies:
    def __init__(self, serving: dict[str, Any], slo: Slo) -> None:
        self.ttft, self.tpot, self.missed = list[float](), list[float](), dict[float, bool]()
        for arrival, output, times in serving["requests"]:
            # One that did not end in the time after its phase has missed.
            self.missed[arrival] = len(times) < output
            if not times:
                continue
            ttft, tpot = times[0] - arrival, (times[-1] - times[0]) / max(1, len(times) - 1)
            self.ttft.append(ttft)
            self.tpot.append(tpot)
            self.missed[arrival] |= ttft > slo.ttft or tpot > slo.tpot


def _tail(case: str, what: str, seconds: Sequence[float], ranks: Sequence[float]) -> list[Row]:
    if not seconds:
        return []
    names = {100: "largest"}
    return [
        Row(case, f"{what}, {names.get(int(rank), f'P{rank:g}')}", 1e3 * float(np.percentile(seconds, rank)), "ms")
        for rank in ranks
    ]


if __name__ == "__main__":
    sys.exit(main())
