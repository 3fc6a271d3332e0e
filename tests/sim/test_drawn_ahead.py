"""Drafts under asynchronous scheduling: an iteration is decided as if all drafts under way were accepted, and visiting
iterations makes no difference.

That every step is that of vLLM's own `AsyncScheduler` is seen with vLLM, in `test_vllm_itself`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driven_engine import Case, Turn, assert_nobody_can_tell, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_visited_alike, simulate
from test_async_scheduling import stopping
from test_batching_equality import affine_costs, grid_costs, knee_costs, longest_iteration, seeds, timed
from test_engines_file import load

from libra.config.yaml_file import ConfigError
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost, IterationCost
from libra.sim.engine.request import Request, Stop
from libra.sim.engine.speculative import Speculative
from tests.oracles.fidelity.random_workloads import random_case
from tests.oracles.fidelity.variants import with_drafts

TWO = Speculative("eagle", 2, accepted=(0, 2, 1))
CONFIG = EngineConfig(
    max_model_len=64, kv_blocks=16, block_size=4, max_num_seqs=2, async_scheduling=True, speculative=TWO
)
TEN = AffineCost(10)  # ticks for any iteration


def test_blocks_are_taken_as_if_all_drafts_under_way_were_accepted() -> None:
    """A prompt of 8 tokens; then 1, 3 and 2 tokens of the verifications, and the last one."""
    run = simulate(CONFIG, TEN, lambda: [Request(0, 0, 8, 8)])
    assert [(it.start, it.scheduled, it.free_blocks) for it in run.iterations] == [
        (0, ((0, 8),), 13),  # 8 + 2 tokens
        (10, ((0, 3),), 12),  # 8 + 3 + 2
        (20, ((0, 3),), 12),  # 8 + 3 + 3 + 2
        (30, ((0, 3),), 11),  # 9 + 3 + 3 + 2
        (40, ((0, 3),), 11),  # 12 + 3 + 3 + 2
    ]
    assert (run.requests[0].first_token, run.requests[0].finish, run.requests[0].generated) == (10, 50, 8)
    assert run.engine.pool.free == 16


@pytest.mark.parametrize(("tokens", "row"), [(4, True), (3, True), (2, False)])
def test_who_ends_with_an_accepted_draft_is_in_one_iteration_more(tokens: int, row: bool) -> None:
    """Its first verification accepts both drafts. The second token is surely the last, a later one is not."""
    config = replace(CONFIG, speculative=replace(TWO, accepted=(2,)))
    run = simulate(config, TEN, lambda: [Request(0, 0, 8, tokens), Request(1, 0, 8, 20)])
    assert (run.requests[0].finish, run.requests[0].generated) == (20, tokens)
    (decided,) = [it.scheduled for it in run.iterations if it.start == 20]
    assert decided == (((0, 3),) if row else ()) + ((1, 3),)


def test_the_longest_context_limits_what_may_be_accepted() -> None:
    """Nothing is accepted: the row at 20 is cut to what fits behind three tokens under way, and the next one has to
    wait until it is known that there still is room."""
    config = replace(CONFIG, max_model_len=13, speculative=replace(TWO, accepted=(0,)))
    run = simulate(config, TEN, lambda: [Request(0, 0, 8, 5)])
    assert [(it.start, it.scheduled) for it in run.iterations] == [
        (0, ((0, 8),)),
        (10, ((0, 3),)),
        (20, ((0, 1),)),
        (30, ((0, 2),)),
        (40, ((0, 1),)),
    ]
    assert (run.requests[0].finish, run.requests[0].generated) == (50, 5)


def test_who_is_not_in_the_iteration_under_way_has_what_it_had() -> None:
    """Two prompts of a token fit into one iteration, but only one row with drafts: the second request waits for the end
    of the first one, with the token that it generated with its prompt."""
    config = replace(CONFIG, max_num_batched_tokens=3, speculative=replace(TWO, accepted=(0,)))
    engine, requests = SimEngine(config, TEN), [Request(number, 0, 1, 4) for number in range(2)]
    for request in requests:
        engine.submit(request, 0)
    now, generated = 0, list[list[int]]()
    while (end := engine.plan(now)) is not None:
        generated += [[engine.generated_by(request, tick) for request in requests] for tick in range(now + 5, end, 10)]
        now = end
        engine.commit()
    assert generated == [[0, 0], [1, 1], [2, 1], [3, 1], [4, 1], [4, 2], [4, 3]]
    assert [request.finish for request in requests] == [40, 70]


def test_tokens_under_way_count_for_whoever_is_preempted() -> None:
    """The second request is preempted with two tokens under way, one of them an accepted draft."""
    config = replace(
        CONFIG, kv_blocks=6, max_model_len=24, enable_prefix_caching=False, speculative=replace(TWO, accepted=(1,))
    )
    jumped, visited = (
        simulate(config, TEN, lambda: [Request(0, 0, 4, 12), Request(1, 0, 3, 7)], exact=exact)
        for exact in (False, True)
    )
    assert any(it.preempted == (1,) for it in jumped.iterations)
    assert jumped.iterations == visited.iterations
    assert [jumped.requests[number].generated for number in (0, 1)] == [12, 7]
    assert jumped.engine.pool.free == 6


@pytest.mark.parametrize(("accepted", "asked"), [((2, 2, 2, 2, 3), [(30, 0, 7), (40, 0, 10)]), ((3,), [(30, 0, 9)])])
@pytest.mark.parametrize("exact", [False, True])
def test_who_is_asked_about_tokens_under_way(
    accepted: tuple[int, ...], asked: list[tuple[int, int, int]], exact: bool
) -> None:
    """Asked again about 10 tokens when it has 6, with an iteration under way that brings them: and the last one."""
    config = replace(CONFIG, speculative=Speculative("eagle", 3, accepted=accepted))
    turn = Turn(0, 1, 11, None, False, 0, (6, 10), None, None)
    served = Case(config, TEN, (turn,)).serve(exact=exact)
    assert served.asked == asked
    assert served.requests[0].generated == 11


@pytest.mark.parametrize("costs", [affine_costs, knee_costs, grid_costs])
@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_jumps_are_as_if_every_iteration_was_visited(
    costs: Callable[[EngineConfig], st.SearchStrategy[IterationCost]], data: Any, seed: int
) -> None:
    config = with_drafts(replace(random_case(seed)[0], async_scheduling=True), seed)
    cost = data.draw(costs(config))
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())
    assert_visited_alike(config, cost, lambda: stopping(seed, timed(seed, ticks, generic)))


@settings(max_examples=120, deadline=None)
@given(
    cases(adopting=True, closing=True, asking=True, pausing=True),
    st.lists(st.sampled_from(["length", "eos"]), min_size=8, max_size=8),
    st.integers(0, 99),
)
def test_nobody_who_asks_can_tell(case: Case, stops: list[Stop], seed: int) -> None:
    """Requests that are given up, interrupted or asked about; pauses, KV that comes, an engine that closes."""
    turns = tuple(replace(turn, stop=stop) for turn, stop in zip(case.turns, stops, strict=False))
    config = with_drafts(replace(case.config, async_scheduling=True), seed)
    case = replace(case, turns=turns, config=config)
    assert_nobody_can_tell(case)


def test_a_file_asks_for_both_and_drafts_that_are_looked_up_are_refused(tmp_path: Path) -> None:
    eagle = {"method": "eagle", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5}
    (engine,) = load(tmp_path, {"max_model_len": 4096, "async_scheduling": True, "speculative": eagle}).engines
    assert engine.config.async_scheduling and engine.config.tokens_each == 4
    with pytest.raises(ConfigError, match=r"engines\.0\.async_scheduling with speculative\.method ngram"):
        load(tmp_path, {"async_scheduling": True, "speculative": {**eagle, "method": "ngram"}})
    with pytest.raises(ValueError, match=r"async_scheduling with speculative\.method ngram: vLLM refuses it"):
        replace(CONFIG, speculative=replace(TWO, method="ngram"))
