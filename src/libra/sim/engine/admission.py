"""Waiting requests become running ones: in the order of the queue, while budget, `max_num_seqs` and blocks last. And
what could be found of their contexts, KV that comes from elsewhere included.

Invariant: the first that does not fit ends admission; nothing overtakes it. Nothing that is held gives way to what
arrives.
"""

from __future__ import annotations

from libra.sim.engine.arriving import admit_arrived, start_pull
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import Chunk
from libra.sim.engine.jump import settle
from libra.sim.engine.request import Chain, Request, owner_of
from libra.sim.engine.state import EngineState


def admit(state: EngineState, budget: int, now: int, chunks: list[Chunk], cached: list[tuple[int, int]]) -> int:
    """Admit requests from the head of the queue; their first chunks go into `chunks`, and what the prefix cache had of
    them into `cached`. Returns the tokens of their contexts."""
    config, pool, waiting, running = state.config, state.pool, state.waiting, state.running
    size = config.block_size
    contexts = 0
    state.blocked = False
    first: Request | None = None  # that holds blocks no more, but its place in the queue
    if state.ready:
        budget, first = admit_arrived(state, budget, chunks, cached)
        contexts += sum(found + 1 for _, found in cached)
    while (waiting or first) and budget > 0 and len(running) < config.max_num_seqs:
        request = first or waiting.head
        if request.pull:
            if not start_pull(state, request):
                state.blocked = not chunks and not state.is_written(request)
                break
            waiting.pop_head()
            continue
        room = _room(state, request, budget) if first is None or state.arriving[first] == "to compute" else None
        if room is None:
            # It stays so while free blocks only become fewer: unless other prompts took from the budget, another
            # request writes its context, or its first chunk alone counts, which needs the more the more is found.
            state.blocked = not chunks and config.reserve_full_prompt and not state.is_written(request)
            break
        if first is None:
            waiting.pop_head()
        else:
            del state.arriving[request]
            state.ready -= 1
        found, new = room
        tokens = found * size
        if found:
            pool.hold(request.path, found)
        pool.take(-(-(tokens + new) // size) - found)
        if request.scheduled is None:
            request.scheduled = now
            request.cached_tokens = tokens
        state.start_running(request, tokens)
        request.written = found
        contexts += request.target
        chunks.append((new, tokens))
        cached.append((request.number, tokens))
        budget -= new
        state.compute(request, new)
        if first is not None:
            before = len(cached)
            budget, first = admit_arrived(state, budget, chunks, cached)
            contexts += sum(found + 1 for _, found in cached[before:])
    return contexts


def may_admit(state: EngineState) -> bool:
    """Whether the head of the queue fits an iteration of its own."""
    if not state.waiting or len(state.running) >= state.config.max_num_seqs:
        return False
    return _room(state, state.waiting.head, state.config.max_num_batched_tokens) is not None


def refusal(request: Request, config: EngineConfig) -> str:
    """Why the engine can never run a request."""
    if request.prompt_tokens < 1:
        return f"prompt_tokens is {request.prompt_tokens}; a prompt has 1 token or more"
    if request.output_tokens < 1:
        return f"output_tokens is {request.output_tokens}; a request generates 1 token or more"
    return (
        f"a prompt of {request.prompt_tokens} tokens leaves no room to generate within max_model_len"
        f" {config.max_model_len}"
    )


def _room(state: EngineState, request: Request, budget: int) -> tuple[int, int] | None:
    """(blocks found, tokens to compute now) of a request that can be admitted."""
    config, pool = state.config, state.pool
    size = config.block_size
    tokens = request.prompt_tokens + request.generated
    found = unheld = 0
    # A request without a chain finds only what it computed itself, before it was preempted, or what it brought.
    if pool.caching and (request.chain is not None or pool.knows(request)):
        if state.writers:
            state.write_all(request.path)
        found, unheld = pool.find(request.path, (tokens - 1) // size)
    new = tokens - found * size
    needed = -(-tokens // size)
    if new > budget:
        if not config.enable_chunked_prefill:
            return None
        new = budget
        if not config.reserve_full_prompt:
            needed = -(-(found * size + new) // size)
    free = pool.free
    if config.watermark and state.running:
        free -= config.watermark_blocks
    return None if needed - found + unheld > free else (found, new)


def take_in(state: EngineState, context: Chain | Request, tokens: int, now: int) -> int:
    """Take in the KV of a context's first `tokens` tokens. Returns how many blocks are new.

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


def cached_blocks(state: EngineState, context: Chain | Request, now: int) -> int:
    """Blocks from a context's beginning that could be found: of a request, those that it would not compute if
    admitted."""
    pool = state.pool
    if not pool.caching:
        return 0
    path = pool.path(context)
    state.write_all(path, settle(state, now))
    most = pool.blocks
    if isinstance(context, Request):
        most = (context.prompt_tokens + context.generated - 1) // pool.block_size
    return pool.find(path, most)[0]
