"""Duration of an iteration whose attention and experts run on different ranks, with micro-batches passed between them.

Invariant: the group's lines are `alike_makespan` of the layers with experts, for any own part of the slowest attention
rank. Attention ranks are a data-parallel group. FFN ranks serve all attention ranks and schedule nothing.

An FFN rank starts a micro-batch of a layer when it has received the micro-batch from all its attention ranks. Attention
ranks wait for each other at every layer, so the slowest attention rank is the stage. Micro-batches are assumed equal,
each with its share of a rank's tokens: vLLM divides a batch by tokens, prompts included. An empty micro-batch is padded
to one token per rank. Layers without experts, and the output head, run before and after; their attention takes as long
as in other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from libra.cost.afd import StageGrid
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST, HostCost
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec, MicroBatching, Together
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.value import Value

Bound = Literal["attention", "ffn", "link", "round trip", "host"]


@dataclass(frozen=True, slots=True)
class AttentionFFN(Value):
    """Ranks and their links. A link is a stage if it carries one micro-batch at a time, otherwise a delay."""

    attention: int  # ranks, a multiple of `ffn`
    ffn: int  # ranks of one GPU
    bandwidth: float  # bytes/s of each GPU's network, in each direction
    latency: float = 0.0  # seconds of each transfer, in addition to its bytes
    micro_batches: int = 2  # as in afd-plugin; MegaScale-Infer and Step-3 have 3 or 4
    serial_links: bool = True
    dbo_decode_token_threshold: int | None = None  # batches with fewer tokens are not divided; None: all are divided
    dbo_prefill_token_threshold: int | None = None

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}; give bytes/s of each GPU's network, above 0")
        if self.latency < 0:
            raise ValueError(f"latency is {self.latency}; give seconds, 0 or more")
        decode, prefill = self.dbo_decode_token_threshold, self.dbo_prefill_token_threshold
        if (decode is None) != (prefill is None):
            raise ValueError(
                "dbo_decode_token_threshold or dbo_prefill_token_threshold is given alone: give both (vLLM's are 32 and"
                " 512), or none"
            )
        _ = self.micro_batching

    @property
    def micro_batching(self) -> MicroBatching | None:
        """Conditions for dividing batches; None: batches are always divided."""
        decode, prefill = self.dbo_decode_token_threshold, self.dbo_prefill_token_threshold
        return None if decode is None or prefill is None else MicroBatching(self.micro_batches, decode, prefill)


class AfdCost:
    """`GroupCost` of attention ranks that share FFN ranks. A rank's own part is its attention of one micro-batch in one
    layer. Raises ValueError if the grid is too small, like `GridCost`."""

    def __init__(
        self, stages: StageGrid, config: EngineConfig, afd: AttentionFFN, host: HostCost = NO_HOST, tp: int = 1
    ) -> None:
        if config.speculative is not None:
            raise ValueError("speculative with attention and FFN apart is not simulated: leave one of them out")
        self._stages, self._config, self._afd, self.host = stages, config, afd, host
        try:
            self.grid = _of_micro_batch(stages, afd.micro_batches)  # of a rank's own part
        except ValueError as error:
            raise ValueError(f"there are no times for micro_batches {afd.micro_batches}: {error}; lower it") from None
        self._whole = self.grid if afd.micro_batching is None else _of_micro_batch(stages, 1)
        self._rate = min(afd.attention * tp, afd.ffn) * afd.bandwidth  # the side with fewer GPUs limits the rate
        self._ranks: dict[tuple[int, bool], GridCost] = {}
        self.own = self.rank(Graph("NONE"))
        self._together = lru_cache(1 << 14)(self._lines)

    def rank(self, graph: Graph) -> IterationCost:
        cost = self._ranks.get((graph.size, graph.whole))
        if cost is None:
            sizes, grid = (graph.size,) if graph.size else (), self._whole if graph.whole else self.grid
            cost = GridCost(grid, replace(self._config, capture_sizes=sizes), NO_HOST)
            self._ranks[graph.size, graph.whole] = cost
        return cost

    @property
    def micro_batching(self) -> MicroBatching | None:
        return self._afd.micro_batching

    @property
    def attention(self) -> int:
        """Number of attention ranks."""
        return self._afd.attention

    @property
    def least_token_seconds(self) -> float:
        """Least seconds of an iteration for which the FFN, or a link, is busy with each token of all ranks."""
        link = self._stages.token_bytes / self._rate if self._afd.serial_links else 0.0
        return self._stages.layers * max(self._stages.least_expert_seconds, link)

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        return self._together(graph, tokens, cpu)

    def stages(self, tokens: int, count: int) -> tuple[int, int]:
        """Ticks of FFN, and of a link, for one of `count` micro-batches of `tokens` tokens of all attention ranks."""
        afd = self._afd
        each = max(tokens / count, afd.attention)
        link = each * self._stages.token_bytes / self._rate + afd.latency
        return ticks(self._stages.experts_seconds(each)), ticks(link)

    def _lines(self, graph: Graph, tokens: int, cpu: float) -> Together:
        stages, host = self._stages, self.host
        count = 1 if graph.whole else self._afd.micro_batches
        ffn, link = self.stages(tokens, count)
        others, slower = ffn + 2 * link, self._afd.serial_links and link > ffn
        longest = link if slower else ffn
        of_rank = tokens / self._afd.attention
        outside = ticks(stages.outside_seconds(of_rank) + (0.0 if host.overlapped else cpu))
        dense, layers = stages.dense * count, stages.layers
        # `alike_makespan` is the longest of these lines, whether the longest stage or the round trip is the bottleneck.
        lines: list[tuple[Bound, int, int]] = [
            ("attention", layers * count, others),
            ("round trip", layers + count - 1, layers * others),
            ("link" if slower else "ffn", 1, others + (layers * count - 1) * longest),
            ("round trip", layers, layers * others + (count - 1) * longest),
        ]
        made = [(name, dense + factor, outside + more) for name, factor, more in lines]
        least = ticks(host.beside(host.launching(graph.kind), cpu))
        if least:
            made.append(("host", 0, least))
        return Together(tuple((factor, more) for _, factor, more in made), names=tuple(name for name, _, _ in made))


def attention_ranks(first: EngineSpec, cost: AfdCost) -> list[EngineSpec]:
    """The attention ranks of a group, which are engines like `first`. The group has the name of `first`."""
    group = GroupSpec(first.name, cost, micro_batching=cost.micro_batching)
    return [replace(first, name=f"{first.name}-{rank}", cost=cost.own, group=group) for rank in range(cost.attention)]


def _of_micro_batch(stages: StageGrid, count: int) -> EngineGrid:
    """Times of a rank's attention in one layer for one of `count` micro-batches, as a function of the rank's whole
    batch. A chunk is divided evenly, and each part also attends to half of the tokens in the other parts. A single
    request, or token, is in only one micro-batch."""
    grid = stages.attention
    if count == 1:
        return grid.slowed(1 / stages.layers)
    batches, chunks = sorted({1, *grid.batches}), sorted({1, *grid.chunks})
    more = (count - 1) / 2
    return replace(
        grid.slowed(1 / stages.layers),
        batches=(1, *(count * batch for batch in batches)),
        decode=tuple(
            tuple(grid.decode_seconds(batch, context) / stages.layers for context in grid.contexts)
            for batch in (1, *batches)
        ),
        chunks=(1, *(count * chunk for chunk in chunks)),
        prefill=tuple(
            tuple(grid.prefill_seconds(chunk, prefix + more * (chunk - 1)) / stages.layers for prefix in grid.prefixes)
            for chunk in (1, *chunks)
        ),
    )
