"""Configuration of one engine, in vLLM's terms.

Invariant: every configuration can run every request that it accepts. The KV cache has room for the longest context, and
one iteration has room for a token of every running request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

from libra.hardware.kv_groups import KVGroup
from libra.sim.engine.group_cost import GroupSpec
from libra.sim.engine.group_layout import Layout, layouts
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.speculative import Speculative
from libra.sim.engine.value import Value

SchedulingPolicy = Literal["fcfs", "priority"]
FailurePolicy = Literal["fail", "recompute"]
RoleName = Literal["colocated", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class EngineConfig(Value):
    """Configuration of one engine. Names and defaults are vLLM's where vLLM has the option."""

    max_model_len: int  # tokens of the longest context, generated ones included
    kv_blocks: int  # blocks that requests can use: vLLM's `num_gpu_blocks` less the one it keeps for itself
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    watermark: float = 0.0  # share of the blocks that stays free when a request is admitted while others run
    reserve_full_prompt: bool = True  # admission needs blocks for the whole prompt: `scheduler_reserve_full_isl`
    capture_sizes: tuple[int, ...] = ()  # of CUDA graphs, to which smaller batches are padded; empty: no padding
    pipeline_parallel_size: int = 1
    kv_load_failure_policy: FailurePolicy = "fail"  # for requests whose KV does not arrive
    # SGLang's option: tokens that must stay free per request with KV when a pull takes blocks for another prompt.
    num_reserved_decode_tokens: int = 0
    async_scheduling: bool = False  # an iteration is scheduled when the previous one begins
    speculative: Speculative | None = None  # drafts that are verified with each token
    kv_tiers: tuple[KVTier, ...] = ()  # memory to which KV is offloaded, nearest first
    # Layers that share a block table. Empty: one group, which reads the whole context. With groups, `block_size` is the
    # least common multiple of the groups' block sizes.
    kv_groups: tuple[KVGroup, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "max_model_len",
            "kv_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "pipeline_parallel_size",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; set it to 1 or more")
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"async_scheduling with pipeline_parallel_size {self.pipeline_parallel_size} is not simulated: leave"
                " one of them out"
            )
        if self.speculative is not None:
            self._check_drafts(self.speculative)
        if self.kv_tiers:
            self._check_tiers()
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy is {self.policy!r}; set it to fcfs or priority")
        if self.kv_load_failure_policy not in ("fail", "recompute"):
            raise ValueError(f"kv_load_failure_policy is {self.kv_load_failure_policy!r}; set it to fail or recompute")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it is a share of the blocks: 0 or more, and less than 1")
        self._check_blocks()
        if self.num_reserved_decode_tokens < 0:
            raise ValueError(f"num_reserved_decode_tokens is {self.num_reserved_decode_tokens}; give tokens, 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}:"
                " every running request needs one token of it; raise it, or lower max_num_seqs"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_model_len"
                f" {self.max_model_len}, and a prompt is not cut in chunks: raise it, or set enable_chunked_prefill"
            )
        if list(self.capture_sizes) != sorted(set(self.capture_sizes)) or any(size < 1 for size in self.capture_sizes):
            raise ValueError(f"capture_sizes is {self.capture_sizes}; list rising numbers, 1 or more")
        if self.capture_sizes and self.capture_sizes[-1] > self.max_num_batched_tokens:
            raise ValueError(
                f"capture_sizes goes to {self.capture_sizes[-1]}, more than max_num_batched_tokens"
                f" {self.max_num_batched_tokens}: no iteration is that large; leave the size out"
            )

    def _check_blocks(self) -> None:
        if self.kv_groups:
            self._check_groups()
        elif self.kv_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"kv_blocks is {self.kv_blocks}: {self.kv_blocks * self.block_size} tokens, less than one request of"
                f" max_model_len {self.max_model_len}; give more memory, or a shorter max_model_len"
            )

    def _check_groups(self) -> None:
        for name, given in (
            ("kv_tiers", bool(self.kv_tiers)),
            ("speculative", self.speculative is not None),
            ("num_reserved_decode_tokens", bool(self.num_reserved_decode_tokens)),
            ("pipeline_parallel_size above 1", self.pipeline_parallel_size > 1),
        ):
            if given:
                raise ValueError(f"kv_groups with {name} is not simulated: leave one of them out")
        states = self.enable_prefix_caching and any(group.kind == "state" for group in self.kv_groups)
        if states and not self.enable_chunked_prefill:
            raise ValueError(
                "kv_groups has a state, which is cached at the ends of chunks: set enable_chunked_prefill to true"
            )
        sizes = [it.block_size for it in self.kv_groups if it.kind != "state" or states] or [self.block_size]
        if self.block_size != lcm(*sizes):
            raise ValueError(
                f"block_size is {self.block_size}; with kv_groups set it to the least common multiple of their"
                f" block sizes, {lcm(*sizes)}"
            )
        uneven = [it for it in self.kv_groups if it.block_size != self.block_size and it.kind in ("chunk", "state")]
        if self.enable_prefix_caching and uneven:
            raise ValueError(
                f"kv_groups: block_size of {uneven[0].kind} is {uneven[0].block_size}, that of all groups together"
                f" {self.block_size}: with prefix caching make them equal"
            )
        if self.kv_blocks < self.longest_blocks:
            raise ValueError(
                f"kv_blocks is {self.kv_blocks}, less than the {self.longest_blocks} of all kv_groups for one request"
                f" of max_model_len {self.max_model_len}; give more memory, or a shorter max_model_len"
            )

    def _check_tiers(self) -> None:
        if not self.enable_prefix_caching:
            raise ValueError("kv_tiers without enable_prefix_caching: a tier knows KV by its tokens; set it to true")
        if self.pipeline_parallel_size > 1:
            raise ValueError("kv_tiers with pipeline_parallel_size above 1 are not simulated: leave one of them out")
        first = self.kv_tiers[0]
        if not first.offload_prompt_only and any(tier.shared for tier in self.kv_tiers):
            raise ValueError(
                f"kv_tiers: offload_prompt_only of {first.name} is false; with a shared tier that is not"
                " simulated: leave it out"
            )
        for tier in self.kv_tiers:
            tokens = tier.blocks_per_chunk * self.block_size
            if tier.blocks_per_chunk != first.blocks_per_chunk:
                raise ValueError(
                    f"kv_tiers: blocks_per_chunk of {tier.name} is {tier.blocks_per_chunk}, that of {first.name}"
                    f" {first.blocks_per_chunk}: chunks go from one to the other, so make them equal"
                )
            if tier.chunks * tokens < self.max_model_len:
                raise ValueError(
                    f"kv_tiers: {tier.name} holds {tier.chunks * tokens} tokens, less than one request of max_model_len"
                    f" {self.max_model_len}; give it more memory, or a shorter max_model_len"
                )

    def _check_drafts(self, speculative: Speculative) -> None:
        if self.pipeline_parallel_size > 1:
            raise ValueError("speculative with pipeline_parallel_size is not simulated: leave one of them out")
        if self.async_scheduling and speculative.method == "ngram":
            raise ValueError(
                "async_scheduling with speculative.method ngram: vLLM refuses it, as these drafts are looked up in"
                " tokens that are not known yet; leave async_scheduling out, or take another method"
            )
        if self.step_budget < speculative.tokens_each:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: no iteration has room for a token and"
                f" {speculative.num_speculative_tokens} drafts of one request; raise it to"
                f" {speculative.tokens_each + speculative.input_slots}, or lower num_speculative_tokens"
            )

    @property
    def step_budget(self) -> int:
        """Most tokens of the first request of an iteration. Each request takes `input_slots` in addition to its own
        tokens."""
        return self.max_num_batched_tokens - self.input_slots

    @property
    def input_slots(self) -> int:
        return 0 if self.speculative is None else self.speculative.input_slots

    @property
    def lookahead(self) -> int:
        return 0 if self.speculative is None else self.speculative.lookahead

    @property
    def recomputes_block(self) -> bool:
        return self.speculative is not None and self.speculative.recomputes_block

    @property
    def tokens_each(self) -> int:
        """Tokens of a generating request in one iteration."""
        return 1 if self.speculative is None else self.speculative.tokens_each

    @property
    def draft_blocks(self) -> int:
        """Blocks that a pull leaves free for the drafts of its request."""
        return 0 if self.speculative is None else self.blocks(self.tokens_each + self.lookahead)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the KV groups, in order."""
        in_flight = self.max_num_batched_tokens * (1 + self.async_scheduling)
        return layouts(self.kv_groups, self.block_size, self.enable_prefix_caching, in_flight, self.max_model_len)

    @property
    def slides(self) -> bool:
        """Whether a running request releases blocks that it no longer reads."""
        return bool(self.kv_groups) and any(layout.period for layout in self.layouts)

    @property
    def block_starts(self) -> tuple[int, ...]:
        """Lengths of contexts, below `block_size`, whose next token needs a new block: one entry for each KV group and
        length."""
        if not self.kv_groups:
            return (0,)
        return tuple(sorted(start for layout in self.layouts for start in layout.starts()))

    @property
    def longest_blocks(self) -> int:
        """Most blocks of all KV groups that one request of `max_model_len` holds."""
        if not self.kv_groups:
            return self.blocks(self.max_model_len)
        return sum(layout.held(self.max_model_len, self.async_scheduling) for layout in self.layouts)

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the KV cache has room, in contexts of `max_model_len`."""
        if not self.kv_groups:
            return self.kv_blocks * self.block_size
        return self.kv_blocks * self.max_model_len // self.longest_blocks

    def new_blocks(self, before: int, after: int) -> int:
        """Blocks that a running request takes to compute its tokens from `before` to `after`."""
        if not self.kv_groups:
            return self.held_blocks(after) - self.held_blocks(before)
        return sum([layout.new_blocks(before, after) for layout in self.layouts])

    def admission_blocks(self, found: int, tokens: int) -> int:
        """Blocks that a request takes to compute its first `tokens` tokens, with `found` cached blocks."""
        if not self.kv_groups:
            return self.held_blocks(tokens) - found
        return sum([layout.new_blocks(found * self.block_size, tokens) for layout in self.layouts])

    def reserved_blocks(self, found: int, tokens: int) -> int:
        """Blocks that have to be free to admit a prompt of `tokens` tokens, with `found` cached blocks."""
        if not self.kv_groups:
            return -(-tokens // self.block_size) - found
        return sum([layout.reserved(found * self.block_size, tokens) for layout in self.layouts])

    def held_blocks(self, tokens: int) -> int:
        """Blocks of a request that has computed `tokens` tokens."""
        if self.speculative is not None:
            tokens = min(tokens + self.lookahead, self.max_model_len)
        return -(-tokens // self.block_size)

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.kv_blocks + 1))

    def blocks(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class EngineRole(Value):
    """The part of a request's work that an engine does."""

    name: RoleName
    takes: Literal["prompt", "context"]  # new requests, or requests whose prompts another engine has computed
    hands_over: bool  # whether another engine continues once the prompt is computed


COLOCATED = EngineRole("colocated", "prompt", hands_over=False)
PREFILL = EngineRole("prefill", "prompt", hands_over=True)
DECODE = EngineRole("decode", "context", hands_over=False)
ROLES: dict[RoleName, EngineRole] = {role.name: role for role in (COLOCATED, PREFILL, DECODE)}


@dataclass(frozen=True, slots=True)
class EngineSpec(Value):
    """One engine of a cluster."""

    name: str
    config: EngineConfig
    cost: IterationCost
    bucket: int = 0
    node: str = ""  # engines of one node move KV over its links
    devices: int = 1  # GPUs
    role: EngineRole = COLOCATED
    kv_bytes: float = 0.0  # KV bytes of a token on all devices together, for transfers
    group: GroupSpec | None = None  # group of which the engine is a rank; `cost` is then the group's

    def __post_init__(self) -> None:
        if self.config.kv_groups and self.role != COLOCATED:
            raise ValueError(
                f"role of {self.name} is {self.role.name}: KV of an engine with kv_groups does not move to another one;"
                " leave one of them out"
            )

    @property
    def defers(self) -> bool:
        """Whether blocks that the current iteration may write are released only at its end, as for a KV consumer."""
        config = self.config
        return bool(self.role == DECODE or config.kv_tiers) and (
            config.async_scheduling or config.pipeline_parallel_size > 1
        )
