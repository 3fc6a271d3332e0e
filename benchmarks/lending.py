"""Two real vLLM engines on one device: what each way of sharing it gives rollouts and costs users.

Invariant: both engines are real and live throughout; every way serves the same requests, and a miss is attributable
where the same request meets the SLO alone.

    python -m benchmarks.lending [--cpu] [--rates 4,12] [--seconds 20] [--asynchronous] [--json FILE]

On a GPU the models have the shapes of Qwen3-8B and 4B, and random weights: less than six minutes on an H100 or H200.
With `--cpu` the device is one core, and the models are tiny.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.command import RefusedError, command_line, show
from benchmarks.evaluation.setting import shape_file
from benchmarks.lending_engines import Mode, Phase, Setting, run
from benchmarks.rows import Row, none, spread
from libra.lend.gate import Slo

_MODES: tuple[Mode, ...] = ("alone", "no gate", "serve first", "gate")
_USE = 0.8
_MODELS = {"serving": "Qwen/Qwen3-8B", "rollout": "Qwen/Qwen3-4B"}
# What the library's shapes do not say
_QWEN3 = {
    **{"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000},
    **{"torch_dtype": "bfloat16", "eos_token_id": 151645},
}

Said = dict[str, dict[str, Any]]


def rows(options: Namespace) -> Iterator[Row]:
    rates = options.rates
    if min(rates) <= 0 or options.seconds <= 0:
        raise RefusedError("--rates and --seconds are above 0")
    print(f"{_hardware(options.cpu)}; {datetime.now(UTC):%Y-%m-%d}")
    # Before those that count lending is learnt for as long as one of them takes.
    phases = [
        Phase("gate", rates[0], options.seconds),
        *(Phase(mode, rate, options.seconds) for rate in rates for mode in _MODES),
    ]
    with tempfile.TemporaryDirectory() as name:
        slo, setting = _setting(Path(name), options)
        said = run(setting, phases)[1:]
    alone = said[0]
    for phase, outcome in zip(phases[1:], said, strict=True):
        alone = outcome if phase.mode == "alone" else alone
        yield from _rows(phase, outcome, alone, slo)


def _hardware(cpu: bool) -> str:
    import torch

    if cpu:
        return f"one of {os.cpu_count()} cores, PyTorch {torch.__version__}"
    if not torch.cuda.is_available():
        raise RefusedError("PyTorch sees no GPU here; run it where there is one, or with --cpu")
    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def _comma_separated(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _setting(directory: Path, options: Namespace) -> tuple[Slo, Setting]:
    (_write_tiny if options.cpu else _write_shapes)(directory)
    settings = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    asked = settings["cpu" if options.cpu else "gpu"]
    slo = Slo(**asked.pop("slo"))
    for name in _MODELS:
        asked[name]["model"] = str(directory / name)
    asked["serving"]["async_scheduling"] = options.asynchronous
    core = max(os.sched_getaffinity(0)) if options.cpu else None
    return slo, Setting(device=str(directory / "device"), pace=slo.pace(_USE), core=core, **asked)


def _write_shapes(directory: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, model in _MODELS.items():
        (directory / name).mkdir()
        shape = json.loads(shape_file(model).read_text(encoding="utf-8"))
        (directory / name / "config.json").write_text(json.dumps({**shape, **_QWEN3}), encoding="utf-8")


def _write_tiny(directory: Path) -> None:
    from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
    from libra.backends.tiny_model import write_tiny_model
    from libra.config.run import ModelConfig

    os.environ.update(WORKER_ENVIRONMENT)
    for name in _MODELS:
        shape = ModelConfig(hidden_size=128, layers=3, heads=4, kv_heads=2, head_dim=32)
        write_tiny_model(directory / name, shape, "".join(map(chr, range(33, 127))), 512)


def _rows(phase: Phase, said: Said, alone: Said, slo: Slo) -> Iterator[Row]:
    case, serving, rollout = f"{phase.rate:g} requests/s, {phase.mode}", said["serving"], said["rollout"]
    missed, before = _missed(serving, slo), _missed(alone["serving"], slo)
    served = [(times[0] - arrival, times) for arrival, _, times in serving["requests"] if times]
    yield Row(case, "requests", len(serving["requests"]), "")
    yield from _tail(case, "TTFT", [ttft for ttft, _ in served], (0.5, 0.99))
    yield from _tail(case, "TPOT", [(it[-1] - it[0]) / max(1, len(it) - 1) for _, it in served], (0.5, 0.99))
    yield Row(case, "misses", sum(missed.values()), "")
    blamed = sum(missed[arrival] and not before.get(arrival, True) for arrival in missed)
    yield (none if phase.mode == "gate" else Row)(case, "attributable misses", blamed, "")
    yield from _tail(case, "serving step without its wait", [step[0] for step in serving["steps"]])
    yield from _tail(case, "wait for the token", serving["waits"])
    after, between = ([it[0] for it in serving["steps"] if it[1] is lent and it[2]] for lent in (True, False))
    if len(after) >= 20 and len(between) >= 20:
        switch = float(np.median(after) - np.median(between))
        yield Row(case, "a decode step after a grant takes longer by", 1e3 * switch, "ms")
    if phase.mode != "alone":
        yield Row(case, "rollout", rollout["tokens"] / phase.seconds, "tokens/s")
        yield from _tail(case, "rollout step", rollout["steps"])
    if phase.mode in ("serve first", "gate"):
        yield Row(case, "lent", rollout["lent"] / phase.seconds, "of the time")
        yield Row(case, "overstayed grants", rollout["overstayed"], "")
    if rollout["bounded"]:
        yield Row(case, "rollout steps over their bound", rollout["over"] / rollout["bounded"], "of them")


def _missed(serving: dict[str, Any], slo: Slo) -> dict[float, bool]:
    """By arrival. A request that did not end in the time after its phase has missed."""
    return {
        arrival: len(times) < output
        or times[0] - arrival > slo.ttft
        or (times[-1] - times[0]) / max(1, len(times) - 1) > slo.tpot
        for arrival, output, times in serving["requests"]
    }


def _tail(case: str, what: str, seconds: Sequence[float], shares: Sequence[float] = (0.5, 0.99, 1.0)) -> Iterator[Row]:
    return spread(case, what, [1e3 * it for it in seconds], "ms", shares)


if __name__ == "__main__":
    parser = command_line("lending", __doc__)
    parser.add_argument("--cpu", action="store_true", help="two tiny models on one of this machine's cores")
    parser.add_argument("--rates", type=_comma_separated, default="4,12", help="requests a second (default: 4,12)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way at each rate (default: 20)")
    parser.add_argument("--asynchronous", action="store_true", help="the serving engine's steps overlap")
    show(parser, rows)
