"""The pool of KV blocks, which knows runs of blocks, against a model that knows every block.

The model is told what each block holds, block by block, and keeps the free ones in a line. Requests come to the pool as
an engine's do: what runs on a chain is written before anyone looks for it, one request at a time computes a prompt in
part, and one at a time generates on a chain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.request import Chain, Request

EVERYTHING = 10**6  # blocks
MOST_CHAINS = 6
WHICH = st.integers(0, 99)  # of what there is, counted around
MORE = st.sampled_from([0, 0, 1, 2, 3])  # tokens after whole blocks
Key = tuple[object, int]  # whose token is a block's last one, and how many blocks precede it


@dataclass(eq=False)
class Block:
    holders: int = 0
    key: Key | None = None


class Model:
    """All blocks: `free` in the order in which they are given away, `known` by what is in them, oldest copy first."""

    def __init__(self, blocks: int) -> None:
        self.free = deque(Block() for _ in range(blocks))
        self.known: dict[Key, list[Block]] = {}

    def find(self, keys: list[Key]) -> list[Block]:
        found = []
        for key in keys:
            if key not in self.known:
                break
            found.append(self.known[key][0])
        return found

    def hold(self, block: Block) -> None:
        if not block.holders:
            self.free.remove(block)
        block.holders += 1

    def take(self) -> Block:
        block = self.free.popleft()
        if block.key is not None:
            copies = self.known[block.key]
            copies.remove(block)
            if not copies:
                del self.known[block.key]
        block.key, block.holders = None, 1
        return block

    def write(self, block: Block, key: Key) -> None:
        block.key = key
        self.known.setdefault(key, []).append(block)

    def let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        if block.key is None:
            self.free.appendleft(block)
        else:
            self.free.append(block)

    def clear(self) -> None:
        for block in self.free:
            block.key = None
        self.known.clear()


@dataclass(eq=False)
class Client:
    """A request as its engine sees it."""

    request: Request
    generates: bool
    tokens: int  # to be computed, or computed
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)

    @property
    def chain(self) -> Chain | None:
        return self.request.chain


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(3, 14), size=st.sampled_from([1, 2, 4]))
    def start(self, blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size, caching=True)
        self.model = Model(blocks)
        self.chains: dict[Chain, int] = {}  # tokens of the longest context on each
        self.running: list[Client] = []
        self.waiting: list[Client] = []
        self.partial: Client | None = None
        self.number = 0

    # Requests, which are admitted at once if that is possible

    @rule(blocks=st.integers(0, 5), more=MORE)
    def ask_alone(self, blocks: int, more: int) -> None:
        self._ask(None, blocks * self.size + more, generates=True)

    @precondition(lambda self: len(self.chains) < MOST_CHAINS)
    @rule(blocks=st.integers(0, 5), more=MORE)
    def ask_on_a_new_chain(self, blocks: int, more: int) -> None:
        self._ask(self._chain(), blocks * self.size + more, generates=True)

    @precondition(lambda self: 0 < len(self.chains) < MOST_CHAINS)
    @rule(which=WHICH, place=st.just(1.0) | st.floats(0, 1), blocks=st.integers(0, 2), more=MORE)
    def ask_on_a_fork(self, which: int, place: float, blocks: int, more: int) -> None:
        """Inside what the chain holds so far: it may be generated on meanwhile."""
        parent = list(self.chains)[which % len(self.chains)]
        fork = round(place * self.chains[parent])
        while parent.parent is not None and fork < parent.fork:
            parent = parent.parent
        self._ask(self._chain(parent, fork), fork + blocks * self.size + more, generates=True)

    @precondition(lambda self: self.chains)
    @rule(which=WHICH, fewer=st.sampled_from([0, 0, 0, 1, 2]), copies=st.integers(1, 3))
    def ask_for_one_token(self, which: int, fewer: int, copies: int) -> None:
        """A prompt of whole blocks that may be all there already: each computes the last one again."""
        chain = list(self.chains)[which % len(self.chains)]
        if not any(client.chain is chain and client.generates for client in [*self.running, *self.waiting]):
            for _ in range(copies):
                tokens = (self.chains[chain] // self.size - fewer) * self.size
                self._ask(chain, max(tokens, chain.fork), generates=False)

    @precondition(lambda self: self.chains)
    @rule(which=WHICH, blocks=st.integers(0, 2), more=MORE)
    def ask_for_the_next_turn(self, which: int, blocks: int, more: int) -> None:
        chain = list(self.chains)[which % len(self.chains)]
        if not any(client.chain is chain for client in [*self.running, *self.waiting]):
            self._ask(chain, self.chains[chain] + blocks * self.size + more, generates=True)

    # What an engine does with them

    @precondition(lambda self: self.waiting and self.partial is None)
    @rule(which=WHICH, part=st.none() | st.integers(1, 12))
    def admit(self, which: int, part: int | None) -> None:
        self._admit(self.waiting[which % len(self.waiting)], part)

    def _admit(self, client: Client, part: int | None = None) -> None:
        request = client.request
        request.path = self.pool.path(request)
        owners = {owner for owner, _, _ in request.path}
        for other in self.running:
            if other.chain in owners:
                self._write(other)
        most = (client.tokens - 1) // self.size
        found, unheld = self.pool.find(request.path, most)
        blocks = self.model.find(self._keys(client, most))
        assert (found, unheld) == (len(blocks), sum(not block.holders for block in blocks))
        begin = found * self.size
        new = client.tokens - begin if part is None else min(part, client.tokens - begin)
        needed = self._blocks(begin + new) - found
        if needed + unheld > self.pool.free:
            return
        self.waiting.remove(client)
        self.running.append(client)
        self.pool.hold(request.path, found)
        for block in blocks:
            self.model.hold(block)
        client.blocks, client.computed, request.written = blocks, begin, found
        self._compute(client, new)
        if client.chain is not None or self.pool.knows(request):
            self._write(client)
        self.partial = None if client.computed == client.tokens else client

    @precondition(lambda self: self.partial is not None)
    @rule(part=st.none() | st.integers(1, 12))
    def go_on_with_the_prompt(self, part: int | None) -> None:
        client = self.partial
        assert client is not None
        left = client.tokens - client.computed
        new = left if part is None else min(part, left)
        if self._fits(client, new):
            self._compute(client, new)
            if client.chain is not None or self.pool.knows(client.request):
                self._write(client)
            self.partial = None if client.computed == client.tokens else client

    @precondition(lambda self: self.running)
    @rule(which=WHICH, tokens=st.integers(1, 12))
    def generate(self, which: int, tokens: int) -> None:
        client = self.running[which % len(self.running)]
        if client.generates and client is not self.partial and self._fits(client, tokens):
            client.tokens += tokens
            self._compute(client, tokens)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def look_at(self, which: int) -> None:
        client = self.running[which % len(self.running)]
        if client.chain is not None:
            self._write(client)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, sampled=st.booleans(), fill=st.booleans(), back=st.booleans())
    def preempt(self, which: int, sampled: bool, fill: bool, back: bool) -> None:
        """It comes back with its latest token, which is not computed yet; or, taken out of an iteration that had
        blocks for that one, with no more than it seems to have computed: maybe whole blocks, at once."""
        client = self.running[which % len(self.running)]
        missing = -client.tokens % self.size
        if fill and missing and client.generates and client is not self.partial and self._fits(client, missing):
            client.tokens += missing
            self._compute(client, missing)
        self._write(client)
        self._let_go(client)
        # What nobody shares loses its last block to whoever it makes room for: it never finds all of itself again.
        sampled = sampled or client.chain is None
        if client.computed == client.tokens and sampled and client.generates:
            client.tokens += 1
        self.waiting.insert(0, client)
        if back and self.partial is None:
            self._admit(client)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        client = self.running[which % len(self.running)]
        if client is not self.partial:
            if client.chain is not None or client.request.written:
                self._write(client)
            self._let_go(client)

    @precondition(lambda self: not self.running)
    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.model.clear()

    # What always holds

    @invariant()
    def counts_agree(self) -> None:
        pool, free = self.pool, self.model.free
        held = {id(block) for client in self.running for block in client.blocks}
        assert pool.free == len(free)
        assert pool.held == len(held) == pool.blocks - len(free)
        assert pool.shared == sum(len(client.blocks) for client in self.running) - len(held)
        assert pool.findable == sum(block.key is not None for block in free)
        assert pool.blank == sum(block.key is None for block in free)

    @invariant()
    def the_same_is_found(self) -> None:
        """Of every context that was ever asked for: so the order of reuse shows as soon as a block is given away."""
        askers = [Request(0, 0, 1, 1, chain=chain) for chain in self.chains]
        askers += [client.request for client in self.waiting if client.chain is None]
        for request in askers:
            blocks = self.model.find(self._keys(request, 64))
            unheld = sum(not block.holders for block in blocks)
            assert self.pool.find(self.pool.path(request), EVERYTHING) == (len(blocks), unheld)

    @invariant()
    def nothing_is_known_behind_a_gap(self) -> None:
        for owner, index in self.model.known:
            if isinstance(owner, Chain):
                before = self._keys(Request(0, 0, 1, 1, chain=owner), index)
            else:
                before = [(owner, place) for place in range(index)]
            assert all(key in self.model.known for key in before)

    # Means

    def _chain(self, parent: Chain | None = None, fork: int = 0) -> Chain:
        chain = Chain(f"c{len(self.chains)}", parent, fork)
        self.chains[chain] = fork
        return chain

    def _ask(self, chain: Chain | None, tokens: int, *, generates: bool) -> None:
        client = Client(Request(self.number, 0, max(1, tokens), 1, chain=chain), generates, max(1, tokens))
        self.number += 1
        self.waiting.append(client)
        if self.partial is None:
            self._admit(client)

    def _keys(self, of: Client | Request, blocks: int) -> list[Key]:
        """Each block by the owner of its last token."""
        request = of.request if isinstance(of, Client) else of
        keys: list[Key] = []
        for index in range(blocks):
            chain = request.chain
            while chain is not None and chain.parent is not None and (index + 1) * self.size <= chain.fork:
                chain = chain.parent
            keys.append((chain or request, index))
        return keys

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _fits(self, client: Client, new: int) -> bool:
        return self._blocks(client.computed + new) - len(client.blocks) <= self.pool.free

    def _compute(self, client: Client, new: int) -> None:
        client.computed += new
        needed = self._blocks(client.computed) - len(client.blocks)
        self.pool.take(needed)
        client.blocks = client.blocks + [self.model.take() for _ in range(needed)]
        if client.chain is not None:
            self.chains[client.chain] = max(self.chains[client.chain], client.computed)

    def _write(self, client: Client) -> None:
        request, full = client.request, client.computed // self.size
        if full > request.written:
            keys = self._keys(client, full)
            for index in range(request.written, full):
                self.model.write(client.blocks[index], keys[index])
            self.pool.write(request, full)

    def _let_go(self, client: Client) -> None:
        request = client.request
        self.running.remove(client)
        if client is self.partial:
            self.partial = None
        if request.written:
            self.pool.release(request, len(client.blocks))
        else:
            full = client.computed // self.size
            self.pool.discard(full, len(client.blocks))
            keys = self._keys(client, full)  # nobody will ask for them, but they wait in line as others do
            for block, key in zip(client.blocks, keys, strict=False):
                self.model.write(block, key)
        for block in reversed(client.blocks):
            self.model.let_go(block)
        client.blocks = []


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def test_blocks_without_tokens_are_given_away_first_then_the_least_recently_let_go() -> None:
    pool = BlockPool(4, 4, caching=True)
    old, new = Request(0, 0, 8, 1, chain=Chain("old")), Request(1, 0, 4, 1, chain=Chain("new"))
    for request, held in ((old, 2), (new, 1)):
        request.path = pool.path(request)
        pool.take(held)
        pool.write(request, held)
    for request, held in ((old, 2), (new, 1)):
        pool.release(request, held)

    def found() -> list[int]:
        return [pool.find(request.path, EVERYTHING)[0] for request in (old, new)]

    seen = [found()]
    for _ in range(4):
        pool.take(1)
        seen.append(found())
    assert seen == [[2, 1], [2, 1], [1, 1], [0, 1], [0, 0]]


def test_two_that_generate_on_one_chain_are_told_so() -> None:
    pool = BlockPool(8, 4, caching=True)
    chain = Chain("session")
    one, two = Request(0, 0, 8, 8, chain=chain), Request(1, 0, 8, 8, chain=chain)
    one.path = two.path = pool.path(one)
    pool.take(4)
    pool.write(one, 3)
    two.written = 1
    with pytest.raises(ValueError, match=r"'session'.*block 1 .*give each its own fork"):
        pool.write(two, 3)


def test_what_is_not_free_is_not_given_away_and_what_is_held_not_forgotten() -> None:
    pool = BlockPool(3, 4, caching=True)
    pool.take(2)
    with pytest.raises(ValueError, match="too few blocks are free: 1 are missing"):
        pool.take(2)
    pool = BlockPool(3, 4, caching=True)
    pool.take(2)
    with pytest.raises(ValueError, match="2 blocks are held: release them"):
        pool.clear()
