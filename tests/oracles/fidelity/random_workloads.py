"""Small workloads that are hard to schedule: tight caches, shared prompts, forks, sessions, cancellations.

Invariant: a seed names one case for good, and no two requests of a case generate the same position of a chain, unless
it is the one token of a request that ends with its prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from libra.sim.engine.config import EngineConfig, SchedulingPolicy
from libra.sim.engine.request import Chain, Request

_LARGEST_BUDGET = 256  # tokens in one step
_MOST_REQUESTS = 40
_WAVES = 3  # at most; a session goes on in the next wave
_CANCELLED = 0.1  # share of the requests
_LATEST_CANCELLATION = 60  # steps after arrival
_OVERLONG = 0.1  # share of the requests that would generate past the longest context
_SLACK = 4  # times the work of everything before, until the next wave: preempted work is done again


def random_case(seed: int) -> tuple[EngineConfig, tuple[Request, ...]]:
    """An engine, and requests by rising number whose arrivals and cancellations are in steps of one tick."""
    random = Random(seed)
    config = _random_config(random)
    source = _Source(random, config, random.randint(1, _MOST_REQUESTS))
    for wave in reversed(range(random.randint(1, _WAVES))):
        source.send_wave(source.left if wave == 0 else random.randint(0, source.left))
    return config, source.requests


def async_case(seed: int) -> tuple[EngineConfig, tuple[Request, ...]]:
    """The random case of a seed with asynchronous scheduling. Half of the requests end with a stop token, which is not
    known beforehand."""
    config, requests = random_case(seed)
    random = Random(seed)
    for request in requests:
        if request.output_tokens > 1 and random.random() < 0.5:
            request.stop = "eos"
    return replace(config, async_scheduling=True), requests


def _random_config(random: Random) -> EngineConfig:
    block_size = random.choice((1, 4, 16))
    max_model_len = random.choice((random.randint(8, 64), random.randint(40, 200), 16 * random.randint(1, 12)))
    enough = -(-max_model_len // block_size)
    kv_blocks = round(enough * random.choice((1, 1.1, 1.25, 1.5, 2, 3, 20)))
    enable_chunked_prefill = random.random() < 0.8
    max_num_seqs = random.choice((random.randint(1, 16), random.randint(4, 16)))
    least_budget = max_num_seqs if enable_chunked_prefill else max(max_num_seqs, max_model_len)
    policy: SchedulingPolicy = random.choice(("fcfs", "priority"))
    return EngineConfig(
        max_model_len=max_model_len,
        kv_blocks=kv_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.choice(
            (least_budget, min(2 * least_budget, _LARGEST_BUDGET), random.randint(least_budget, _LARGEST_BUDGET))
        ),
        enable_chunked_prefill=enable_chunked_prefill,
        policy=policy,
        enable_prefix_caching=random.random() < 0.85,
        watermark=random.uniform(0.01, 0.2) if random.random() < 0.2 else 0.0,
        reserve_full_prompt=random.random() < 0.75,
    )


class _Source:
    """Requests in waves. A wave arrives once everything before it has surely ended, so it may continue its chains."""

    def __init__(self, random: Random, config: EngineConfig, count: int) -> None:
        self._random = random
        self._config = config
        self._numbers = random.sample(range(count), count)  # not in the order of arrival
        self._requests: list[Request] = []
        self._chains = 0
        self._arrival: Callable[[], int] = lambda: 0
        self._ended: list[Request] = []  # of earlier waves, on chains that no other request generates on
        self._ending: list[Request] = []  # the same, of this wave

    @property
    def left(self) -> int:
        return len(self._numbers)

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(sorted(self._requests, key=lambda request: request.number))

    def send_wave(self, count: int) -> None:
        last_left = self.left - count
        work = sum(request.prompt_tokens + request.output_tokens for request in self._requests)
        begin = max((request.arrival for request in self._requests), default=0) + _SLACK * work
        self._arrival = self._random_arrivals(begin)
        self._ended, self._ending = self._ended + self._ending, []
        families = (self._alone, self._samples, self._copies, self._session, self._tree, self._next_turns)
        while self.left > last_left:
            self._random.choice(families)(min(self._random.randint(1, 8), self.left - last_left))

    def _alone(self, count: int) -> None:
        """Prompts that are not shared; some of them are on chains of their own, which a later wave continues."""
        for _ in range(count):
            if self._random.random() < 0.5:
                self._ask(self._length(1), None)
            else:
                self._ending.append(self._ask(self._length(1), self._chain()))

    def _samples(self, count: int) -> None:
        """One prompt, and trajectories that fork where it ends."""
        prompt, length = self._chain(), self._length(1)
        for _ in range(count):
            fork = self._chain(prompt, length)
            own = self._random.random() < 0.3
            self._ending.append(self._ask(self._length(length) if own else length, fork))

    def _copies(self, count: int) -> None:
        """One prompt again and again, itself or as a fork; those on its own chain generate one token."""
        prompt, length = self._chain(), self._length(1)
        for _ in range(count):
            if self._random.random() < 0.5:
                self._ask(length, prompt, output_tokens=1)
            else:
                self._ask(length, self._chain(prompt, length))

    def _session(self, count: int) -> None:
        """Turns that may overlap, so each but the first has a chain that forks where the prompt before it ends."""
        turn = self._ask(self._length(1), self._chain())
        for _ in range(count - 1):
            self._ending.append(turn)
            longer = self._longer(turn)
            if longer is None:
                return
            turn = self._ask(longer, self._chain(turn.chain, turn.prompt_tokens))
        self._ending.append(turn)

    def _tree(self, count: int) -> None:
        """Forks anywhere inside the prompts of forks, block boundary or not."""
        branches: list[tuple[Chain, int]] = [(self._chain(), self._length(1))]
        for _ in range(count):
            parent, length = self._random.choice(branches)
            fork = self._random.randint(0, length)
            while parent.parent is not None and fork < parent.fork:
                parent = parent.parent
            branch = self._chain(parent, fork)
            request = self._ask(self._length(max(1, fork)), branch)
            branches.append((branch, request.prompt_tokens))
            self._ending.append(request)

    def _next_turns(self, count: int) -> None:
        """Continue ended requests on their own chains, or fork from what they generated."""
        for _ in range(min(count, len(self._ended))):
            before = self._ended.pop(self._random.randrange(len(self._ended)))
            longer = self._longer(before)
            if longer is None:
                continue
            if self._random.random() < 0.7:
                self._ending.append(self._ask(longer, before.chain))
            else:
                fork = self._random.randint(before.prompt_tokens, longer)
                self._ending.append(self._ask(longer, self._chain(before.chain, fork)))

    def _ask(self, prompt_tokens: int, chain: Chain | None, output_tokens: int | None = None) -> Request:
        random, arrival = self._random, self._arrival()
        room = self._config.max_model_len - prompt_tokens
        if output_tokens is None:
            output_tokens = 1 + int(room * random.random())
            if random.random() < _OVERLONG:
                output_tokens = room + random.randint(0, 8)
        cancelled = random.random() < _CANCELLED
        request = Request(
            self._numbers.pop(),
            arrival,
            prompt_tokens,
            output_tokens,
            chain=chain,
            priority=random.randint(0, 3),  # with fcfs it must not matter
            cancel_at=arrival + random.randint(0, _LATEST_CANCELLATION) if cancelled else None,
        )
        self._requests.append(request)
        return request

    def _chain(self, parent: Chain | None = None, fork: int = 0) -> Chain:
        self._chains += 1
        return Chain(f"c{self._chains}", parent, fork)

    def _length(self, least: int) -> int:
        """Length of a prompt: `least` or more tokens, short ones more often, half the time whole blocks."""
        longest = self._config.max_model_len - 1
        length = least + int((longest - least + 1) * self._random.random() ** 2)
        whole = length // self._config.block_size * self._config.block_size
        return whole if whole >= least and self._random.random() < 0.5 else length

    def _longer(self, before: Request) -> int | None:
        """The prompt of the turn after it: its context and some returned tokens. None where that is too long."""
        context = before.prompt_tokens + before.output_tokens
        return self._length(context) if context < self._config.max_model_len else None

    def _random_arrivals(self, begin: int) -> Callable[[], int]:
        random = self._random
        instants = [begin + random.randint(0, 40) for _ in range(3)]
        step, arrived = random.randint(1, 8), 0

        def on_lattice() -> int:
            nonlocal arrived
            arrived += 1
            return begin + step * arrived

        patterns: tuple[Callable[[], int], ...] = (
            lambda: begin,
            lambda: random.choice(instants),
            lambda: begin + random.randint(0, 60),
            on_lattice,
        )
        return random.choice(patterns)
