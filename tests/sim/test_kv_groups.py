"""Engines whose layers are in KV cache groups: visiting iterations makes no difference, blocks come back, and what
cannot be simulated is refused.

That every step is the one of vLLM's own scheduler is seen with vLLM, in `test_vllm_itself`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_visited_alike, simulate
from test_async_scheduling import stopping
from test_batching_equality import affine_costs, knee_costs, longest_iteration, seeds, timed

from libra.hardware.kv_groups import KVGroup
from libra.sim.engine.config import DECODE, EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.request import Chain, Request
from libra.sim.engine.speculative import Speculative
from tests.oracles.fidelity.random_workloads import random_case
from tests.oracles.fidelity.variants import with_groups

FULL, WINDOW, STATE = KVGroup("full", 4), KVGroup("window", 4, 8), KVGroup("state", 4)
CONFIG = EngineConfig(
    max_model_len=64, kv_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, kv_groups=(FULL, WINDOW)
)
TEN = AffineCost(10)  # ticks for any iteration


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("costs", [affine_costs, knee_costs])
@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_visiting_iterations_makes_no_difference(costs: Any, ahead: bool, data: Any, seed: int) -> None:
    config = replace(with_groups(replace(random_case(seed)[0], async_scheduling=ahead), seed))
    cost = data.draw(costs(config))
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())

    def make() -> list[Request]:
        requests = timed(seed, ticks, generic)
        if ahead:
            stopping(seed, requests)
        return requests

    assert_visited_alike(config, cost, make)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_one_full_group_is_as_none(seed: int) -> None:
    """The pool that knows every block decides as the one that knows runs of blocks."""
    config = random_case(seed)[0]
    grouped = replace(config, kv_groups=(KVGroup("full", config.block_size),))
    runs = [simulate(it, TEN, lambda: timed(seed, 10, False)) for it in (config, grouped)]
    assert runs[0].iterations == runs[1].iterations
    assert runs[0].result == runs[1].result


def test_a_window_lets_go_of_what_slid_out_of_it() -> None:
    """A prompt of 16 tokens holds 4 blocks of each group. The next token reads the last 8, from position 9 on: two
    blocks of the window are free, and one is taken by each group. The next goes after three more tokens."""
    run = simulate(replace(CONFIG, enable_prefix_caching=False), TEN, lambda: [Request(0, 0, 16, 9)])
    assert [40 - it.free_blocks for it in run.iterations] == [8, 8, 8, 8, 7, 9, 9, 9, 8]
    assert run.engine.pool.free == 40


def test_a_hit_is_what_all_groups_have() -> None:
    """The second prompt forks after 24 tokens, of which the window needs the last two blocks."""
    chain = Chain("a")
    requests = lambda: [  # noqa: E731
        Request(0, 0, 32, 2, chain=chain),
        Request(1, 100, 40, 2, chain=Chain("b", chain, 24)),
    ]
    for groups in ((FULL,), (FULL, WINDOW), (WINDOW, FULL), (WINDOW,)):
        run = simulate(replace(CONFIG, kv_groups=groups), TEN, requests)
        assert run.requests[1].cached_tokens == 24
    states = simulate(replace(CONFIG, kv_groups=(FULL, STATE)), TEN, requests)
    assert states.requests[1].cached_tokens == 0  # the first prompt left states after 28 and 32 tokens


def test_states_are_kept_where_prompts_are_cut() -> None:
    """The whole blocks of a prompt but the one of its last token come first, for the state after them."""
    chain = Chain("a")
    config = replace(CONFIG, kv_groups=(FULL, STATE))
    run = simulate(config, TEN, lambda: [Request(0, 0, 30, 2, chain=chain), Request(1, 100, 30, 2, chain=chain)][:1])
    assert [it.scheduled for it in run.iterations] == [((0, 28),), ((0, 2),), ((0, 1),)]
    again = lambda: [Request(0, 0, 30, 1, chain=chain), Request(1, 100, 31, 1, chain=Chain("b", chain, 30))]  # noqa: E731
    assert simulate(config, TEN, again).requests[1].cached_tokens == 28


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_without_a_hit_is_cut_before_its_last_block_alone(size: int) -> None:
    groups = (KVGroup("full", size), KVGroup("state", size))
    config = replace(CONFIG, block_size=size, kv_blocks=80, kv_groups=groups)
    run = simulate(config, TEN, lambda: [Request(0, 0, 5 * size, 1)])
    assert [it.scheduled for it in run.iterations] == [((0, 4 * size),), ((0, size),)]


@pytest.mark.parametrize(("prompt", "chunks"), [(21, [6, 2, 6, 2, 5]), (20, [6, 2, 6, 2, 4]), (12, [6, 2, 4])])
def test_blocks_too_wide_for_one_chunk_are_cut_and_end_with_a_chunk(prompt: int, chunks: list[int]) -> None:
    """Each whole block but that of the last token takes two chunks, since an iteration has 6 tokens."""
    groups = (KVGroup("full", 8), KVGroup("state", 8))
    config = replace(CONFIG, block_size=8, max_num_batched_tokens=6, kv_groups=groups)
    run = simulate(config, TEN, lambda: [Request(0, 0, prompt, 1)])
    assert [it.scheduled for it in run.iterations] == [((0, tokens),) for tokens in chunks]


def test_a_chunk_that_was_scheduled_is_found_even_if_its_request_was_preempted_before() -> None:
    """vLLM lets others find blocks when it schedules their tokens, not when these are computed. That holds for the last
    chunk of a prompt, and for no token generated after it: the third block is not known."""
    chain = Chain("a")
    request, pool = Request(0, 0, 8, 9, chain=chain), SimEngine(CONFIG, TEN).pool
    request.path, request.target = pool.path(chain), 8
    pool.admit(request, 0)
    for tokens in (4, 8, 12):
        pool.extend(request, tokens, blocks=2)
    pool.let_go(request, 12, known=4)
    assert pool.find(request.path, 9) == (2, 4)  # of each group two, without a holder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_tiers": (KVTier("host", 64, 1.0, 1.0, 1.0),)}, "kv_tiers"),
        ({"speculative": Speculative("eagle", 1, (0.5,))}, "speculative"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"num_reserved_decode_tokens": 4}, "num_reserved_decode_tokens"),
        ({"block_size": 8}, "block_size is 8; with kv_groups set it to .* 4"),
        ({"kv_groups": (FULL, STATE), "enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"kv_groups": (KVGroup("full", 8), STATE), "block_size": 8}, "block_size of state is 4"),
        ({"kv_blocks": 20}, "kv_blocks is 20, less than the 33"),
    ],
)
def test_what_is_not_simulated_is_refused_by_its_key(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(CONFIG, **changes)


def test_kv_of_groups_does_not_move() -> None:
    with pytest.raises(ValueError, match="role of engine is decode"):
        EngineSpec("engine", CONFIG, TEN, role=DECODE)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("ring", 4, 0), "kind is 'ring'"),
        (("full", 0, 0), "block_size of full is 0"),
        (("full", 4, 8), "tokens of full is 8"),
        (("window", 4, 1), "tokens of window is 1"),
        (("chunk", 4, 6), "not a multiple of its block_size 4"),
    ],
)
def test_a_group_that_cannot_be_is_refused(given: tuple[Any, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        KVGroup(*given)
