"""Speculative decoding on a random case: what is drafted, and how much of it is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from benchmarks.fidelity.random_workloads import async_case, random_case
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import SEQUENTIAL, Speculative


def with_drafts(config: EngineConfig, seed: int) -> EngineConfig:
    """The same engine with drafts. Its budget may be enough for all drafts of a full batch, or not; and a pull fits."""
    random = Random(f"drafts {seed}")
    methods = [it for it in SEQUENTIAL if it != "ngram" or not config.async_scheduling]
    drafts, method = random.choice((1, 2, 3, 5)), random.choice(methods)
    if random.random() < 0.3:
        accepted = tuple(random.randint(0, drafts) for _ in range(random.randint(1, 7)))
        speculative = Speculative(method, drafts, accepted=accepted)
    else:
        rates = sorted((random.random() for _ in range(drafts)), reverse=True)
        speculative = Speculative(method, drafts, tuple(rates), seed=seed)
    least = speculative.tokens_each + speculative.input_slots
    budget = max(config.max_num_batched_tokens, least)
    if random.random() < 0.6:
        budget = max(budget, config.max_num_seqs * least)
    config = replace(config, speculative=speculative, max_num_batched_tokens=budget)
    return replace(config, kv_blocks=max(config.kv_blocks, config.blocks(config.max_model_len) + config.draft_blocks))


def drawn_case(seed: int, *, ahead: bool = False, drafts: bool = False) -> tuple[EngineConfig, tuple[Request, ...]]:
    """The random case of a seed; with `ahead` it schedules asynchronously, with `drafts` it has some."""
    config, requests = async_case(seed) if ahead else random_case(seed)
    return with_drafts(config, seed) if drafts else config, requests


def stretch(requests: Iterable[Request], ticks: int) -> None:
    """Let a step, by which requests arrive and are cancelled, take this number of ticks."""
    for request in requests:
        request.arrival *= ticks
        if request.cancel_at is not None:
            request.cancel_at *= ticks
