"""Measures the speed of one device with torch alone: matrix products, attention, and a training step.

Invariant: every reported rate was measured here, after a warm-up, as the median of repeated runs with their spread. The
FLOPs and bytes of a run are computed by formula, so rates of different devices are comparable.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, quantiles

import torch
from torch import nn

from libra.backends.machine import choose, probe, served_dtype
from libra.cost.sources.rates import Calibration, Measured

_HEAD = 64  # head width of the trained model


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amount of work of each measurement. It should exceed the caches, and take much longer than a launch."""

    products: tuple[tuple[int, int, int], ...]  # (tokens, inputs, outputs) of compute-bound linear layers
    weights: tuple[int, int]  # (inputs, outputs) of a linear layer over one token, which is memory-bound
    heads: int
    kv_heads: int
    head_dim: int
    batch: int  # sequences of the decode
    context: int  # tokens of each sequence of the decode, and of the prefill
    hidden: int  # width of the trained model, to which the next three fields belong, too
    intermediate: int
    layers: int
    vocab: int
    rows: int  # sequences of `length` tokens per training step
    length: int
    repeats: int  # at most; there are always three
    seconds: float  # of one measurement, after which no further repeat begins


_CALLS = 8  # calls in sequence per timed run
_SHORT_CALLS = 64  # the same for calls of microseconds

# Layers of a 14B model, 1 GiB of KV, and a training step of 1.2B parameters: seconds on a data-centre GPU, under 40 GB.
CUDA_SIZES = Sizes(
    products=((4096, 5120, 7168), (4096, 5120, 34816), (8192, 17408, 5120)),
    weights=(8192, 16384),
    heads=40,
    kv_heads=8,
    head_dim=128,
    batch=32,
    context=8192,
    hidden=2048,
    intermediate=8192,
    layers=16,
    vocab=32768,
    rows=2,
    length=4096,
    repeats=20,
    seconds=5.0,
)
CPU_SIZES = Sizes(
    products=((256, 1024, 1536), (256, 1024, 4096), (512, 4096, 1024)),
    weights=(4096, 4096),
    heads=8,
    kv_heads=2,
    head_dim=64,
    batch=16,
    context=1024,
    hidden=256,
    intermediate=1024,
    layers=4,
    vocab=2048,
    rows=2,
    length=256,
    repeats=10,
    seconds=1.0,
)


def calibrate_device(device: str | None = None, sizes: Sizes | None = None) -> Calibration:
    """Measure `device`, "cuda" or "cpu"; by default the current CUDA device, or without one the CPU.

    Raises `ValueError` for a device that torch does not find. Takes up to a minute on a GPU, 20 s on two CPU cores.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device is {kind}; give cpu, or cuda if torch finds a CUDA device")
    sizes = sizes or (CUDA_SIZES if kind == "cuda" else CPU_SIZES)
    dtype: torch.dtype = getattr(torch, served_dtype(choose("auto", [probe(kind)]).precision))
    bench = _Bench(torch.device(kind), dtype, sizes)
    training_flops, parameters = _training(bench)
    read = 2 * dtype.itemsize * sizes.batch * sizes.context * sizes.kv_heads * sizes.head_dim  # bytes read by a decode
    computed = 2 * sizes.heads * sizes.head_dim * sizes.context**2  # FLOPs: two products over half of all pairs
    return Calibration(
        device=torch.cuda.get_device_name(bench.device)
        if kind == "cuda"
        else platform.processor() or platform.machine(),
        torch=torch.__version__,
        date=datetime.now(UTC).date().isoformat(),
        dtype=str(dtype).removeprefix("torch."),
        linear_flops=_pooled([2 * m * k * n / t for m, k, n in sizes.products for t in bench.linear(m, k, n)]),
        bandwidth=_pooled([dtype.itemsize * math.prod(sizes.weights) / t for t in bench.linear(1, *sizes.weights)]),
        linear_launch=_pooled(bench.linear(1, sizes.head_dim, sizes.head_dim, _SHORT_CALLS)),
        attention_flops=_pooled([computed / t for t in bench.prefill(sizes.context, 1)]),
        attention_launch=_pooled(bench.prefill(16, _SHORT_CALLS)),
        cache_bandwidth=_pooled([read / t for t in bench.decode(sizes.batch, sizes.context, _CALLS)]),
        decode_launch=_pooled(bench.decode(1, 16, _SHORT_CALLS)),
        training_flops=training_flops,
        training_parameters=parameters,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes

    def linear(self, tokens: int, inputs: int, outputs: int, calls: int = _CALLS) -> list[float]:
        x, weight = self.random(tokens, inputs), self.random(outputs, inputs)
        with torch.inference_mode():
            return self.seconds(lambda: nn.functional.linear(x, weight), calls)

    def prefill(self, tokens: int, calls: int) -> list[float]:
        return self.attention(1, tokens, tokens, calls)

    def decode(self, batch: int, context: int, calls: int) -> list[float]:
        return self.attention(batch, 1, context, calls)

    def attention(self, batch: int, tokens: int, context: int, calls: int) -> list[float]:
        """Seconds of attention from the last `tokens` tokens of a context to all earlier ones; `tokens` is 1 or all."""
        q = self.random(batch, self.sizes.heads, tokens, self.sizes.head_dim)
        k, v = (self.random(batch, self.sizes.kv_heads, context, self.sizes.head_dim) for _ in range(2))
        attend = nn.functional.scaled_dot_product_attention
        with torch.inference_mode():
            return self.seconds(lambda: attend(q, k, v, is_causal=tokens > 1, enable_gqa=True), calls)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def seconds(self, call: Callable[[], object], calls: int) -> list[float]:
        """Mean seconds of `calls` calls in sequence, one value per repeat. On CUDA the calls are one graph, as in an
        engine's decode, so gaps between kernels are those of the device."""
        if self.device.type == "cuda":
            aside = torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                for _ in range(3):
                    call()
            torch.cuda.current_stream(self.device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
            return self.samples(graph.replay, calls)
        return self.samples(lambda: [call() for _ in range(calls)], calls)

    def samples(self, run: Callable[[], object], calls: int = 1) -> list[float]:
        """Seconds of `run` divided by `calls`, one value per repeat, after one warm-up run; three repeats or more."""

        def once() -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - began

        once()
        taken: list[float] = []
        while len(taken) < 3 or (len(taken) < self.sizes.repeats and sum(taken) < self.sizes.seconds):
            taken.append(once())
        return [seconds / calls for seconds in taken]


def _pooled(values: list[float]) -> Measured:
    tenths = quantiles(values, n=10, method="inclusive")
    middle = median(values)
    return Measured(middle, (tenths[-1] - tenths[0]) / middle)


def _training(bench: _Bench) -> tuple[Measured, int]:
    """FLOP/s of forward, backward and AdamW, and the number of the model's parameters.

    A step takes 6 FLOPs per token and matrix weight (Kaplan et al. 2020, section 2.1), and 6 * length * hidden per
    token and layer for causal attention. The embedding counts nothing, since it is a look-up, not a product.
    """
    sizes = bench.sizes
    model = _decoder(bench)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.device.type == "cuda")
    tokens = torch.randint(sizes.vocab, (sizes.rows, sizes.length + 1), device=bench.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = parameters - sizes.vocab * sizes.hidden - (2 * sizes.layers + 1) * sizes.hidden
    count = sizes.rows * sizes.length
    flops = 6 * count * (matrices + sizes.layers * sizes.length * sizes.hidden)
    return _pooled([flops / seconds for seconds in bench.samples(step)]), parameters


def _decoder(bench: _Bench) -> nn.Module:
    """A minimal decoder-only transformer with gated MLPs."""
    sizes = bench.sizes

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
            self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
            self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
            self.up = nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False)
            self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, -1, _HEAD)).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(-2))
            gate, value = self.up(self.between(x)).chunk(2, dim=-1)
            return x + self.down(nn.functional.silu(gate) * value)

    with torch.device(bench.device):
        model = nn.Sequential(
            nn.Embedding(sizes.vocab, sizes.hidden),
            *(Layer() for _ in range(sizes.layers)),
            nn.RMSNorm(sizes.hidden),
            nn.Linear(sizes.hidden, sizes.vocab, bias=False),
        )
    return model.to(bench.dtype)
