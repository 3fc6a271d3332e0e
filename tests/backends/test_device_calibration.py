"""A calibration of this machine's CPU at sizes that take a moment, and the work that its rates are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `exec` is not installed")

import libra.backends.calibration  # noqa: E402
from libra.backends.calibration import Sizes, calibrate_device  # noqa: E402
from libra.backends.machine import probe  # noqa: E402
from libra.cost.sources.rates import Measured  # noqa: E402
from libra.cost.sources.roofline import roofline  # noqa: E402
from libra.hardware.cluster import GPUS  # noqa: E402
from libra.hardware.decoder import decoder  # noqa: E402

TINY = Sizes(
    products=((16, 64, 64), (32, 64, 32)),
    weights=(64, 128),
    heads=4,
    kv_heads=2,
    head_dim=16,
    batch=2,
    context=32,
    hidden=64,
    intermediate=96,
    layers=2,
    vocab=50,
    rows=2,
    length=8,
    repeats=4,
    seconds=0.5,
)


@pytest.mark.alone
def test_a_device_is_measured_in_full() -> None:
    calibration = calibrate_device("cpu", TINY)
    measured = [getattr(calibration, field.name) for field in fields(calibration)]
    assert sum(isinstance(value, Measured) for value in measured) == 8  # each of which refuses what is not positive
    assert calibration.torch == torch.__version__
    assert calibration.dtype in (["bfloat16"] if probe("cpu").instructions else ["bfloat16", "float32"])
    assert date.fromisoformat(calibration.date).year >= 2026
    # Two layers of 2 norms, QKV and output, gated MLP; both embeddings and the last norm.
    assert calibration.training_parameters == 2 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 96) + 2 * 50 * 64 + 64
    model = decoder("small", 2, 64, 4, 2, 16, 96, 50, False, 4096)
    profile = roofline(GPUS["A100"], model, [1], calibration=calibration)
    assert profile.source.startswith(f"calibration: {calibration.device}")


def test_rates_are_work_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every run takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr(libra.backends.calibration, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    calibration = calibrate_device("cpu", TINY)
    assert calibration.attention_flops == Measured(2 * 4 * 16 * 32 * 32, 0.0)
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 96) + 50 * 64  # a training step has 16 tokens
    assert calibration.training_flops == Measured(6 * 16 * (matrices + 2 * 8 * 64), 0.0)
    # These are calls of which as many are a run.
    size = getattr(torch, calibration.dtype).itemsize
    calls = calibration.bandwidth.median / (size * 64 * 128)
    assert calibration.linear_flops.median == pytest.approx(calls * 2 * 16 * 64 * 64)
    assert calibration.cache_bandwidth.median == pytest.approx(calls * size * 2 * 2 * 32 * 2 * 16)


class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Put on the CPU all that a calibration puts on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given and torch.device(given["device"] or "cpu").type == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


class Graph:
    """Stands in for a captured graph, and counts."""

    captured = replayed = 0

    def replay(self) -> None:
        Graph.replayed += 1


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    Graph.captured += 1
    yield


def test_the_calls_of_a_gpu_are_those_of_a_cpu_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every run takes a second, with CUDA left out: rates are made of the same work."""
    ticks, waited = itertools.count(), list[torch.device]()
    monkeypatch.setattr(libra.backends.calibration, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    on_cpu = calibrate_device("cpu", TINY)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_name": lambda device: f"made {device}",
        "synchronize": waited.append,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with OnCpu():
        found = calibrate_device("cuda", TINY)
    assert (found.device, found.dtype) == ("made cuda", "bfloat16")
    assert Graph.captured == len(TINY.products) + 6 and Graph.replayed > 3 * Graph.captured
    assert len(waited) > 2 * Graph.replayed  # before and after each run, those of training too
    for rate in ("linear_flops", "attention_flops", "linear_launch", "attention_launch", "decode_launch"):
        assert getattr(found, rate) == getattr(on_cpu, rate)
    assert (found.training_flops, found.training_parameters) == (on_cpu.training_flops, on_cpu.training_parameters)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:0"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device is {name}"):
        calibrate_device(name, TINY)


def test_cuda_is_refused_where_torch_finds_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="device is cuda; give cpu"):
        calibrate_device("cuda", TINY)
