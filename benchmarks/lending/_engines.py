"""Two small models and the engines of both, for benchmarks with real engines."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.lend.backend.terms import device_loan

os.environ.update(WORKER_ENVIRONMENT)  # read as vLLM is imported

from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.lending._vllm import ask as ask_engine
from benchmarks.lending._vllm import make_engine
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import Generate, StartEngine
from libra.backends.transport.shared_memory import WeightBuffer, create_buffer
from libra.backends.vllm.engine import VllmEngine
from libra.config.run import ModelConfig
from libra.lend.backend.scheduler import BorrowingScheduler, SynchronousLending
from libra.lend.records.lending import LendingTerms

LONGEST = 2048  # tokens of a context
CHUNK = 128  # tokens that a serving step computes
_ALPHABET = "".join(chr(code) for code in range(33, 127))
_SHAPES = {
    "serve": ModelConfig(hidden_size=256, layers=4, heads=4, kv_heads=2),
    "roll": ModelConfig(hidden_size=128, layers=3, heads=4, kv_heads=2),
}


def write_models(directory: Path) -> None:
    """`serve` and `roll`, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, shape in _SHAPES.items():
        write_tiny_model(directory / name, shape, _ALPHABET, LONGEST)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / name), dtype=torch.float32)
        model.save_pretrained(directory / name)


def serving_engine(directory: Path, scheduler: Any = SynchronousLending, **more: Any) -> LLMEngine:
    """A serving engine as a server has it. `scheduler` None is vLLM's own."""
    return make_engine(
        str(directory / "serve"),
        max_model_len=LONGEST,
        scheduler=scheduler,
        max_num_seqs=64,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        **more,
    )


def start_rollout(directory: Path, device: Path, terms: LendingTerms, record: Path | None = None) -> StartEngine:
    """The order for an engine that borrows."""
    return StartEngine(
        model_directory=str(directory / "roll"),
        max_model_len=LONGEST,
        max_num_seqs=64,
        dtype="float32",
        kv_cache_bytes=32 * LONGEST * kv_bytes_per_token(directory / "roll", "float32"),
        layout=(),
        buffer_bytes=64,
        seed=0,
        share=1.0,
        cores=tuple(sorted(os.sched_getaffinity(0)))[-1:],
        refresh_kv=False,
        loan=device_loan(str(device), terms, None if record is None else str(record)),
    )


def rollout_engine(start: StartEngine) -> VllmEngine:
    """A rollout engine in this process."""
    return VllmEngine(start, WeightBuffer(create_buffer(), start.buffer_bytes), BorrowingScheduler)


def prompt(tokens: int, salt: int) -> list[int]:
    """Arbitrary tokens. No two salts below 90 ** 5 share the first block of a prefix cache."""
    first = [salt // 90**place % 90 for place in range(5)]
    return [4 + digit for digit in (first + [(7 * index + index * index) % 90 for index in range(5, tokens)])[:tokens]]


def ask(engine: LLMEngine, name: str, prompt_tokens: int, output_tokens: int, salt: int) -> None:
    """A request of a user."""
    ask_engine(engine, name, prompt(prompt_tokens, salt), output_tokens)


def turn(number: int, prompt_tokens: int, output_tokens: int) -> Generate:
    """A turn of rollout."""
    return Generate(f"r{number}", prompt(prompt_tokens, 104_729 + number), output_tokens, 1.0, -1, 0)


class CpuDevice:
    """One core, on a clock of this process's CPU time: other processes of the machine do not count, and time without
    work is skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def clock(self) -> float:
        return time.process_time() + self._skipped

    def sleep(self, seconds: float) -> None:
        pass

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def skip(self, until: float) -> None:
        self._skipped += max(0.0, until - self.clock())
