"""Choice of a batch's CUDA graph, compared with vLLM's own dispatcher, which needs no GPU for that.

Invariant: modes, `max_num_seqs`, budgets and batches are drawn from the seed of a case; sizes are those that Libra
expects vLLM to capture, and both sides get the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import cast, get_args

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from libra.cost.graphs import CudagraphMode, capture_sizes, graph_of


def differences(seeds: Iterable[int]) -> list[str]:
    """Messages on the cases in which the two differ."""
    return [found for found in map(_difference, seeds) if found is not None]


def _difference(seed: int) -> str | None:
    random = Random(seed)
    mode = random.choice(get_args(CudagraphMode))
    seats, budget = random.randint(1, 600), random.choice((512, 2048, 8192))
    each = 1 + random.choice((0, 0, 1, 2, 3, 5, 7))
    seats = min(seats, budget)
    sizes = capture_sizes(seats, budget, most=random.choice((512, 1024)), tokens_each=each)
    uniform = random.random() < 0.5
    tokens = each * random.randint(1, min(seats, budget // each)) if uniform else random.randint(1, budget)
    kind, graph = dispatcher(mode, seats, sizes, each).dispatch(tokens, uniform_decode=uniform)
    ours = graph_of(tokens, sizes, seats, mode, uniform=uniform, tokens_each=each)
    theirs = kind.name, graph.num_tokens
    if theirs == ours:
        return None
    return f"case {seed}: {mode}, {seats} seats of {each}, {tokens} tokens, {uniform=}: ours {ours}, vLLM's {theirs}"


def dispatcher(mode: CudagraphMode, seats: int, sizes: tuple[int, ...], each: int) -> CudagraphDispatcher:
    """vLLM's, of an engine whose requests have `each` tokens in an iteration that only decodes."""
    theirs = CUDAGraphMode[mode]
    config = SimpleNamespace(
        num_speculative_tokens=each - 1,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=seats),
        compilation_config=SimpleNamespace(
            cudagraph_mode=theirs,
            max_cudagraph_capture_size=sizes[-1],
            cudagraph_capture_sizes=list(sizes),
            compile_sizes=None,
            is_attention_compiled_piecewise=lambda: True,
        ),
    )
    made = CudagraphDispatcher(cast(VllmConfig, config))
    made.initialize_cudagraph_keys(theirs, each)
    return made
