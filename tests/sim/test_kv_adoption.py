"""KV that comes from another engine: what is found afterwards, and what gives way to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driven_engine import Case, cases, drive
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_block_pool import WHICH, Client, PoolMachine

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Chain, Request

CONFIG = EngineConfig(max_model_len=32, kv_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
TEN = AffineCost(10)  # ticks for any iteration


class AdoptingMachine(PoolMachine):
    """The pool against the model that knows every block, as KV comes in as well."""

    @precondition(lambda self: self.chains)
    @rule(which=WHICH, blocks=st.integers(0, 8))
    def adopt_on_a_chain(self, which: int, blocks: int) -> None:
        chain = list(self.chains)[which % len(self.chains)]
        # Nobody sends more than there is of a context that goes on here.
        for client in self.waiting:
            if client.chain is chain and client.generates:
                blocks = min(blocks, client.tokens // self.size)
        adopted = self._adopt(Request(0, 0, 1, 1, chain=chain), blocks)
        self.chains[chain] = max(self.chains[chain], adopted * self.size)

    @precondition(lambda self: any(client.chain is None for client in self.waiting))
    @rule(which=WHICH, blocks=st.integers(0, 8))
    def adopt_for_one_that_waits(self, which: int, blocks: int) -> None:
        alone: list[Client] = [client for client in self.waiting if client.chain is None]
        client = alone[which % len(alone)]
        self._adopt(client.request, min(blocks, client.tokens // self.size))

    def _adopt(self, request: Request, blocks: int) -> int:
        path = self.pool.path(request)
        owners = {owner for owner, _, _ in path}
        for client in self.running:
            if client.chain in owners:
                self._write(client)
        keys = self._keys(request, blocks)
        here = self.model.find(keys)
        missing = keys[len(here) :]
        if missing and any(self._keys(client, len(here) + 1)[-1] == missing[0] for client in self.running):
            missing = []
        for block in here:
            self.model.hold(block)
        for key in missing[: len(self.model.free)]:
            here.append(self.model.take())
            self.model.write(here[-1], key)
        for block in reversed(here):
            self.model.let_go(block)
        assert self.pool.adopt(path, len(here) if not missing else blocks) == len(here)
        return len(here)


TestAdoption = AdoptingMachine.TestCase
TestAdoption.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


def assert_as_naive(case: Case) -> None:
    wanted = case.naive()
    for exact in (False, True):
        served = case.serve(exact=exact)
        requests = served.requests
        assert {it.number: (it.first_token, it.finish or 0) for it in requests} == wanted.times
        assert {it.number: it.status for it in requests} == wanted.statuses
        assert {it.number: it.generated for it in requests} == wanted.generated
        assert {it.number: it.preemptions for it in requests} == wanted.preemptions
        assert tuple(served.adopted) == wanted.adopted
        assert [
            (it.start, it.end, it.scheduled, it.preempted, it.cached, it.free_blocks) for it in served.iterations
        ] == [(it.start, it.end, it.scheduled, it.preempted, it.cached, it.free_blocks) for it in wanted.steps]
        assert sorted(served.interrupted) == [it.number for it in requests if it.status == "interrupted"]
        assert (served.engine.load_tokens, served.engine.pool.held) == (0, 0)


@settings(max_examples=250, deadline=None)
@given(cases(adopting=True, closing=True, asking=True))
def test_the_same_as_the_naive_engine(case: Case) -> None:
    """Which adopts in the middle of its iterations, block by block. `generated` is right wherever a request ends."""
    assert_as_naive(case)


def served(engine: SimEngine, *requests: Request) -> None:
    now = engine.end
    for request in requests:
        engine.submit(request, now)
    while (end := engine.plan(now)) is not None:
        now = end
        engine.commit()


def test_what_came_is_not_computed() -> None:
    engine = SimEngine(CONFIG, TEN)
    chain = Chain("a")
    assert engine.cached_tokens(chain, 0) == 0
    assert engine.adopt(chain, 15, 0) == 12  # full blocks
    assert engine.adopt(chain, 15, 0) == 0
    assert engine.adopt(chain, 16, 0) == 4
    assert engine.cached_tokens(chain, 0) == 16
    request = Request(0, 0, 16, 2, chain=chain)
    assert engine.cached_tokens(request, 0) == 12  # the last block is computed again, for the next token
    served(engine, request)
    assert request.cached_tokens == 12
    assert (engine.pool.held, engine.cached_tokens(chain, engine.end)) == (0, 16)


def test_a_request_that_shares_with_nobody_brings_its_own() -> None:
    for tokens, cached in ((16, 12), (12, 12), (11, 8)):
        engine = SimEngine(CONFIG, TEN)
        request = Request(0, 0, 16, 9)
        assert engine.adopt(request, tokens, 0) == tokens // 4 * 4
        served(engine, request)
        assert (request.cached_tokens, engine.pool.held) == (cached, 0)
    with pytest.raises(ValueError, match="request 0 has 16 tokens; adopt at most 16, not 17"):
        engine.adopt(Request(0, 0, 16, 9), 17, 0)
    with pytest.raises(ValueError, match="tokens is -1; give 0 or more"):
        engine.adopt(Chain("a"), -1, 0)


def test_a_prompt_that_others_share_comes_once() -> None:
    engine = SimEngine(CONFIG, TEN)
    prompt = Chain("prompt")
    samples = [Chain(f"sample {number}", prompt, 10) for number in range(2)]
    assert engine.adopt(samples[0], 16, 0) == 16
    assert [engine.cached_tokens(chain, 0) for chain in (prompt, *samples)] == [8, 16, 8]
    assert engine.adopt(samples[1], 16, 0) == 8
    assert engine.adopt(prompt, 12, 0) == 4  # the block with the fork in it is each one's own
    assert [engine.cached_tokens(chain, 0) for chain in (prompt, *samples)] == [12, 16, 16]


def test_the_least_recently_let_go_gives_way_and_a_prefix_stays_longest() -> None:
    """Eight blocks. What was there of a context counts as let go last too, for it must outlive what follows it."""
    engine = SimEngine(CONFIG, TEN)
    old, middle, new = Chain("old"), Chain("middle"), Chain("new")

    def found() -> list[int]:
        return [engine.cached_tokens(chain, 0) // 4 for chain in (old, middle, new)]

    engine.adopt(old, 12, 0)
    engine.adopt(middle, 16, 0)
    assert found() == [3, 4, 0]
    engine.adopt(new, 12, 0)  # one block was never used, and two of the oldest context are taken, from its end
    assert found() == [1, 4, 3]
    engine.adopt(old, 8, 0)
    assert found() == [2, 3, 3]
    engine.adopt(middle, 8, 0)  # all there
    engine.adopt(new, 32, 0)  # more than all: what is its own stays
    assert found() == [0, 0, 8]


def test_nothing_that_is_held_gives_way() -> None:
    engine = SimEngine(CONFIG, TEN)
    engine.submit(Request(0, 0, 16, 9), 0)
    engine.plan(0)
    chain = Chain("a")
    assert engine.adopt(chain, 32, 5) == 16  # four of eight blocks were free
    assert engine.pool.free == 4
    engine.commit()
    engine.plan(10)
    assert engine.cached_tokens(chain, 15) == 12  # the first new token has a block of them
    assert engine.adopt(chain, 32, 15) == 0


def test_what_is_being_computed_counts_as_being_here() -> None:
    engine = SimEngine(CONFIG, TEN)
    prompt = Chain("prompt")
    chain, other = Chain("a", prompt, 24), Chain("b", prompt, 24)
    request = Request(0, 0, 26, 4, chain=chain)
    engine.submit(request, 0)
    engine.plan(0)  # a chunk of 16
    assert engine.cached_tokens(prompt, 5) == 16
    assert [engine.adopt(it, 28, 5) for it in (prompt, chain, other)] == [0, 0, 0]
    engine.commit()
    engine.plan(10)
    assert engine.cached_tokens(prompt, 15) == 24
    assert engine.adopt(chain, 28, 15) == 0  # it is generated on
    assert engine.adopt(other, 28, 15) == 4
    assert engine.cached_tokens(other, 15) == 28
    engine.commit()
    while engine.plan(engine.end) is not None:
        engine.commit()
    assert (request.status, engine.pool.held) == ("finished", 0)


def test_a_jump_has_the_blocks_and_tokens_of_the_tick() -> None:
    """A block is full with every fourth token; it is found when the token that fills it has been computed."""
    seen = []
    for exact in (False, True):
        engine = SimEngine(CONFIG, TEN, exact=exact)
        chain = Chain("a")
        engine.submit(Request(0, 0, 8, 20, chain=chain), 0)
        end, found = 0, []
        for now in range(0, 205, 5):
            while engine.busy and engine.end <= now:
                engine.commit()
                end = engine.end
            found.append((now, engine.cached_tokens(chain, now), engine.pool.free))
            if not engine.busy:
                engine.plan(max(end, now))
        seen.append(found)
    assert [cached for _, cached, _ in seen[0]] == [cached for _, cached, _ in seen[1]]
    # A boundary is at every tenth tick: the prompt is computed by 10, and token 8 + n by 10 + 10 n.
    assert {now: cached for now, cached, _ in seen[0] if now in (0, 5, 10, 45, 50, 55, 90)} == {
        0: 0,
        5: 8,
        10: 8,
        45: 8,
        50: 12,
        55: 12,
        90: 16,
    }
    assert [free for now, _, free in seen[0] if now % 10] == [free for now, _, free in seen[1] if now % 10]


@pytest.mark.parametrize("exact", [False, True])
def test_one_that_waits_may_fit_now(exact: bool) -> None:
    """Its prompt is more than the budget leaves beside two others, until most of it has come."""
    config = replace(CONFIG, kv_blocks=32, max_num_batched_tokens=32, enable_chunked_prefill=False)
    engine = SimEngine(config, TEN, exact=exact)
    chain = Chain("a")
    waiting = Request(2, 10, 31, 1, chain=chain)
    drive(
        engine,
        [
            (0, lambda engine, now: engine.submit(Request(0, 0, 4, 25), now)),
            (10, lambda engine, now: engine.submit(Request(1, 10, 4, 25), now)),
            (10, lambda engine, now: engine.submit(waiting, now)),
            (94, lambda engine, now: engine.adopt(chain, 28, now)),
        ],
        lambda engine: None,
        lambda engine, now: None,
    )
    assert (waiting.scheduled, waiting.cached_tokens) == (100, 28)


@pytest.mark.parametrize("exact", [False, True])
def test_a_look_at_a_boundary_leaves_room_for_who_comes_then(exact: bool) -> None:
    """At tick 50 the third block is full; who follows it there is behind it, and who arrives is admitted at once."""
    engine = SimEngine(CONFIG, TEN, exact=exact)
    chain = Chain("a")
    fork, late = Chain("b", chain, 12), Request(1, 50, 4, 1)
    seen: list[object] = []
    drive(
        engine,
        [
            (0, lambda engine, now: engine.submit(Request(0, 0, 8, 20, chain=chain), now)),
            (50, lambda engine, now: seen.append(engine.adopt(fork, 16, now))),
            (50, lambda engine, now: seen.append(engine.cached_tokens(fork, now))),
            (50, lambda engine, now: engine.submit(late, now)),
        ],
        lambda engine: None,
        lambda engine, now: None,
    )
    assert seen == [4, 16]
    assert late.scheduled == 50


def test_without_a_prefix_cache_nothing_is_adopted() -> None:
    engine = SimEngine(replace(CONFIG, enable_prefix_caching=False), TEN)
    chain = Chain("a")
    assert (engine.adopt(chain, 16, 0), engine.cached_tokens(chain, 0), engine.pool.blank) == (0, 0, 8)


def test_copies_stay_in_order() -> None:
    """A block of which there is a second copy, in a context that is added to."""
    pool = BlockPool(6, 4, caching=True)
    chain = Chain("a")
    first, again = Request(0, 0, 8, 1, chain=chain), Request(1, 0, 8, 1, chain=chain)
    path = pool.path(chain)
    assert pool.adopt(path, 2) == 2
    for request in (first, again):
        pool.hold(path, 1)
        pool.take(1)
        request.path, request.written = path, 1
        pool.write(request, 2)
    assert pool.adopt(path, 9) == 4  # the first block is held, and so are two copies of the second
    pool.release(first, 2)
    pool.release(again, 2)
    assert pool.adopt(path, 9) == 6  # in place of the copies
    assert pool.find(path, 9) == (6, 6)
