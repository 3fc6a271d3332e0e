"""Speculative decoding: what is accepted is drawn once and for all, and visiting iterations makes no difference.

That every step is that of vLLM's own `Scheduler` is seen with vLLM, in `test_vllm_itself`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driven_engine import Case, assert_nobody_can_tell, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_visited_alike, simulate
from test_batching_equality import affine_costs, grid_costs, knee_costs, longest_iteration, seeds, timed

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost, IterationCost
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import Draws, Speculative
from tests.oracles.fidelity.random_workloads import random_case
from tests.oracles.fidelity.variants import with_drafts

TWO = Speculative("eagle", 2, accepted=(0, 2, 1))
CONFIG = EngineConfig(max_model_len=64, kv_blocks=16, block_size=4, max_num_seqs=2, speculative=TWO)
TEN = AffineCost(10)  # ticks for any iteration


def test_a_request_has_as_many_tokens_as_are_accepted_and_one() -> None:
    """A prompt of 8 tokens, whose last iteration gives the first one of 8; then 1, 3, 2 and 1 of the verifications. The
    drafter writes two tokens beyond those that are verified, whose blocks are held too."""
    run = simulate(CONFIG, TEN, lambda: [Request(0, 0, 8, 8)])
    assert [(it.start, it.scheduled, it.free_blocks) for it in run.iterations] == [
        (0, ((0, 8),), 13),  # 10 tokens
        (10, ((0, 3),), 12),  # 8 + 3 + 2
        (20, ((0, 3),), 12),  # 9 + 3 + 2
        (30, ((0, 3),), 11),  # 12 + 3 + 2
        (40, ((0, 3),), 11),  # 14 + 3 + 2
    ]
    assert (run.requests[0].first_token, run.requests[0].finish, run.requests[0].generated) == (10, 50, 8)
    assert run.engine.pool.free == 16


@pytest.mark.parametrize("exact", [False, True])
def test_others_find_what_was_known_when_the_last_ended_iteration_was_scheduled(exact: bool) -> None:
    """As above; in blocks of one token. Its end makes the rest known, but for the last token, which has no KV."""
    chain = _chain()
    tokens: list[tuple[int, int]] = []
    engine = SimEngine(replace(CONFIG, block_size=1, kv_blocks=64), TEN, exact=exact)
    engine.submit(Request(0, 0, 8, 8, chain=chain), 0)
    now = 0
    while (end := engine.plan(now)) is not None:
        tokens += [(tick, engine.cached_tokens(chain, tick)) for tick in range(now + 5, end, 10)]
        now = end
        engine.commit()
    assert tokens == [(5, 8), (15, 8), (25, 9), (35, 10), (45, 13)]
    assert engine.cached_tokens(chain, now) == 15


def test_the_longest_context_has_no_room_for_the_last_draft() -> None:
    """N-gram drafts take no place beyond the tokens that are verified: 9 and then 10 of a context of 12 are known."""
    config = replace(CONFIG, max_model_len=12, speculative=replace(TWO, method="ngram", accepted=(0,)))
    run = simulate(config, TEN, lambda: [Request(0, 0, 8, 3)])
    assert [it.scheduled for it in run.iterations] == [((0, 8),), ((0, 3),), ((0, 2),)]


def test_a_hit_loses_its_last_block_where_the_drafter_reads_what_the_model_computed() -> None:
    prompts = lambda: [Request(0, 0, 9, 1, chain=None), Request(1, 100, 9, 1)]  # noqa: E731
    for method, cached in (("eagle", 4), ("draft_model", 8), ("ngram", 8)):
        config = replace(CONFIG, speculative=replace(TWO, method=method))
        shared = simulate(config, TEN, lambda: [_on(chain, it) for chain in [_chain()] for it in prompts()])
        assert shared.requests[1].cached_tokens == cached
        assert shared.engine.pool.free == 16


def _chain() -> Any:
    from libra.sim.engine.request import Chain

    return Chain("prompt")


def _on(chain: Any, request: Request) -> Request:
    request.chain = chain
    return request


@given(st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 50) | st.integers(0, 5000), st.integers(1, 20))
def test_a_draw_depends_on_the_request_and_the_verification_alone(seed: int, request: int, first: int, n: int) -> None:
    speculative = Speculative("mtp", 3, (0.9, 0.5, 0.1), seed=seed)
    whole = Draws(speculative).gains(request, 0, first + n)
    assert np.array_equal(Draws(speculative).gains(request, first, n), whole[first:])
    assert len(whole) == first + n
    assert ((whole >= 1) & (whole <= 4)).all()


def test_the_drawn_have_the_chances_that_are_asked_for() -> None:
    rates = (0.8, 0.55, 0.25)
    draws = Draws(Speculative("mtp", 3, rates, seed=4))
    drawn = np.concatenate([draws.gains(number, 0, 400) for number in range(500)])
    for position, rate in enumerate(rates):
        assert np.mean(drawn > position + 1) == pytest.approx(rate, abs=0.005)
    mean = Speculative.of_length("mtp", 3, 2.6)
    assert mean.synthetic_acceptance_rates == pytest.approx((1.0, 0.6, 0.0))
    assert mean.mean_tokens == pytest.approx(2.6)


@pytest.mark.parametrize("costs", [affine_costs, knee_costs, grid_costs])
@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_jumps_are_as_if_every_iteration_was_visited(
    costs: Callable[[EngineConfig], st.SearchStrategy[IterationCost]], data: Any, seed: int
) -> None:
    config = with_drafts(random_case(seed)[0], seed)
    cost = data.draw(costs(config))
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())
    assert_visited_alike(config, cost, lambda: timed(seed, ticks, generic))


@settings(max_examples=120, deadline=None)
@given(cases(adopting=True, closing=True, asking=True, pausing=True), st.integers(0, 99))
def test_nobody_who_asks_can_tell(case: Case, seed: int) -> None:
    """Requests that are given up, interrupted or asked about; pauses, KV that comes, an engine that closes."""
    case = replace(case, config=with_drafts(case.config, seed))
    assert_nobody_can_tell(case)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "dflash"}, "drafts in parallel"),
        ({"method": "medusa"}, "take one of eagle, eagle3"),
        ({"num_speculative_tokens": 0}, "propose 1 or more"),
        ({"accepted": (), "synthetic_acceptance_rates": (0.2, 0.3)}, "rises"),
        ({"accepted": (), "synthetic_acceptance_rates": (0.2,)}, "one for each draft"),
        ({"accepted": ()}, "one of them"),
        ({"accepted": (3,)}, "from 0 to 2"),
    ],
)
def test_what_cannot_be_drafted_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TWO, **change)


def test_a_budget_below_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 2: .* raise it to 3"):
        replace(CONFIG, max_num_batched_tokens=2)
    with pytest.raises(ValueError, match="raise it to 4"):
        replace(CONFIG, max_num_batched_tokens=3, speculative=replace(TWO, method="draft_model"))
