"""The CUDA graph that runs an iteration, and its size: vLLM's `cudagraph_mode` and its dispatcher.

Invariant: the rules are those of `vllm.v1.cudagraph_dispatcher.CudagraphDispatcher` without LoRA.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

CudagraphMode = Literal["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "NONE"]
GraphKind = Literal["FULL", "PIECEWISE", "NONE"]  # one graph, one between every two attentions, none


def capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, *, most: int = 512, tokens_each: int = 1
) -> tuple[int, ...]:
    """The sizes for which vLLM captures CUDA graphs by default.

    The sizes are 1, 2, 4, multiples of 8 up to 248, multiples of 16 above, and `max_num_seqs`. No size exceeds twice
    `max_num_seqs`, or `most` (1,024 on Blackwell). With drafts, a decoding request has `tokens_each` tokens:
    `tokens_each` times these sizes are captured too, and all sizes are multiples of `tokens_each`.
    """
    largest = min(2 * max_num_seqs * tokens_each, most)
    counts = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)}
    sizes = counts | {max_num_batched_tokens}
    if tokens_each == 1:
        sizes.add(max_num_seqs)
    else:
        alike = {*(count for count in counts if count <= max_num_seqs), min(max_num_seqs, most)}
        sizes |= {tokens_each * count for count in alike}
    sizes = {size for size in sizes if size <= min(largest, max_num_batched_tokens)}
    rounded = {-(-size // tokens_each) * tokens_each for size in sizes}
    return tuple(sorted(size for size in rounded if size <= max(sizes)))


def padded(tokens: int, sizes: tuple[int, ...]) -> int:
    """The size of the CUDA graph that runs `tokens` tokens; `tokens` itself if no graph is that large."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else tokens


def graph_of(
    tokens: int, sizes: tuple[int, ...], max_num_seqs: int, mode: CudagraphMode, *, uniform: bool, tokens_each: int = 1
) -> tuple[GraphKind, int]:
    """The kind of graph and its size in tokens. In a `uniform` batch, all requests decode with the same number of
    tokens.
    """
    if mode == "NONE" or not sizes or tokens > sizes[-1]:
        return "NONE", tokens
    size = padded(tokens, sizes)
    if mode == "FULL" or (uniform and mode != "PIECEWISE" and size <= max_num_seqs * tokens_each):
        return "FULL", size
    return ("NONE", tokens) if mode == "FULL_DECODE_ONLY" else ("PIECEWISE", size)
