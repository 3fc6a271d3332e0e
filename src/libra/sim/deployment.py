"""A deployment: engines, the policy that routes requests to them, and the times of their weight updates.

Invariant: every deployment can be simulated: each engine is in a bucket, and the policy is known. An engine changes the
weights of all its layers between two iterations. Then it recomputes either every context with the new weights, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from libra.route.cmlfq import CMLFQ
from libra.route.custom import load_policy
from libra.route.policy import Policy
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.kv_network import KVNetwork
from libra.sim.rank_balancer import RankBalancer

DEFAULT_ROUTE = CMLFQ.NAME  # as in `libra run`
DEFAULT_DECODE_ROUTE = "least-loaded"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A weight update. Each engine pauses at the end of the iteration in progress at tick `at`, for `pause` ticks, and
    continues with new weights. With `refresh`, running requests return to the queue and their KV is recomputed;
    otherwise KV is kept."""

    at: int
    pause: int
    refresh: bool = False
    engines: frozenset[int] | None = None  # indices; None: all

    def __post_init__(self) -> None:
        if self.at < 0 or self.pause < 0:
            raise ValueError(
                f"a weight update at tick {self.at} with a pause of {self.pause} ticks; give 0 or more for both"
            )

    @classmethod
    def every(cls, seconds: float, times: int, pause_seconds: float, *, refresh: bool = False) -> tuple[Self, ...]:
        """Make `times` updates of all engines, `seconds` apart. The first is after `seconds`."""
        return tuple(cls(ticks(seconds * (number + 1)), ticks(pause_seconds), refresh) for number in range(times))


@dataclass(frozen=True, slots=True)
class Deployment:
    """All arguments of `simulate` except the workload."""

    engines: tuple[EngineSpec, ...]
    limits: tuple[int, ...] | None = None  # largest final context of each bucket; None: all engines are one bucket
    turn_tokens: int = 1  # tokens of room that a turn needs beyond its context
    route: str = DEFAULT_ROUTE
    sticky: bool = True  # a later turn follows its prefix if it can
    updates: Sequence[WeightUpdate] = ()
    time_limit: float | None = None  # seconds
    kv_transfer: KVNetwork | None = None  # if engines have roles
    decode_route: str = DEFAULT_DECODE_ROUTE  # chooses the engine that decodes after prefill

    def __post_init__(self) -> None:
        check_engines(self.engines, self.limits)
        check_roles(self.engines, self.kv_transfer, [update.refresh for update in self.updates])
        check_groups(self.engines, [update.engines for update in self.updates])
        check_buckets(self.limits, self.turn_tokens)
        self.policy()
        self.decode_policy()

    @property
    def longest_context(self) -> int:
        """Tokens of the longest context that fits an engine."""
        return max(engine.config.max_model_len for engine in self.engines)

    def decode_policy(self, seed: int = 0) -> Policy | None:
        """As `policy`, for decode engines; None without decode engines."""
        if self.kv_transfer is None:
            return None
        return load_policy(self.decode_route, sticky=self.sticky, seed=seed)

    def policy(self, seed: int = 0) -> Policy:
        """Make a policy without history. `seed` is for policies that draw at random."""
        if self.route == RankBalancer.NAME:
            return RankBalancer(sticky=self.sticky)
        return load_policy(self.route, sticky=self.sticky, seed=seed)


def check_buckets(limits: Sequence[int] | None, turn_tokens: int) -> None:
    """Raises ValueError unless limits rise, and `turn_tokens` is 1 or more."""
    if limits is not None and any(longer <= shorter for shorter, longer in pairwise((0, *limits))):
        raise ValueError(f"limits is {list(limits)}; list rising numbers of tokens, shortest bucket first")
    if turn_tokens < 1:
        raise ValueError(f"turn_tokens is {turn_tokens}; a turn generates 1 token or more")


def check_roles(
    engines: Sequence[EngineSpec], transfer: KVNetwork | None, refreshes: Sequence[bool], *, may_come: bool = False
) -> None:
    """Raises ValueError unless prefill and decode engines have each other, and a network for their KV. With `may_come`,
    missing engines may appear later."""
    _check_tiers(engines, refreshes)
    prefill, decode = ([it for it in engines if it.role.name == role] for role in ("prefill", "decode"))
    if not prefill and not decode:
        if transfer is not None and not may_come:
            raise ValueError(
                "kv_transfer is given, but no engine has the role prefill or decode: give engines these roles, or leave"
                " kv_transfer out"
            )
        return
    if not may_come:
        _check_partners(engines)
    if transfer is None:
        raise ValueError("kv_transfer is missing: engines with roles transfer KV: give its bandwidth")
    first = prefill[0] if prefill else decode[0]
    for engine in (*prefill, *decode):
        if engine.config.block_size != first.config.block_size:
            raise ValueError(
                f"block_size of {engine.name} is {engine.config.block_size}, but that of {first.name} is"
                f" {first.config.block_size}: KV is read block by block, so make them equal"
            )
    for engine in decode:
        _check_room_for_kv(engine, transfer)
    if any(refreshes):
        raise ValueError("weight_updates.refresh with prefill and decode apart is not simulated: set it to false")


def _check_tiers(engines: Sequence[EngineSpec], refreshes: Sequence[bool]) -> None:
    for engine in engines:
        if engine.config.kv_tiers and engine.role.takes == "context":
            raise ValueError(
                f"kv_tiers of {engine.name}, which has the role {engine.role.name}, are not simulated, since its KV"
                " comes from engines that compute prompts: give tiers to these engines, or leave kv_tiers out"
            )
        if engine.config.kv_tiers and any(refreshes):
            raise ValueError("weight_updates.refresh with kv_tiers is not simulated: set it to false")


def _check_partners(engines: Sequence[EngineSpec]) -> None:
    """Raises ValueError if a bucket has one role of a pair and lacks the other."""
    for bucket in sorted({engine.bucket for engine in engines}):
        roles = {engine.role.name for engine in engines if engine.bucket == bucket}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if role not in roles and other in roles and not (role == "prefill" and "colocated" in roles):
                where = f" of bucket {bucket}" if any(engine.bucket for engine in engines) else ""
                raise ValueError(
                    f"engines{where} have the role {other}, but none has {role}: add an engine with this role, or make"
                    " the engines colocated"
                )


def _check_room_for_kv(engine: EngineSpec, transfer: KVNetwork) -> None:
    """Raises ValueError if a decode engine can never accept the KV of the longest context."""
    config = engine.config
    if engine.kv_bytes <= 0:
        raise ValueError(f"kv_bytes of {engine.name} is {engine.kv_bytes}: give the bytes of a token's KV")
    free = {
        "drafts": config.draft_blocks,
        "num_reserved_decode_tokens": config.blocks(config.num_reserved_decode_tokens),
    }
    if config.kv_blocks < config.blocks(config.max_model_len) + sum(free.values()):
        left = " and ".join(f"{blocks} blocks free for {what}" for what, blocks in free.items() if blocks)
        lower = (
            "max_model_len, or num_reserved_decode_tokens" if free["num_reserved_decode_tokens"] else "max_model_len"
        )
        raise ValueError(
            f"kv_blocks of {engine.name} is {config.kv_blocks}: KV of max_model_len, {config.max_model_len} tokens, is"
            f" accepted only with {left}, which the engine never has; give more memory, or lower {lower}"
        )
    if transfer.push and config.num_reserved_decode_tokens < config.block_size:
        raise ValueError(
            f"num_reserved_decode_tokens of {engine.name} is {config.num_reserved_decode_tokens}: pushed KV would fill"
            f" the engine, and no request could decode; give a block, {config.block_size}, or more"
        )


def check_groups(engines: Sequence[EngineSpec], updates: Sequence[frozenset[int] | None]) -> None:
    """Raises ValueError unless the ranks of each group are equal, and each update names whole groups. `updates` are
    numbers of engines; None: all engines."""
    groups: dict[str, list[int]] = {}
    for number, engine in enumerate(engines):
        if engine.group is not None:
            groups.setdefault(engine.group.name, []).append(number)
    for name, ranks in groups.items():
        first = engines[ranks[0]]
        if any((engines[it].config, engines[it].group) != (first.config, first.group) for it in ranks):
            raise ValueError(f"the ranks of group {name} differ in their settings: make them equal")
        config = first.config
        lacking = {"pipeline_parallel_size": 1, "kv_tiers": ()}
        for option, off in lacking.items():
            if getattr(config, option) != off:
                raise ValueError(
                    f"{option} of {first.name} with data_parallel_size is not simulated: leave one of them out"
                )
        if any(it is not None and 0 < len(it.intersection(ranks)) < len(ranks) for it in updates):
            raise ValueError(
                f"weight_updates name only some ranks of group {name}, which pauses as a whole: name all ranks, or none"
            )


def check_engines(engines: Sequence[EngineSpec], limits: Sequence[int] | None) -> None:
    """Raises ValueError unless there are engines, with different names, in buckets of `limits`."""
    if not engines:
        raise ValueError("engines is empty: give one engine or more")
    name, count = Counter(engine.name for engine in engines).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} engines have the name {name}: give each engine its own name")
    buckets = 1 if limits is None else len(limits)
    for engine in engines:
        if not 0 <= engine.bucket < buckets:
            raise ValueError(
                f"engine {engine.name} is in bucket {engine.bucket}, but limits name {buckets}, counted from 0:"
                " add the bucket's limit, or move the engine"
            )
