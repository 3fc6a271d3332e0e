"""Lower bounds on the seconds of requests on one engine, from floors and from least numbers of iterations.

Invariant: no schedule of the simulated engine does the work in less time. A request's price includes a share of the
fixed costs of its iterations. The engine's capacity (`max_num_seqs`, `max_num_batched_tokens`, KV) and TPOT bound the
number of iterations from below. TPOT does so because the mean time of an iteration, weighted by tokens, is at most
TPOT. The most expensive requests are left out, as many as may miss an objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from libra.cost.engine_memory import BLOCK
from libra.cost.grid import Array
from libra.serving.floor import Floor, Prices
from libra.serving.request_work import RequestWork, WorkDeadline
from libra.sim.engine.config import EngineConfig, RoleName


@dataclass
class PricedWork:
    """The prices of requests on one engine."""

    config: EngineConfig
    prices: Prices
    work: RequestWork

    @cached_property
    def prompt_seconds(self) -> Array:
        """[requests] seconds of each prompt alone, chunk by chunk, with each chunk in the cheapest possible iteration.
        The stages of a pipeline may compute different chunks at the same time."""
        work, most = self.work, self.config.max_num_batched_tokens
        seconds = np.zeros(len(work))
        for least, pair in self.prices.prompt:
            each = np.minimum.accumulate(least[1:] / np.arange(1, len(least)))
            longest = np.minimum(work.new, most).astype(int)
            seconds = np.maximum(seconds, work.new * each[longest - 1] + pair * work.pairs)
        seconds = seconds + self.prices.admission + self.prices.admitted_token * work.new
        stages = self.config.pipeline_parallel_size
        staged: Array = (seconds + (stages - 1) * self.first_seconds) / stages
        return staged

    @cached_property
    def first_seconds(self) -> float:
        """Least seconds of the iteration that makes the first token of a prompt with pulled KV."""
        return max((float(least[1]) for least, _ in self.prices.prompt), default=0.0)

    @cached_property
    def token_seconds(self) -> Array:
        """[requests] mean seconds per token after the first token."""
        work = self.work
        # A chunk that replaces a verification has at least one token.
        rows = 1 if self._preempts else self.config.tokens_each
        seconds = np.zeros(len(work))
        context = np.where(work.decoded > 0, work.own / np.maximum(1, work.iterations), 0.0)
        for least, slope, chunk in self.prices.alone:
            if slope and self._preempts:
                continue
            # Prompts that complete in the same iteration may have negative prices, from tables, but they add tokens.
            prompts = np.arange(1 + (len(least) - 1) // int(work.new.min())) if chunk else np.zeros(1, dtype=int)
            tokens = np.maximum(min(rows, len(least) - 1), prompts * int(work.new.min()))
            cheapest = (least[tokens] - chunk * prompts).min()
            seconds = np.maximum(seconds, max(0.0, float(cheapest)) + slope * context)
        each: Array = seconds * np.divide(work.iterations, np.maximum(1, work.decoded))
        return each

    @cached_property
    def _preempts(self) -> bool:
        """Whether blocks may run out while `max_num_seqs` requests run. With tiers, requests with a KV load in flight
        also have blocks."""
        ahead = self.config.lookahead + 2 * (self.config.tokens_each - 1)
        blocks = np.sort(-(-(self.work.longest + ahead) // BLOCK) + 1)
        holders = len(blocks) if self.config.kv_tiers else self.config.max_num_seqs
        return bool(blocks[-holders:].sum() > self.config.kv_blocks)

    def demands(self, role: RoleName, deadline: WorkDeadline) -> Iterator[tuple[Array, float, str]]:
        """Yield the demand that is largest over all floors and limits, unless it is 0. A demand is (seconds of each
        request, credit in seconds for all requests together, name of the limit on iterations)."""
        best: dict[str, tuple[float, Array, float]] = {}
        for floor in self.prices.floors:
            price, credit = self._priced(floor, "prefill" if deadline.of == "prompt" else role)
            for what, iterations in self._iterations(floor, role, deadline):
                total = price + floor.iteration * iterations
                left = float(np.sort(total)[: max(0, len(total) - deadline.misses)].sum()) - credit
                if what not in best or left > best[what][0]:
                    best[what] = left, total, credit
        dearest = max(best.items(), key=lambda it: it[1][0], default=None)
        if dearest is not None and dearest[1][0] > 0:
            yield dearest[1][1], dearest[1][2], dearest[0]

    def _priced(self, floor: Floor, role: RoleName) -> tuple[Array, float]:
        """(seconds of each request beyond the fixed cost of iterations, credit in seconds for all requests together).

        A preempted request gets its next token with the chunk that computes its context again. This chunk pays for the
        token, but not for the context. The number of preemptions is at most twice the number of blocks by which
        requests grow; the factor 2 covers prompts in progress. With drafts a request may grow by the same block again
        and again, so every iteration is priced as such a chunk.
        """
        work = self.work
        price = np.full(len(work), floor.output + self.prices.admission)
        credit = 0.0
        if role != "decode":
            price = price + floor.token * work.new + floor.pair * work.pairs - floor.chunk
            price = price + self.prices.admitted_token * work.new
        else:
            price = price - floor.chunk
        if role != "prefill":
            price = price + self._step(floor) * work.iterations
            if not (self._preempts and self.config.speculative):
                price = price + floor.context * work.own
                if self._preempts:
                    grown = float((-(-work.output // BLOCK) + 1).sum())
                    credit = 2 * grown * (floor.chunk + floor.context * float(work.longest.max()))
        return price, credit

    def _step(self, floor: Floor) -> float:
        """Seconds of a request in each iteration after its first token, without the part for its context."""
        replaced = self._preempts and self.config.speculative is not None
        return floor.output + floor.token + (-floor.chunk if replaced else floor.drafts)

    def _iterations(self, floor: Floor, role: RoleName, deadline: WorkDeadline) -> Iterator[tuple[str, Array]]:
        """Yield (name of a limit, [requests] least iterations that each request accounts for because of the limit)."""
        work, config = self.work, self.config
        seqs, most = config.max_num_seqs, config.max_num_batched_tokens
        prompts = role == "prefill" or deadline.of == "prompt"
        if prompts:
            yield "max_num_batched_tokens", work.new / most
            yield "max_num_seqs", np.full(len(work), 1 / seqs)
            return
        yield "max_num_seqs", (1 + work.iterations) / seqs
        yield "KV memory", work.own / (config.kv_blocks * config.block_size)
        if role == "colocated":
            yield "max_num_batched_tokens", (work.new + work.decoded) / most
            rows = config.tokens_each
            if rows > 1 and not self._preempts:  # even a full iteration is assumed to have room for all drafts
                yield "max_num_batched_tokens", (work.new + rows * work.iterations) / (most + seqs * (rows - 1))
        # Tokens after a preemption pay for no context, and prompts must not make an iteration cheaper.
        each = self._step(floor) + (0.0 if self._preempts else floor.context * work.contexts[0])
        if deadline.tpot < inf and each > 0 and floor.token * work.new.min() >= floor.chunk:
            # For an iteration of d requests, 1 >= (2 - d / together) * d / together for any `together`, with equality
            # at together = d. The time that TPOT allows determines the sum of d over all iterations.
            beyond = (deadline.tpot * work.decoded - floor.iteration * work.iterations) / each
            together = max(1.0, float(beyond.sum() / work.iterations.sum()))
            if together < seqs:
                yield "TPOT", np.minimum(work.iterations, (2 * work.iterations - beyond / together) / together)
