"""Which CUDA graph runs an iteration, and how large it is: vLLM's `cudagraph_mode` and its dispatcher.

Invariant: the rules are those of `vllm.v1.cudagraph_dispatcher.CudagraphDispatcher` without drafts and LoRA.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

CudagraphMode = Literal["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "NONE"]
GraphKind = Literal["FULL", "PIECEWISE", "NONE"]  # one graph, one between every two attentions, none


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, *, most: int = 512) -> tuple[int, ...]:
    """The sizes for which vLLM captures CUDA graphs unless told: 1, 2, 4, 8 to 248 by 8, then by 16, up to twice
    `max_num_seqs` and to `most` (1,024 on Blackwell), and `max_num_seqs` itself."""
    largest = min(2 * max_num_seqs, most, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)}
    if max_num_batched_tokens <= largest:
        sizes.add(max_num_batched_tokens)
    if max_num_seqs <= min(most, max_num_batched_tokens):
        sizes.add(max_num_seqs)
    return tuple(sorted(size for size in sizes if size <= largest))


def padded(tokens: int, sizes: tuple[int, ...]) -> int:
    """The size of the CUDA graph that runs so many tokens; without one that large they run as they are."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else tokens


def graph_of(
    tokens: int, sizes: tuple[int, ...], max_num_seqs: int, mode: CudagraphMode, *, uniform: bool
) -> tuple[GraphKind, int]:
    """The kind of graph and its size in tokens; `uniform` is a batch that only decodes."""
    if mode == "NONE" or not sizes or tokens > sizes[-1]:
        return "NONE", tokens
    size = padded(tokens, sizes)
    if mode == "FULL" or (uniform and mode != "PIECEWISE" and size <= max_num_seqs):
        return "FULL", size
    return ("NONE", tokens) if mode == "FULL_DECODE_ONLY" else ("PIECEWISE", size)
