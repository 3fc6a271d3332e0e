"""Admission of waiting requests, in the order of the queue, while budget, `max_num_seqs` and blocks suffice. Also the
lookup of the cached part of a context, and the adoption of KV from other engines.

Invariant: the first request that does not fit ends admission; no request overtakes it. Incoming KV never evicts held
blocks.
"""

from __future__ import annotations

from libra.sim.engine.arriving import admit_arrived, find, pads, start_load, start_pull
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import Chunk
from libra.sim.engine.jump import settle
from libra.sim.engine.request import Chain, Request, owner_of
from libra.sim.engine.state import EngineState
from libra.sim.engine.tiers import Tiers


def admit(
    state: EngineState,
    budget: int,
    now: int,
    chunks: list[Chunk],
    cached: list[tuple[int, int]],
    generating: int,
) -> int:
    """Admit requests from the head of the queue, in addition to those that generate in the iteration. Appends their
    first chunks to `chunks`, and the tokens found in the prefix cache to `cached`. Returns the total tokens of their
    contexts."""
    config, waiting, running = state.config, state.waiting, state.running
    tiers, later, stuck = state.tiers, list[Request](), False
    contexts, slots = 0, config.input_slots
    # A request that computes one token after at least this many is padded, so that all requests have equal tokens.
    pads_from = None if chunks or config.speculative is None else 0 if generating else 1
    state.blocked = False
    state.wanted = 0
    if tiers is not None:
        tiers.begin()
    first: Request | None = None  # a request whose transfer has ended and which does not run yet; precedes the queue
    if state.ready:
        budget, contexts, first = admit_arrived(state, budget, now, chunks, cached, pads_from)
    while (waiting or first) and budget > 0 and len(running) < config.max_num_seqs:
        request = first or waiting.head
        if request.pull:
            if not start_pull(state, request):
                state.blocked = not chunks and not state.is_written(request)
                break
            waiting.pop_head()
            continue
        if tiers is not None and first is None:
            answer = start_load(state, request)
            if answer in ("no room", "never room"):
                state.blocked = answer == "never room" and not chunks and _stays(state, request)
                stuck = True
                break
            if answer != "nothing":
                waiting.pop_head()
                if answer == "later":
                    later.append(request)
                continue
        room = None
        if first is None or state.arriving[first] == "to compute":
            room = _room(state, request, budget, pads_from)
        if room is None:
            # The request will not fit while free blocks only decrease, with three exceptions: other prompts took
            # budget, another request writes its context, or only its first chunk counts. The chunk needs more blocks
            # with each block that is found.
            padded = pads_from is not None and _may_be_padded(state, request, budget)
            state.blocked = not chunks and not padded and _stays(state, request)
            stuck = first is None or state.arriving[first] == "written"
            break
        if first is None:
            waiting.pop_head()
        else:
            del state.arriving[request]
            state.ready -= 1
        budget -= _start(state, request, room, now, chunks, cached) + slots
        contexts += request.target
        if first is not None:
            budget, more, first = admit_arrived(state, budget, now, chunks, cached, pads_from)
            contexts += more
    if tiers is not None:
        all_asked = stuck or not (waiting or first)
        waiting.put_back(later)
        state.blocked = state.blocked and not later
        tiers.patient = all_asked and not (chunks or tiers.stirred or state.exact or _may_find_more(state, tiers))
    return contexts


def _start(
    state: EngineState,
    request: Request,
    room: tuple[int, int, int, int],
    now: int,
    chunks: list[Chunk],
    cached: list[tuple[int, int]],
) -> int:
    """Start a request that has `_room`. Returns its tokens of this iteration."""
    found, new, padding, blocks = room
    pool, tokens = state.pool, found * state.config.block_size
    pool.admit(request, found)
    pool.extend(request, tokens + new, blocks)
    if request.scheduled is None:
        request.scheduled = now
        request.cached_tokens = tokens
    state.start_running(request, tokens)
    if state.tiers is not None:
        state.tiers.touch(request, found)
    request.written = found
    request.padding = padding
    chunks.append((new + padding, tokens))
    cached.append((request.number, tokens))
    state.compute(request, new)
    return new + padding


def may_admit(state: EngineState) -> bool:
    """Whether the head of the queue fits an iteration of its own."""
    if len(state.running) >= state.config.max_num_seqs:
        return False
    if state.ready or (state.waiting and state.waiting.head.pull):
        return True
    if not state.waiting:
        return False
    return _room(state, state.waiting.head, state.config.step_budget, None) is not None


def refusal(request: Request, config: EngineConfig) -> str:
    """Reason why the engine can never run a request."""
    if request.prompt_tokens < 1:
        return f"prompt_tokens is {request.prompt_tokens}; a prompt has 1 token or more"
    if request.output_tokens < 1:
        return f"output_tokens is {request.output_tokens}; a request generates 1 token or more"
    return (
        f"a prompt of {request.prompt_tokens} tokens leaves no room to generate within max_model_len"
        f" {config.max_model_len}"
    )


def _stays(state: EngineState, request: Request) -> bool:
    """Whether a request that does not fit now will not fit before another request frees all its blocks. With tiers it
    may fit earlier, since the engine may find fewer blocks of its context, load more of them, or have more in
    transfer."""
    if not state.config.reserve_full_prompt or state.config.slides or state.is_written(request):
        return False
    tiers = state.tiers
    return tiers is None or (state.config.enable_chunked_prefill and not tiers.transfers.loading and not tiers.shared)


def _may_find_more(state: EngineState, tiers: Tiers) -> bool:
    """Whether the engine may find more of a waiting context later, although no request ends and no block is reused."""
    return any(state.is_written(request) for request, _ in tiers.watched)


def _may_be_padded(state: EngineState, request: Request, budget: int) -> bool:
    """Whether the budget, or the blocks for placeholder drafts, may be the reason why a request does not fit."""
    config, tokens = state.config, request.prompt_tokens + request.generated
    return budget < config.tokens_each or (state.pool.caching and (tokens - 1) % config.block_size == 0)


def _room(state: EngineState, request: Request, budget: int, pads_from: int | None) -> tuple[int, int, int, int] | None:
    """(blocks found, tokens to compute now, placeholder drafts, blocks to take for both) for a request that can be
    admitted; None if the request cannot be admitted."""
    config, pool = state.config, state.pool
    size = config.block_size
    tokens = request.prompt_tokens + request.generated
    found = unheld = 0
    # A request without a chain finds only KV that it computed before a preemption, or that was adopted for it.
    if pool.caching and (request.chain is not None or pool.knows(request)):
        if state.writers:
            state.write_all(request.path)
        found, unheld = find(state, request.path, (tokens - 1) // size)
    new = tokens - found * size
    padding = 0
    if new == 1 and pads_from is not None and tokens > pads_from and pads(config, tokens):
        if budget < config.tokens_each:
            return None
        padding = config.tokens_each - 1
    if new > budget:
        if not config.enable_chunked_prefill:
            return None
        new = budget
    new = pool.clip(request, found * size, new)
    if not new:
        return None
    needed = blocks = config.admission_blocks(found, found * size + new + padding)
    if config.reserve_full_prompt:
        needed = max(blocks, config.reserved_blocks(found, tokens))
    free = pool.free
    if config.watermark and state.running:
        free -= config.watermark_blocks
    if needed + unheld <= free:
        return found, new, padding, blocks
    if config.slides and config.reserve_full_prompt and unheld <= pool.blocks and not state.is_written(request):
        state.wanted = config.reserved_blocks(found, tokens) + pool.free - free
    return None


def take_in(state: EngineState, context: Chain | Request, tokens: int, now: int) -> int:
    """Adopt KV of a context's first `tokens` tokens from elsewhere. Returns the number of new blocks. Raises ValueError
    for a request that has ended or has fewer than `tokens` tokens."""
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}; give 0 or more")
    if isinstance(context, Request) and context.admission < 0:
        known = context.prompt_tokens + context.generated
        if tokens > known:
            raise ValueError(f"request {context.number} has {known} tokens; adopt at most {known}, not {tokens}")
        if context.status != "waiting":
            raise ValueError(f"request {context.number} is {context.status}: adopt for the next request of its chain")
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
            blocks = found  # a running request is about to compute the missing blocks itself
    return pool.adopt(path, blocks) - found


def cached_blocks(state: EngineState, context: Chain | Request, now: int) -> int:
    """Number of blocks from the beginning of a context that can be found. For a request, the number of blocks that it
    need not compute after admission."""
    pool = state.pool
    if not pool.caching:
        return 0
    path = pool.path(context)
    state.write_all(path, settle(state, now))
    most = pool.blocks
    if isinstance(context, Request):
        most = (context.prompt_tokens + context.generated - 1) // pool.block_size
        return find(state, path, most)[0]
    return pool.find(path, most)[0]
