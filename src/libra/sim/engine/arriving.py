"""Requests that hold blocks without running: their prompts' KV is pulled from another engine, or is kept for one that
pulls it.

Invariant: what holds blocks waits in front of all others, and is never preempted. An end of a transfer is seen at the
end of the iteration under way, as an arrival is. The rules are those of vLLM's NIXL connector in pull mode.
"""

from __future__ import annotations

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import Chunk
from libra.sim.engine.request import Path, Request
from libra.sim.engine.state import EngineState, Sent


def find(state: EngineState, path: Path, most: int) -> tuple[int, int]:
    """As `BlockPool.find`, but for a last block that has to be computed again for the drafter."""
    found, unheld = state.pool.find(path, most)
    if found and state.config.recomputes_block:
        found, unheld = state.pool.find(path, found - 1)
    return found, unheld


def pads(config: EngineConfig, tokens: int) -> bool:
    """Whether a request is padded with drafts that nobody proposed, of whose tokens only the last is computed: there is
    room for what follows them."""
    return tokens + config.tokens_each <= config.max_model_len


def start_pull(state: EngineState, request: Request) -> bool:
    """Take blocks for a whole prompt, and let its KV be pulled, but for what is here. False: it does not fit beside
    what a prompt that is computed still needs."""
    config, pool = state.config, state.pool
    found = unheld = 0
    if pool.caching:
        if state.writers:
            state.write_all(request.path)
        found, unheld = find(state, request.path, (request.prompt_tokens - 1) // config.block_size)
    needed = config.blocks(request.prompt_tokens)
    free = pool.free - _low(state) - _reserved(state)
    if needed - found + unheld > free:
        return False
    if found:
        pool.hold(request.path, found)
    pool.take(needed - found)
    request.pull = False
    request.written = found
    request.target = request.prompt_tokens
    request.reserves = True
    request.cached_tokens = found * config.block_size
    state.arriving[request] = "under way"
    if config.policy == "priority":
        state.arriving = dict(sorted(state.arriving.items(), key=lambda it: _rank(it[0])))
    state.pulls.append((request, needed - found))
    return True


def admit_arrived(
    state: EngineState, budget: int, chunks: list[Chunk], cached: list[tuple[int, int]], pads_from: int | None
) -> tuple[int, Request | None]:
    """Admit those whose KV has come, in order: the last token of the prompt is computed again, to sample from. Who has
    `pads_from` tokens before it or more is padded to as many tokens as others have, with drafts.

    Returns (budget left, the first that does not fit); of the latter kind is also one that has to be computed after
    all, which is for the caller to admit.
    """
    config, pool = state.config, state.pool
    for request in list(state.arriving):
        if budget <= 0 or len(state.running) >= config.max_num_seqs:
            break
        came = state.arriving[request]
        if came == "under way":
            continue
        if came == "failed":
            state.let_go_blocks(request, request.prompt_tokens, request.written * config.block_size)
            request.written = 0
            state.arriving[request] = came = "to compute"
        if came == "to compute":
            return budget, request
        tokens = request.prompt_tokens
        if pool.caching and (request.chain is not None or pool.knows(request)):
            pool.write_arrived(request, tokens // config.block_size)
        state.arriving[request] = "written"
        padding = 0
        if pads_from is not None and tokens > pads_from and pads(config, tokens):
            padding = config.tokens_each - 1
        needed = config.held_blocks(tokens + padding) - config.blocks(tokens)
        if padding >= budget or needed + _low(state) > pool.free:
            return budget, request
        pool.take(needed)
        del state.arriving[request]
        state.ready -= 1
        state.start_running(request, tokens - 1)
        request.padding = padding
        chunks.append((1 + padding, tokens - 1))
        cached.append((request.number, tokens - 1))
        budget -= 1 + padding + config.input_slots
        state.compute(request, 1)
    return budget, None


def see(state: EngineState, now: int) -> None:
    """At a boundary: transfers that ended, in their order."""
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
                state.arriving[request] = "come"
            elif state.config.kv_load_failure_policy == "recompute":
                state.arriving[request] = "failed"
            else:
                del state.arriving[request]
                _let_go(state, request)
                request.status, request.reason, request.finish = "failed", notice.failure, now
                if request not in state.leaving:
                    state.carry(-request.prompt_tokens)
                state.failed.append(request)
                continue
            state.ready += 1
    state.blocked = False


def give_up(state: EngineState, request: Request) -> None:
    """A request leaves that holds blocks: they stay as long as anything may be written to them."""
    came = state.arriving.pop(request)
    if came == "under way":
        state.orphans.append(request)
        state.blocked = state.blocked and state.config.speculative is None  # nothing is reserved for it any more
        return
    state.ready -= 1
    if came == "written":
        state.let_go_blocks(request, request.prompt_tokens, request.prompt_tokens)
    elif came != "to compute":
        _let_go(state, request)
    request.path = ()


def _let_go(state: EngineState, request: Request) -> None:
    state.let_go_blocks(request, request.prompt_tokens, request.written * state.config.block_size)
    request.path = ()


def _reserved(state: EngineState) -> int:
    """Blocks that a pull leaves free: for prompts that are computed or pulled, and for drafts."""
    config, partial = state.config, state.partial
    if config.speculative is None:
        return 0 if partial is None else config.blocks(partial.target) - config.blocks(partial.computed)
    drafts, reserved = config.tokens_each + config.lookahead, config.draft_blocks
    prefilled = [it for it in (*state.flight.finishing, partial) if it is not None and it.reserves]
    for request in (*prefilled, *state.arriving):
        tokens = request.prompt_tokens + request.generated
        if request in state.running:
            held = config.blocks(state.slots(request))
        else:
            held = 0 if state.arriving[request] == "to compute" else config.blocks(tokens)
        reserved += max(config.blocks(tokens + drafts) - held, 0)
    return reserved


def _low(state: EngineState) -> int:
    return state.config.watermark_blocks if state.config.watermark and state.running else 0


def _rank(request: Request) -> tuple[int, int, int]:
    return request.priority, request.arrival, request.number
