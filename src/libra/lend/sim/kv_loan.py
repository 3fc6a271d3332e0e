"""KV memory of one serving device, which the serving engine lends to the rollout engine and takes back.

Invariant: serving decides as if there were no loan. Serving takes the blocks of a step at once. Rollout returns the
memory at the end of its own step, at most a grant later.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.lend.quota import KVLimits, KVQuota, KVView, ceded
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine


@dataclass(frozen=True, slots=True)
class KVTerms:
    """Block sizes of both engines' KV, and the memory that no engine uses. Bytes."""

    serving: int  # of a block of the serving engine
    rollout: int  # of a block of the rollout engine
    beside: int = 0  # memory of the device that neither the serving engine nor the rollout engine's weights take
    quiet: float = 5.0  # seconds, as in `KVLimits`


class KVLoan:
    """Both ends of a loan of KV memory, like `CededKV` and `BorrowedKV` for two vLLM engines. `serving` is the serving
    engine. `rollout` is the configuration of the rollout engine, which has addresses for all its blocks and turns of up
    to `max_model_len` tokens. Raises ValueError like `KVLimits`."""

    def __init__(self, terms: KVTerms, serving: SimEngine, rollout: EngineConfig) -> None:
        config = serving.config
        self._terms, self._serving = terms, serving
        self._reserve = config.blocks(config.max_model_len) + config.max_num_seqs  # as in `CededKV`
        self._context = rollout.blocks(rollout.max_model_len)
        self.quota = KVQuota(
            KVLimits(
                config.kv_blocks * terms.serving,
                self._reserve * terms.serving,
                self._context * terms.rollout,
                rollout.kv_blocks * terms.rollout,
                terms.quiet,
                terms.beside,
            )
        )
        self.ceded = 0  # blocks that serving leaves to rollout
        self.own = 0  # blocks that rollout has
        self.both = 0  # most blocks of serving that rollout still had when serving took them back

    @property
    def useful(self) -> bool:
        """Whether rollout has memory for its longest turn."""
        return self.own >= self._context

    @property
    def held(self) -> int:
        """Bytes that rollout has."""
        return self.own * self._terms.rollout

    def served(self, free: int) -> None:
        """Record that a serving step leaves `free` blocks free, ceded or not. The step takes back ceded blocks that it
        uses."""
        if free < self.ceded:
            self.ceded = free
            self.both = max(self.both, self._held - free)

    def look(self, now: int) -> int:
        """Blocks that rollout has from now on. Called between two steps of serving."""
        self._cede()
        target = self.quota.observe(self._view(), now / TICKS)
        if self._asked > self.ceded:  # serving cedes the requested blocks at its next step
            self._cede()
            target = self.quota.observe(self._view(), now / TICKS)
        self.own = target // self._terms.rollout
        return self.own

    @property
    def _asked(self) -> int:
        return -(-self.quota.asked // self._terms.serving)

    @property
    def _held(self) -> int:
        """Number of serving's blocks whose memory rollout has."""
        return -(-max(0, self.own * self._terms.rollout - self._terms.beside) // self._terms.serving)

    def _cede(self) -> None:
        free = self._serving.pool.free - self.ceded
        wanted, reserve = self._wanted(), self._reserve
        self.ceded = ceded(self.ceded, asked=self._asked, held=self._held, free=free, wanted=wanted, reserve=reserve)

    def _view(self) -> KVView:
        size, pool = self._terms.serving, self._serving.pool
        need = min(pool.held + self._wanted(), pool.blocks)
        return KVView(pool.blocks * size, self._reserve * size, need * size, self.ceded * size)

    def _wanted(self) -> int:
        """Blocks that requests may take for their present tokens, in one step or more."""
        engine = self._serving
        blocks = engine.config.blocks
        wanted = engine.flight.generation.demand()
        wanted += sum(blocks(it.prompt_tokens + it.generated) for it in engine.waiting)
        return wanted + sum(blocks(it.target) - blocks(it.computed) for it in engine.partials)
