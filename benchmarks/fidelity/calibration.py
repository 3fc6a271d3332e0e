"""Steps of a real engine on a grid: decodes by batch and context, prefills by chunk and prefix, and both at once.

Invariant: what is measured here depends on no workload. Prefixes come from the prefix cache, and no two sequences of a
batch share theirs: they would be read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks.fidelity.real_engine import RealEngine, undisturbed
from benchmarks.fidelity.step import Step
from benchmarks.fidelity.texts import Texts
from benchmarks.fidelity.workloads import BLOCK_TOKENS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request

PARTS = 4  # of a round, each with points from all over the grid
_TOKENS = 6  # that each sequence of a decode batch generates

Prefills = tuple[int, int, int]  # prompts in one iteration, new tokens of each, cached tokens before them


@dataclass(frozen=True, slots=True)
class Grid:
    """Points to measure. Cached tokens come in whole blocks."""

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    contexts: tuple[int, ...] = (0, 128, 512, 1024)  # cached tokens of each sequence, before one of its own
    chunks: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512)
    prefixes: tuple[int, ...] = (0, 256, 512, 1024)
    # Also odd lengths, as prompts have them: kernels are quickest at powers of two.
    several: tuple[Prefills, ...] = (
        *((2, 128, 0), (4, 32, 128), (4, 64, 0), (8, 16, 0), (8, 48, 256), (16, 30, 0)),
        *((1, 27, 0), (1, 50, 32), (1, 77, 0), (1, 93, 64), (1, 147, 0), (1, 189, 0), (1, 230, 64)),
        *((1, 301, 0), (1, 375, 0), (1, 430, 0), (3, 37, 0), (5, 61, 32)),
    )
    mixed: tuple[tuple[int, int, Prefills], ...] = (  # batch and context that decode meanwhile
        (2, 128, (1, 209, 0)),
        (3, 256, (1, 83, 0)),
        (6, 128, (1, 151, 64)),
        (4, 128, (1, 64, 0)),
        (4, 512, (1, 256, 0)),
        (8, 128, (1, 32, 512)),
        (8, 0, (2, 100, 0)),
        (16, 128, (1, 128, 256)),
        (16, 512, (1, 16, 0)),
        (24, 128, (4, 24, 128)),
        (28, 128, (1, 480, 0)),
    )

    def __post_init__(self) -> None:
        cached = [
            *self.contexts,
            *self.prefixes,
            *(prefix for _, _, prefix in self.several),
            *(tokens for _, context, (_, _, prefix) in self.mixed for tokens in (context, prefix)),
        ]
        if any(tokens % BLOCK_TOKENS for tokens in cached):
            raise ValueError(f"a grid has {cached} cached tokens; give multiples of {BLOCK_TOKENS}")

    def config(self) -> EngineConfig:
        """An engine that holds the largest point, and the cached contexts of all points, without cutting a chunk."""
        longest = max(*self.contexts, *self.prefixes)
        max_num_seqs = max(*self.batches, *(batch + prompts for batch, _, (prompts, _, _) in self.mixed))
        budget = max(
            *self.chunks,
            *(prompts * new for prompts, new, _ in self.several),
            *(batch + prompts * new for batch, _, (prompts, new, _) in self.mixed),
        )
        length = (longest + budget + _TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
        return EngineConfig(
            max_model_len=length,
            kv_blocks=3 * max_num_seqs * longest // BLOCK_TOKENS + 4 * length // BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
        )


class Calibration:
    """Rounds over all points of a grid on one engine, in parts."""

    def __init__(self, engine: RealEngine, grid: Grid, texts: Texts) -> None:
        """Fill the prefix cache with a context for each sequence, which also warms the engine up."""
        self._engine, self._grid, self._texts = engine, grid, texts
        self._number = 0
        longest = max(*grid.contexts, *grid.prefixes)
        self._cached = [Chain(f"cached-{index}") for index in range(grid.config().max_num_seqs)]
        for chain in self._cached:
            self._put(chain, longest, 1)
            self._finish()
        engine.steps.clear()
        self._points: list[Callable[[], None]] = [
            *(partial(self._prefill, (1, chunk, prefix)) for chunk in grid.chunks for prefix in grid.prefixes),
            *(partial(self._prefill, prefills) for prefills in grid.several),
            *(partial(self._decode, batch, context) for batch in grid.batches for context in grid.contexts),
            *(partial(self._mix, *point) for point in grid.mixed),
        ]

    def part(self, number: int) -> list[Step]:
        """Every `PARTS`-th point once, from the one of this number on. Parts 0 to `PARTS - 1` are one round."""
        with undisturbed():
            # Whatever else this process did since has driven the engine out of the processor's caches.
            self._decode(1, 0)
            before = len(self._engine.steps)
            for measure in self._points[number::PARTS]:
                measure()
        return self._engine.steps[before:]

    def _prefill(self, prefills: Prefills) -> None:
        self._put_prefills(prefills)
        self._finish()

    def _decode(self, batch: int, context: int) -> None:
        self._put_decodes(batch, context)
        self._finish()

    def _mix(self, batch: int, context: int, prefills: Prefills) -> None:
        self._put_decodes(batch, context)
        for index in range(_TOKENS - 2):
            if index % 2:
                self._put_prefills(prefills, first=batch)
            self._engine.step()
        self._finish()

    def _put_decodes(self, batch: int, context: int) -> None:
        for chain in self._forks(self._cached[:batch], context):
            self._put(chain, context + 1, _TOKENS)

    def _put_prefills(self, prefills: Prefills, first: int = 0) -> None:
        prompts, new, prefix = prefills
        for chain in self._forks(self._cached[first : first + prompts], prefix):
            self._put(chain, prefix + new, 1)

    def _forks(self, chains: Iterable[Chain], at: int) -> list[Chain]:
        return [Chain(f"{chain.name}-{self._number + index}", chain, at) for index, chain in enumerate(chains)]

    def _put(self, chain: Chain, prompt_tokens: int, output_tokens: int) -> None:
        request = Request(self._number, self._engine.clock, prompt_tokens, output_tokens, chain=chain)
        self._number += 1
        self._engine.put(request, self._texts.prompt(chain, prompt_tokens))

    def _finish(self) -> None:
        while self._engine.busy:
            self._engine.step()
