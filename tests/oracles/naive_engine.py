"""One engine, simulated token by token and block by block with the rules of vLLM's V1 scheduler.

Invariant: nothing here calls the code that it judges, and no request is changed. Every iteration is scheduled from the
state of every sequence, and every block of the KV cache is an object that is free or held.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request, Status

Tokens = tuple[int, int]  # (number of a request, number of its tokens)
BlockKey = tuple[Chain, int]  # (chain of a block's last token, number of blocks before the block)

_NEVER = 1 << 80


class Cost(Protocol):
    """Ticks of an iteration."""

    def decode(self, sequences: int, context: int) -> int:
        """Ticks in which each sequence decodes a token. `context` is the total number of tokens that they attend to,
        the new tokens included."""

    def mixed(self, sequences: int, context: int, chunks: list[tuple[int, int]]) -> int:
        """As `decode`, with prefill chunks: (new tokens, tokens computed before them)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. Requests are given by number, in the order in which the scheduler visited them."""

    start: int  # ticks
    end: int
    scheduled: tuple[Tokens, ...]  # new tokens
    preempted: tuple[int, ...]
    cached: tuple[Tokens, ...]  # of everything admitted, for the first time or again: tokens that the cache had
    finished: tuple[int, ...]
    free_blocks: int  # when all was scheduled


@dataclass(frozen=True, slots=True)
class NaiveResult:
    """The outcome of the requests, by number."""

    times: dict[int, tuple[int | None, int]]  # ticks of (the first token, the end); None: no token
    statuses: dict[int, Status]
    cached: dict[int, int]  # tokens found in the cache at the first admission, of admitted requests
    preemptions: dict[int, int]
    generated: dict[int, int]  # tokens, also of unfinished requests
    steps: tuple[Step, ...]
    adopted: tuple[int, ...] = ()  # tokens of each adoption, in order
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)  # ticks of the generated tokens


@dataclass(frozen=True, slots=True)
class Adoption:
    """The arrival of KV for the first tokens of a context from another engine."""

    at: int  # tick
    context: Chain | int  # a chain, or the number of a request without one; no effect after that request has ended
    tokens: int


def naive_run(
    config: EngineConfig,
    cost: Cost,
    requests: Sequence[Request],
    *,
    interrupted: Mapping[int, int] | None = None,
    adoptions: Sequence[Adoption] = (),
    close_at: int | None = None,
) -> NaiveResult:
    """Serve the requests until none is left.

    At each boundary of iterations cancellations take effect, then arrivals join, then the next iteration is scheduled.
    An iteration that preempts and then schedules nothing is a decode of no sequences. A request that is refused, or
    cancelled before its arrival, ends when it arrives. Every other cancellation ends a request at a boundary. Raises
    ValueError for an engine with pipeline stages.

    `interrupted` has the ticks at which requests are interrupted, by number; an interruption takes effect like a
    cancellation. Adoptions are in the order of their ticks. At a boundary they come before everything else; within an
    iteration they come after it was scheduled. At the first boundary at or after `close_at` all requests are
    interrupted, and from then on nothing arrives or is adopted.
    """
    if config.pipeline_parallel_size != 1:
        raise ValueError(f"pipeline_parallel_size is {config.pipeline_parallel_size}; only 1 is scheduled here")
    engine = _Engine(config)
    pending = deque(sorted(requests, key=lambda request: (request.arrival, request.number)))
    if close_at is not None:
        pending = deque(request for request in pending if request.arrival < close_at)
        adoptions = [adoption for adoption in adoptions if adoption.at < close_at]
    served = {request.number: _Sequence(request, config) for request in requests}
    for number, at in (interrupted or {}).items():
        served[number].interrupt_at = at
    coming = deque(adoptions)
    adopted: list[int] = []

    def adopt(before: int) -> None:
        while coming and coming[0].at < before:
            at, context, tokens = coming[0].at, coming[0].context, coming.popleft().tokens
            if isinstance(context, Chain):
                adopted.append(engine.adopt(context, tokens))
            elif served[context].status in ("waiting", "running") and not served[context].ends_on_arrival(at, config):
                adopted.append(engine.adopt(served[context].chain, tokens))
            else:
                adopted.append(0)

    steps = []
    now = 0
    while pending or engine.waiting or engine.running:
        if not (engine.waiting or engine.running):
            now = max(now, pending[0].arrival)
        adopt(now + 1)
        for sequence in sorted([*engine.waiting, *engine.running], key=lambda sequence: sequence.number):
            if sequence.cancelled_by(now):
                engine.drop(sequence)
                sequence.end("cancelled", now)
            elif sequence.interrupt_at is not None and sequence.interrupt_at <= now:
                engine.drop(sequence)
                sequence.end("interrupted", now)
        while pending and pending[0].arrival <= now:
            sequence = served[pending.popleft().number]
            if not sequence.acceptable(config):
                sequence.end("refused", sequence.arrival)
            elif sequence.cancelled_by(sequence.arrival):
                sequence.end("cancelled", sequence.arrival)
            elif sequence.cancelled_by(now):
                sequence.end("cancelled", now)
            elif sequence.interrupt_at is not None and sequence.interrupt_at <= now:
                sequence.end("interrupted", now)
            else:
                engine.enqueue(sequence)
        if close_at is not None and close_at <= now:
            for sequence in [*engine.running, *engine.waiting]:
                engine.drop(sequence)
                sequence.end("interrupted", now)
        elif engine.waiting or engine.running:
            steps.append(_iterate(engine, cost, now, adopt))
            now = steps[-1].end
    adopt(_NEVER)
    return NaiveResult(
        times={number: (sequence.first_token, sequence.finish) for number, sequence in served.items()},
        statuses={number: sequence.status for number, sequence in served.items()},
        cached={number: sequence.cached for number, sequence in served.items() if sequence.cached is not None},
        preemptions={number: sequence.preemptions for number, sequence in served.items()},
        generated={number: sequence.generated for number, sequence in served.items()},
        steps=tuple(steps),
        adopted=tuple(adopted),
        tokens={number: tuple(sequence.token_ticks) for number, sequence in served.items()},
    )


def _iterate(engine: _Engine, cost: Cost, start: int, adopt: Callable[[int], None]) -> Step:
    engine.schedule()
    free_blocks = len(engine.cache.free)
    decodes = [sequence.computed + 1 for sequence in engine.scheduled if not sequence.prefilling]
    chunks = [(new, sequence.computed) for sequence, new in engine.scheduled.items() if sequence.prefilling]
    if chunks:
        end = start + cost.mixed(len(decodes), sum(decodes), chunks)
    else:
        end = start + cost.decode(len(decodes), sum(decodes))
    adopt(end)
    finished = engine.complete(end)
    return Step(
        start,
        end,
        scheduled=tuple((sequence.number, new) for sequence, new in engine.scheduled.items()),
        preempted=tuple(sequence.number for sequence in engine.preempted),
        cached=tuple((sequence.number, tokens) for sequence, tokens in engine.cached),
        finished=tuple(sequence.number for sequence in finished),
        free_blocks=free_blocks,
    )


@dataclass(eq=False, slots=True)
class _Block:
    """A block of the KV cache: free, or held by one request or more. The content of a block with a key can be found."""

    holders: int = 0
    key: BlockKey | None = None


@dataclass(eq=False, slots=True)
class _BlockCache:
    """All blocks.

    `free` is in the order in which blocks are taken. `found` has every full block by content, free blocks included.
    Blocks with equal content are in the order in which they were filled, and a prefix hit uses the first.
    """

    free: deque[_Block]
    found: dict[BlockKey, list[_Block]] = field(default_factory=dict)

    def prefix(self, keys: Iterable[BlockKey]) -> list[_Block]:
        """The blocks of the longest prefix of `keys` whose blocks are all found."""
        hit: list[_Block] = []
        for key in keys:
            if key not in self.found:
                break
            hit.append(self.found[key][0])
        return hit

    def share(self, blocks: list[_Block]) -> None:
        for block in blocks:
            if block.holders == 0:
                self.free.remove(block)
            block.holders += 1

    def take(self) -> _Block:
        block = self.free.popleft()
        if block.key is not None:
            self.found[block.key].remove(block)
            if not self.found[block.key]:
                del self.found[block.key]
        block.key = None
        block.holders = 1
        return block

    def fill(self, block: _Block, key: BlockKey) -> None:
        block.key = key
        self.found.setdefault(key, []).append(block)

    def release(self, blocks: list[_Block]) -> None:
        """Free a request's blocks, last first, so that the tail of a context is overwritten before its head.

        Blocks with a key go to the end of the queue, and blocks without one to its front, each in this order.
        """
        worthless = []
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders == 0 and block.key is None:
                worthless.append(block)
            elif block.holders == 0:
                self.free.append(block)
        self.free.extendleft(reversed(worthless))


class _Sequence:
    """A request in the engine."""

    def __init__(self, request: Request, config: EngineConfig) -> None:
        self.number = request.number
        self.arrival = request.arrival
        self.priority = request.priority
        self.cancel_at = request.cancel_at
        self.interrupt_at: int | None = None
        self.chain = request.chain or Chain(f"request {request.number}")
        self.prompt = request.prompt_tokens
        self.outputs = min(request.output_tokens, config.max_model_len - request.prompt_tokens)
        self.generated = 0
        self.token_ticks: list[int] = []
        self.computed = 0  # tokens whose KV is in `blocks`
        self.prefilling = True  # no token has been generated since the last admission
        self.blocks: list[_Block] = []
        self.filled = 0  # number of first blocks with a key
        self.first_token: int | None = None
        self.finish = 0
        self.status: Status = "waiting"
        self.cached: int | None = None
        self.preemptions = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    def acceptable(self, config: EngineConfig) -> bool:
        return self.prompt >= 1 and self.outputs >= 1 and self.prompt + 1 <= config.max_model_len

    def cancelled_by(self, now: int) -> bool:
        return self.cancel_at is not None and self.cancel_at <= now

    def ends_on_arrival(self, now: int, config: EngineConfig) -> bool:
        """Whether the request arrived before `now` and ended at its arrival."""
        ends = not self.acceptable(config) or self.cancelled_by(self.arrival)
        return ends and self.arrival < now

    def end(self, status: Status, now: int) -> None:
        self.status = status
        self.finish = now

    def key(self, index: int, block_size: int) -> BlockKey:
        return _key(self.chain, index, block_size)


def _key(chain: Chain, index: int, block_size: int) -> BlockKey:
    """The content of a block of a context. The chain of the last token determines all earlier tokens."""
    return _owner(chain, (index + 1) * block_size), index


def _owner(chain: Chain, end: int) -> Chain:
    """The chain to which token number `end` - 1 belongs."""
    while chain.parent is not None and end <= chain.fork:
        chain = chain.parent
    return chain


class _Engine:
    """The scheduler's two queues, and its last decision."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = _BlockCache(deque(_Block() for _ in range(config.kv_blocks)))
        self.waiting: list[_Sequence] = []  # the next to be admitted first
        self.running: list[_Sequence] = []  # in the order of admission
        self.budget = 0  # tokens that this iteration can still compute
        self.scheduled: dict[_Sequence, int] = {}
        self.preempted: list[_Sequence] = []
        self.cached: list[tuple[_Sequence, int]] = []

    def enqueue(self, sequence: _Sequence) -> None:
        if self.config.policy == "priority":
            bisect.insort(self.waiting, sequence, key=_rank)
        else:
            self.waiting.append(sequence)

    def requeue(self, sequence: _Sequence) -> None:
        """Put a preempted sequence back into the waiting queue."""
        if self.config.policy == "priority":
            self.enqueue(sequence)
        else:
            self.waiting.insert(0, sequence)

    def drop(self, sequence: _Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.cache.release(sequence.blocks)

    def adopt(self, chain: Chain, tokens: int) -> int:
        """Adopt KV from another engine, block by block, as for a request with this context that ends at once. Blocks
        that a running request is going to compute, and all blocks after them, are not adopted. Returns the adopted
        tokens."""
        if not self.config.enable_prefix_caching:
            return 0
        size = self.config.block_size
        keys = [_key(chain, index, size) for index in range(tokens // size)]
        blocks = self.cache.prefix(keys)
        self.cache.share(blocks)
        missing = keys[len(blocks) :]
        if missing and any(sequence.key(len(blocks), size) == missing[0] for sequence in self.running):
            missing = []
        taken = min(len(missing), len(self.cache.free))
        for key in missing[:taken]:
            blocks.append(self.cache.take())
            self.cache.fill(blocks[-1], key)
        self.cache.release(blocks)
        return taken * size

    def schedule(self) -> None:
        """Schedule the next iteration: first running sequences, then, if none was preempted, waiting sequences."""
        self.budget = self.config.max_num_batched_tokens
        self.scheduled = {}
        self.preempted = []
        self.cached = []
        self._continue_running()
        if not self.preempted:
            self._admit_waiting()

    def complete(self, now: int) -> list[_Sequence]:
        """The iteration is over: contexts grow, tokens appear, and what has all of its own ends."""
        finished = []
        for sequence, new in self.scheduled.items():
            sequence.computed += new
            if sequence.computed < sequence.tokens:
                continue
            sequence.prefilling = False
            sequence.generated += 1
            sequence.token_ticks.append(now)
            if sequence.first_token is None:
                sequence.first_token = now
            if sequence.generated == sequence.outputs:
                self.drop(sequence)
                sequence.end("finished", now)
                finished.append(sequence)
        return finished

    def _continue_running(self) -> None:
        position = 0
        while position < len(self.running) and self.budget > 0:
            sequence = self.running[position]
            new = min(sequence.tokens - sequence.computed, self.budget)
            while len(self.cache.free) < self._missing_blocks(sequence, sequence.computed + new):
                victim = self._victim()
                # A victim that stands before this one moves it forward by a place.
                position -= self.running.index(victim) < position
                self._preempt(victim)
                if victim is sequence:
                    return
            self._place(sequence, new)
            position += 1

    def _admit_waiting(self) -> None:
        while self.waiting and self.budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            hit = self._hit(sequence)
            hit_tokens = len(hit) * self.config.block_size
            wanted = sequence.tokens - hit_tokens
            if wanted > self.budget and not self.config.enable_chunked_prefill:
                return
            new = min(wanted, self.budget)
            held = sequence.tokens if self.config.reserve_full_prompt else hit_tokens + new
            spare = self.config.watermark_blocks if self.running else 0
            # Blocks of the hit that are free now will not be once it is used.
            needed = self.config.blocks(held) - len(hit) + sum(block.holders == 0 for block in hit)
            if needed + spare > len(self.cache.free):
                return
            self.cache.share(hit)
            sequence.blocks = hit
            sequence.filled = len(hit)
            sequence.computed = hit_tokens
            sequence.prefilling = True
            sequence.status = "running"
            if sequence.cached is None:
                sequence.cached = hit_tokens
            self.running.append(self.waiting.pop(0))
            self.cached.append((sequence, hit_tokens))
            self._place(sequence, new)

    def _hit(self, sequence: _Sequence) -> list[_Block]:
        """The longest cached prefix that leaves at least one token to compute, since this token yields the next one."""
        if not self.config.enable_prefix_caching:
            return []
        size = self.config.block_size
        return self.cache.prefix(sequence.key(i, size) for i in range((sequence.tokens - 1) // size))

    def _missing_blocks(self, sequence: _Sequence, tokens: int) -> int:
        return self.config.blocks(tokens) - len(sequence.blocks)

    def _place(self, sequence: _Sequence, new: int) -> None:
        """Schedule the tokens and take their blocks.

        A block that they fill can be found at once, since a sequence with a hit in the same iteration computes later.
        """
        until = sequence.computed + new
        for _ in range(self._missing_blocks(sequence, until)):
            sequence.blocks.append(self.cache.take())
        if self.config.enable_prefix_caching:
            full = until // self.config.block_size
            for i in range(sequence.filled, full):
                self.cache.fill(sequence.blocks[i], sequence.key(i, self.config.block_size))
            sequence.filled = full
        self.scheduled[sequence] = new
        self.budget -= new

    def _victim(self) -> _Sequence:
        if self.config.policy == "priority":
            return max(self.running, key=lambda sequence: (sequence.priority, sequence.arrival))
        return self.running[-1]

    def _preempt(self, victim: _Sequence) -> None:
        """Discard the victim's computed tokens, and the tokens planned for it in this iteration."""
        self.budget += self.scheduled.pop(victim, 0)
        self.drop(victim)
        victim.blocks = []
        victim.filled = 0
        victim.computed = 0
        victim.status = "waiting"
        victim.preemptions += 1
        self.preempted.append(victim)
        self.requeue(victim)


def _rank(sequence: _Sequence) -> tuple[int, int, int]:
    return sequence.priority, sequence.arrival, sequence.number
