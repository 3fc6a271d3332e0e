"""Requests that hold blocks without running. The KV of their contexts is pulled from another engine, loaded from a
tier, or kept for an engine that pulls it.

Invariant: a waiting request that holds blocks precedes all other waiting requests, and is never preempted. The engine
notices the end of a transfer at the end of the current iteration, like an arrival. The rules are those of vLLM's NIXL
connector in pull mode, and of its `OffloadingConnector`. Pushed KV includes the first token of its request.
"""

from __future__ import annotations

from typing import Literal

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import Chunk
from libra.sim.engine.messages import Sent
from libra.sim.engine.request import Path, Request
from libra.sim.engine.state import EngineState

Answer = Literal["nothing", "later", "no room", "never room", "begun"]  # of a lookup in the tiers


def find(state: EngineState, path: Path, most: int) -> tuple[int, int]:
    """As `BlockPool.find`, but without the last block if the engine has to compute it again for the drafter."""
    found, unheld = state.pool.find(path, most)
    if found and state.config.recomputes_block:
        found, unheld = state.pool.find(path, found - 1)
    return found, unheld


def pads(config: EngineConfig, tokens: int) -> bool:
    """Whether a request that computes only its last token is padded with placeholder drafts. This is so if
    `max_model_len` has room for the drafts and the token after them."""
    return tokens + config.tokens_each <= config.max_model_len


def start_pull(state: EngineState, request: Request) -> bool:
    """Take blocks for a whole prompt, and start the pull of its missing KV. Returns False if the prompt does not fit
    next to the blocks that other prompts still need."""
    config, pool = state.config, state.pool
    found = unheld = 0
    if pool.caching:
        if state.writers:
            state.write_all(request.path)
        found, unheld = find(state, request.path, (request.prompt_tokens - 1) // config.block_size)
    needed = config.blocks(request.prompt_tokens)
    free = pool.free - _low(state) - _reserved(state)
    if config.num_reserved_decode_tokens:
        holders = len(state.running) + len(state.arriving) + 1
        free -= config.blocks(holders * config.num_reserved_decode_tokens)
    if needed - found + unheld > free:
        return False
    if found:
        pool.hold(request.path, found)
    pool.take(needed - found)
    request.pull = False
    request.cached_tokens = found * config.block_size
    _arrives(state, request, found, request.prompt_tokens)
    state.pulls.append((request, needed - found))
    return True


def start_load(state: EngineState, request: Request) -> Answer:
    """Look up the continuation of a cached prefix in the tiers, and start to load it. The answer is "never room" if the
    whole context does not fit before blocks are released."""
    config, pool, tiers = state.config, state.pool, state.tiers
    assert tiers is not None
    tokens, size = request.prompt_tokens + request.generated, config.block_size
    if state.writers:
        state.write_all(request.path)
    found, unheld = find(state, request.path, (tokens - 1) // size)
    more = tiers.look(request, tokens, found * size)
    tiers.watched.append((request, found))
    if not more:
        return "later" if more is None else "nothing"
    there = found * size + more
    free = pool.free - _low(state)
    if config.reserve_full_prompt and config.blocks(tokens) - found + unheld > free:
        return "never room"
    if config.blocks(there) - found + unheld > free - _reserved(state):
        return "no room"
    if found:
        pool.hold(request.path, found)
    pool.take(config.blocks(there) - found)
    if request.scheduled is None:
        request.cached_tokens = there
    _arrives(state, request, found, there)
    tiers.load(request, found * size, more)
    return "begun"


def _arrives(state: EngineState, request: Request, found: int, tokens: int) -> None:
    """Record that KV of `tokens` tokens is in transfer, except for the `found` blocks."""
    request.written = found
    request.target = tokens
    request.reserves = True
    state.arriving[request] = "under way"
    if state.config.policy == "priority":
        state.arriving = dict(sorted(state.arriving.items(), key=lambda it: _rank(it[0])))


def admit_arrived(
    state: EngineState,
    budget: int,
    now: int,
    chunks: list[Chunk],
    cached: list[tuple[int, int]],
    pads_from: int | None,
) -> tuple[int, int, Request | None]:
    """Admit requests whose KV has arrived, in order. The last token of a complete context is computed again, since the
    next token is sampled from it. In contexts of more than `pads_from` tokens it is padded with placeholder drafts to
    the tokens of other requests. Returns (budget left, tokens of the admitted contexts, first request that does not fit
    or must be computed after all). The caller admits this request."""
    config, pool = state.config, state.pool
    contexts = 0
    for request in list(state.arriving):
        if budget <= 0 or len(state.running) >= config.max_num_seqs:
            break
        came = state.arriving[request]
        if came == "under way":
            continue
        if came == "failed":
            state.let_go_blocks(request, request.target, request.written * config.block_size)
            request.written = 0
            state.arriving[request] = came = "to compute"
        if came == "to compute":
            return budget, contexts, request
        tokens, there = request.prompt_tokens + request.generated, request.target
        _write(state, request)
        state.arriving[request] = "written"
        computed = min(there, tokens - 1)
        new, padding = tokens - computed, 0
        if new == 1 and pads_from is not None and tokens > pads_from and pads(config, tokens):
            padding = config.tokens_each - 1
        if new > budget and config.enable_chunked_prefill:
            new = budget
        held = config.blocks(there)
        needed = config.held_blocks(computed + new + padding) - held
        least = config.blocks(tokens) - held if config.reserve_full_prompt else 0
        if new + padding > budget or max(needed, least) + _low(state) > pool.free:
            return budget, contexts, request
        pool.take(needed)
        del state.arriving[request]
        state.ready -= 1
        if request.scheduled is None:
            request.scheduled = now
        state.start_running(request, computed)
        request.padding = padding
        contexts += tokens
        chunks.append((new + padding, computed))
        cached.append((request.number, computed))
        budget -= new + padding + config.input_slots
        state.compute(request, new)
        if state.tiers is not None:
            state.tiers.touch(request, held)
    return budget, contexts, None


def see(state: EngineState, now: int) -> None:
    """Handle the ended transfers, in order. Called at a boundary."""
    notices, state.notices = state.notices, []
    for notice in notices:
        request = notice.request
        if isinstance(notice, Sent):
            if request in state.sending:
                state.let_go_blocks(request, *state.sending.pop(request))
                request.path = ()
        elif request in state.orphans:
            state.orphans.remove(request)
            _let_go(state, request)
        elif request in state.arriving:
            if notice.failure is None:
                if notice.first_token and request not in state.leaving:
                    request.generated, request.first_token = 1, now
                if request.generated == request.output_tokens:
                    _end_arrived(state, request, now)
                    continue
                state.arriving[request] = "come"
            elif state.config.kv_load_failure_policy == "recompute" or request in state.leaving:
                state.arriving[request] = "failed"
            else:
                del state.arriving[request]
                _let_go(state, request)
                request.status, request.reason, request.finish = "failed", notice.failure, now
                state.carry(-request.prompt_tokens)
                state.ended.append(request)
                continue
            state.ready += 1
    state.blocked = False


def _end_arrived(state: EngineState, request: Request, now: int) -> None:
    """Finish a request whose only missing token came with its KV."""
    del state.arriving[request]
    _write(state, request)
    state.let_go_blocks(request, request.target, request.target)
    request.path = ()
    request.status, request.finish = "finished", now
    state.carry(-request.prompt_tokens)
    state.ended.append(request)


def _write(state: EngineState, request: Request) -> None:
    """Let other requests find the arrived KV."""
    pool = state.pool
    if pool.caching and (request.chain is not None or state.tiers is not None or pool.knows(request)):
        pool.write_arrived(request, request.target // state.config.block_size)


def give_up(state: EngineState, request: Request) -> None:
    """Remove a request that holds blocks. The blocks stay held while a transfer may still write to them."""
    came = state.arriving.pop(request)
    if came == "under way":
        state.orphans.append(request)
        if state.config.speculative is not None or state.config.num_reserved_decode_tokens:
            state.blocked = False  # the blocks that were reserved for this request are available
        return
    state.ready -= 1
    if came == "written":
        state.let_go_blocks(request, request.target, request.target)
    elif came != "to compute":
        _let_go(state, request)
    request.path = ()


def _let_go(state: EngineState, request: Request) -> None:
    state.let_go_blocks(request, request.target, request.written * state.config.block_size)
    request.path = ()


def _reserved(state: EngineState) -> int:
    """Blocks that a pull leaves free: for prompts that are computed or pulled, and for drafts."""
    config = state.config
    if config.speculative is None:
        reserved = sum(config.blocks(it.target) - config.blocks(it.computed) for it in state.partials)
        if state.tiers is not None:  # a pull has blocks for the whole prompt
            for it in state.arriving:
                reserved += config.blocks(it.prompt_tokens + it.generated) - config.blocks(it.target)
        return reserved
    drafts, reserved = config.tokens_each + config.lookahead, config.draft_blocks
    prefilled = [it for it in (*state.flight.finishing, *state.partials) if it.reserves]
    for request in (*prefilled, *state.arriving):
        tokens = request.prompt_tokens + request.generated
        if request in state.running:
            held = config.blocks(state.slots(request))
        else:
            held = 0 if state.arriving[request] == "to compute" else config.blocks(request.target)
        reserved += max(config.blocks(tokens + drafts) - held, 0)
    return reserved


def _low(state: EngineState) -> int:
    return state.config.watermark_blocks if state.config.watermark and state.running else 0


def _rank(request: Request) -> tuple[int, int, int]:
    return request.priority, request.arrival, request.number
