"""Seconds of the exchange around experts: tokens go to the ranks of their experts, and the outputs come back.

Invariant: no link exceeds its bandwidth, and the rank that receives most tokens determines the time. Dispatch and
combine move the same bytes in opposite directions. The names of the methods are vLLM's `all2all_backend`.
"""

from __future__ import annotations

from typing import Literal, get_args

from libra.cost.transfer import Fabric, Group, all_gather_seconds

AllToAll = Literal["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"]
ALL_TO_ALL: tuple[AllToAll, ...] = get_args(AllToAll)


def exchange_seconds(
    way: AllToAll, tokens: float, token_bytes: float, active: int, ranks: int, fabric: Fabric, fullest: float = 1.0
) -> float:
    """Seconds of dispatch and combine in one layer: each of `ranks` GPUs sends `tokens` tokens, each to `active`
    experts. The fullest rank receives `fullest` times the mean.

    - `allgather_reducescatter`: every GPU gets all tokens.
    - `deepep_low_latency`: a token goes directly to each GPU that has one of its experts.
    - `deepep_high_throughput`: a token goes once to each node with one of its experts, then over links inside the node.
    """
    if ranks == 1:
        return 0.0
    if way == "allgather_reducescatter":
        return 2 * float(all_gather_seconds(tokens * ranks * token_bytes, Group(ranks), fabric))
    inside = min(ranks, fabric.gpus)
    nodes = -(-ranks // inside)
    met = 1 - (1 - 1 / ranks) ** active  # chance that a GPU has an expert of a token
    if way == "deepep_low_latency":
        near, far = (inside - 1) * met, (ranks - inside) * met
    else:
        near, far = (ranks - 1) * met, (nodes - 1) * (1 - (1 - 1 / nodes) ** active)
    sent = fullest * tokens * token_bytes
    seconds = sent * near / fabric.link
    latency = fabric.link_latency
    if nodes > 1:
        seconds = max(seconds, sent * far * fabric.gpus / fabric.network)
        latency += fabric.network_latency
    return 2 * (seconds + latency)
