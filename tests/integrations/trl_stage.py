"""TRL on this machine without a GPU: a model of two layers that knows which character follows which, vLLM servers, and
what stands for a kernel of GPUs.

The model's hidden state is the last character, so what it says is a random walk: after `;` half of its turns begin a
call of the calculator, many of them malformed, and half an answer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig
from libra.environments.calculator import Calculator

FOLLOWS = {";": ">A", ">": "0123456789", "A": "0123456789", "=": "0123456789"}
_AFTER_DIGIT = "0123456789+-*;;;;;;"
TEMPLATE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}>{{ call.function.arguments.argument }};{% endfor %}"
    "{{ m.content }}{% if m.content and m.content[-1] != ';' %};{% endif %}{% endfor %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ";",
    "fields": {
        "tool_calls": {
            "open": ">",
            "close_pattern": ";",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"argument": "{content}"}},
            },
        },
        "content": {"close_pattern": ";", "content": "text"},
    },
}


def write_model(directory: Path) -> PreTrainedTokenizerFast:
    """The model with its tokenizer, which also parses its calls."""
    shape = ModelConfig(layers=2, hidden_size=64, heads=2, kv_heads=1, head_dim=32)
    write_tiny_model(directory, shape, Calculator().alphabet, 192)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=";", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.response_template = RESPONSE
    tokenizer.save_pretrained(directory)
    config = AutoConfig.from_pretrained(directory)
    config.eos_token_id = tokenizer.eos_token_id
    config.save_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = tokenizer.get_vocab()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1e-3)  # the last character decides, and all is trained
        model.get_input_embeddings().weight.copy_(torch.eye(len(ids), 64))
        head = torch.full((len(ids), 64), -1.5)
        for last in Calculator().alphabet:
            for following in FOLLOWS.get(last, _AFTER_DIGIT):
                head[ids[following], ids[last]] += 1.0
        model.get_output_embeddings().weight.copy_(head)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return tokenizer


class Attention:
    """FlashAttention's attention of sequences of several lengths, one after the other."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: Any = None, **__: Any
    ) -> Any:
        out, groups = [], q.shape[1] // k.shape[1]
        for a, b in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
            query, key, value = (each[a:b].transpose(0, 1) for each in (q, k, v))
            key, value = (each.repeat_interleave(groups, 0) for each in (key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=softmax_scale
            )
            out.append(attended)
        return torch.cat(out, 1).transpose(0, 1)


def train_on_cpu() -> None:
    """Have TRL's trainer do without a GPU: it asks for FlashAttention, and CUDA for the device's name."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


@contextmanager
def fleet(model: Path, folder: Path, engines: int, behind: int) -> Iterator[tuple[str, list[str]]]:
    """Addresses of a gateway, and of vLLM servers, the first `behind` of which are behind it."""
    with ExitStack() as stack:
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(engines)]
        for url in urls:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            command += ["--port", url.rpartition(":")[2], "--host", "127.0.0.1"]
            command += ["--max-model-len", "192", "--max-num-seqs", "32", "--dtype", "float32", "--enforce-eager"]
            own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            stack.enter_context(process(command, folder / f"engine-{url[-5:]}.log", own | {"OMP_NUM_THREADS": "1"}))
        for url in urls:
            await_health(url)
        gateway = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "libra.cli.app", "route", "--port", gateway.rpartition(":")[2]]
        command += ["--log", str(folder / "log.jsonl")]
        for url in urls[:behind]:
            command += ["--engine", url]
        stack.enter_context(process(command, folder / "gateway.log", {}))
        await_health(gateway)
        yield gateway, urls


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def process(command: list[str], log: Path, own: dict[str, str]) -> Iterator[None]:
    with log.open("w") as out:
        started = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | own, start_new_session=True, preexec_fn=_end_with_parent
        )
        try:
            yield
        finally:
            os.killpg(started.pid, signal.SIGTERM)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()


def await_health(url: str, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
