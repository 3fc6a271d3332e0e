"""vLLM by itself, asked for the turns that an engine of a run is asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.gpu.orders import HALF, turn
from benchmarks.gpu.setting import Setting
from libra.backends.launch.fork_server import GPU_WORKER_ENVIRONMENT, WORKER_ENVIRONMENT
from libra.backends.machine import served_dtype


def plain_rate(setting: Setting, model: Path, kv_cache_bytes: int, turns: int) -> float:
    """Tokens a second with `turns` turns at once. The calling process cannot be used for anything else afterwards."""
    on_gpu = setting.gpu is not None
    os.environ |= {**(GPU_WORKER_ENVIRONMENT if on_gpu else WORKER_ENVIRONMENT), **setting.environment}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=setting.context,
        max_num_seqs=turns,
        dtype=served_dtype(setting.precision),
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=HALF,
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    sampling = SamplingParams(max_tokens=setting.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": turn("", 0, number).tokens} for number in range(turns)]
    engine.generate(prompts[:1], sampling, use_tqdm=False)  # what is set up at the first use
    began = time.monotonic()
    made = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    return sum(len(each.outputs[0].token_ids) for each in made) / seconds
