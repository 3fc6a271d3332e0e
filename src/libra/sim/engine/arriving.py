"""KV that comes from elsewhere, and what could be found of it here.

Invariant: nothing that is held gives way to what arrives.
"""

from __future__ import annotations

from libra.sim.engine.blocks import owner_of
from libra.sim.engine.chain import Chain
from libra.sim.engine.jump import settle
from libra.sim.engine.request import Request
from libra.sim.engine.scheduler import Scheduler


def take_in(state: Scheduler, context: Chain | Request, tokens: int, now: int) -> int:
    """The KV of a context's first `tokens` tokens is here. Returns how many blocks are new.

    Raises ValueError for a request that has ended or has less than so many tokens.
    """
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}; give 0 or more")
    if isinstance(context, Request) and context.admission < 0:
        known = context.prompt_tokens + context.generated
        if tokens > known:
            raise ValueError(f"request {context.number} has {known} tokens; adopt so many at most, not {tokens}")
        if context.status != "waiting":
            raise ValueError(f"request {context.number} is {context.status}: adopt what its chain's next one needs")
    pool = state.pool
    if not pool.caching:
        return 0
    path = pool.path(context)
    state.write_all(path, settle(state, now))
    blocks = tokens // pool.block_size
    found, _ = pool.find(path, blocks)
    if found < blocks:
        missing = owner_of(path, found)
        if any(owner_of(request.path, found) is missing for request in state.running):
            blocks = found  # it is about to compute what is missing itself
    return pool.adopt(path, blocks) - found


def cached_blocks(state: Scheduler, context: Chain | Request, now: int) -> int:
    """From a context's beginning, that could be found: of a request, those that it would not compute if admitted."""
    pool = state.pool
    if not pool.caching:
        return 0
    path = pool.path(context)
    state.write_all(path, settle(state, now))
    most = pool.blocks
    if isinstance(context, Request):
        most = (context.prompt_tokens + context.generated - 1) // pool.block_size
    return pool.find(path, most)[0]
