"""vLLM's scheduling rules as its own scheduler shows them: what the simulated engine has to do as well.

Blocks are of 4 tokens, and a step takes a tick. Each case is small enough to follow by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.fidelity.random_workloads import random_case
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request

if TYPE_CHECKING:
    from benchmarks.fidelity.vllm_schedule import Step

Schedule = Callable[[EngineConfig, Sequence[Request]], "tuple[Step, ...]"]
RandomSteps = Callable[[int], "tuple[Step, ...]"]  # of the random case of a seed

RANDOM_CASES = 20


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """Imported late: vLLM takes seconds, which whoever only collects these tests need not wait for."""
    pytest.importorskip("vllm")
    from benchmarks.fidelity.vllm_schedule import vllm_schedule

    return vllm_schedule


@pytest.fixture(scope="module")
def random_steps(schedule: Schedule) -> RandomSteps:
    return cache(lambda seed: schedule(*random_case(seed)))


def small(**changes: Any) -> EngineConfig:
    settings = {
        "max_model_len": 64,
        "kv_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**(settings | changes))


def admissions(steps: Iterable[Step]) -> list[tuple[int, int, int]]:
    """(time, request, tokens from the cache)."""
    return [(step.time, *found) for step in steps for found in step.cached]


def preemptions(steps: Iterable[Step]) -> list[tuple[int, int]]:
    return [(step.time, number) for step in steps for number in step.preempted]


def ends(steps: Iterable[Step]) -> dict[int, int]:
    """The instant at which each finished."""
    return {number: step.time + 1 for step in steps for number in step.finished}


def test_a_prompt_is_computed_in_one_step_that_yields_its_first_token(schedule: Schedule) -> None:
    steps = schedule(small(), [Request(7, 3, 6, 3)])
    assert [step.scheduled for step in steps] == [((7, 6),), ((7, 1),), ((7, 1),)]
    assert [step.time for step in steps] == [3, 4, 5]
    assert [step.free_blocks for step in steps] == [62, 62, 62]  # the last token is never computed
    assert ends(steps) == {7: 6}


def test_a_context_ends_at_the_model_length(schedule: Schedule) -> None:
    steps = schedule(small(max_model_len=16), [Request(0, 0, 13, 100)])
    assert [step.scheduled for step in steps] == [((0, 13),), ((0, 1),), ((0, 1),)]


def test_running_requests_come_before_admissions_and_share_the_budget(schedule: Schedule) -> None:
    steps = schedule(small(max_num_batched_tokens=8), [Request(0, 0, 3, 3), Request(1, 0, 12, 2)])
    assert [step.scheduled for step in steps] == [((0, 3), (1, 5)), ((0, 1), (1, 7)), ((0, 1), (1, 1))]
    assert [step.finished for step in steps] == [(), (), (0, 1)]


def test_without_chunked_prefill_a_prompt_waits_for_a_budget_that_holds_it_whole(schedule: Schedule) -> None:
    config = small(max_model_len=16, max_num_batched_tokens=16, enable_chunked_prefill=False)
    steps = schedule(config, [Request(0, 0, 6, 2), Request(1, 0, 11, 1), Request(2, 0, 2, 1)])
    assert [step.scheduled for step in steps] == [((0, 6),), ((0, 1), (1, 11), (2, 2))]


def test_no_more_than_max_num_seqs_run(schedule: Schedule) -> None:
    steps = schedule(small(max_num_seqs=2), [Request(number, 0, 2, 2) for number in range(3)])
    assert [step.scheduled for step in steps] == [((0, 2), (1, 2)), ((0, 1), (1, 1)), ((2, 2),), ((2, 1),)]


@pytest.mark.parametrize(
    ("prompt_tokens", "cached"),
    [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)],
)
def test_a_full_prompt_hit_recomputes_its_last_block(schedule: Schedule, prompt_tokens: int, cached: int) -> None:
    chain = Chain("prompt")
    requests = [Request(number, number, prompt_tokens, 1, chain=chain) for number in range(2)]
    assert admissions(schedule(small(), requests)) == [(0, 0, 0), (1, 1, cached)]


def test_a_shared_prompt_is_hit_in_the_step_that_computes_it(schedule: Schedule) -> None:
    chain = Chain("prompt")
    requests = [Request(number, 0, 9, 1, chain=chain) for number in range(3)]
    (step,) = schedule(small(), requests)
    assert step.scheduled == ((0, 9), (1, 1), (2, 1))
    assert step.cached == ((0, 0), (1, 8), (2, 8))
    assert step.free_blocks == 64 - 3 - 1 - 1  # two blocks are shared


def test_the_chunk_of_a_running_request_is_hit_by_one_admitted_in_the_same_step(schedule: Schedule) -> None:
    chain = Chain("prompt")
    requests = [Request(0, 0, 16, 1, chain=chain), Request(1, 1, 16, 1, chain=chain)]
    steps = schedule(small(max_num_batched_tokens=10), requests)
    assert [step.scheduled for step in steps] == [((0, 10),), ((0, 6), (1, 4))]
    assert admissions(steps) == [(0, 0, 0), (1, 1, 12)]


def test_a_block_that_is_computed_twice_is_held_twice(schedule: Schedule) -> None:
    chain = Chain("prompt")
    (step,) = schedule(small(), [Request(number, 0, 8, 1, chain=chain) for number in range(2)])
    assert step.cached == ((0, 0), (1, 4))
    assert step.free_blocks == 64 - 2 - 1


@pytest.mark.parametrize(("fork", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)])
def test_a_fork_shares_whole_blocks(schedule: Schedule, fork: int, cached: int) -> None:
    trunk = Chain("trunk")
    requests = [Request(0, 0, 20, 1, chain=trunk), Request(1, 1, 20, 1, chain=Chain("branch", trunk, fork))]
    assert admissions(schedule(small(), requests))[1] == (1, 1, cached)


def test_generated_tokens_are_cached_but_for_the_last(schedule: Schedule) -> None:
    chain = Chain("session")
    requests = [Request(0, 0, 5, 4, chain=chain), Request(1, 9, 12, 1, chain=chain)]
    assert admissions(schedule(small(), requests))[1] == (9, 1, 8)
    requests = [Request(0, 0, 5, 3, chain=chain), Request(1, 9, 12, 1, chain=chain)]
    assert admissions(schedule(small(), requests))[1] == (9, 1, 4)  # the eighth token was returned, never computed


def test_nothing_is_found_where_nothing_is_shared_or_caching_is_off(schedule: Schedule) -> None:
    assert admissions(schedule(small(), [Request(0, 0, 9, 1), Request(1, 1, 9, 1)]))[1] == (1, 1, 0)
    chain = Chain("prompt")
    requests = [Request(number, number, 9, 1, chain=chain) for number in range(2)]
    assert admissions(schedule(small(enable_prefix_caching=False), requests))[1] == (1, 1, 0)


@pytest.mark.parametrize(
    ("taken", "first", "second"),
    [(0, 8, 8), (1, 4, 8), (2, 0, 8), (3, 0, 4), (4, 0, 0)],
)
def test_free_blocks_are_reused_least_recently_used_tail_first(
    schedule: Schedule, taken: int, first: int, second: int
) -> None:
    """Two prompts of two blocks are left in four; a third takes some of them away."""
    config = small(max_model_len=16, kv_blocks=4)
    left = {"first": Chain("first"), "second": Chain("second")}
    for name, cached in (("first", first), ("second", second)):
        requests = [Request(0, 0, 8, 1, chain=left["first"]), Request(1, 1, 8, 1, chain=left["second"])]
        if taken:
            requests.append(Request(2, 2, 4 * taken - 1, 1))
        requests.append(Request(3, 3, 9, 1, chain=left[name]))
        assert admissions(schedule(config, requests))[-1] == (3, 3, cached)


def test_a_freed_block_that_is_not_full_is_reused_first(schedule: Schedule) -> None:
    """Six tokens leave a full block and an open one: what takes one block next takes the open one."""
    chain = Chain("kept")
    requests = [Request(0, 0, 6, 1, chain=chain), Request(1, 1, 4, 1), Request(2, 2, 6, 1, chain=chain)]
    steps = schedule(small(max_model_len=8, kv_blocks=2), requests)
    assert admissions(steps)[-1] == (2, 2, 4)


def test_a_hit_makes_a_block_the_most_recently_used(schedule: Schedule) -> None:
    old, new = Chain("old"), Chain("new")
    requests = [
        Request(0, 0, 4, 1, chain=old),
        Request(1, 1, 4, 1, chain=new),
        Request(2, 2, 5, 1, chain=old),  # hits, and takes the third block for its fifth token
        Request(3, 3, 7, 1),  # takes that one, and the least recently used of the two others
        Request(4, 4, 5, 1, chain=old),
        Request(5, 5, 5, 1, chain=new),
    ]
    steps = schedule(small(max_model_len=8, kv_blocks=3), requests)
    assert admissions(steps)[2:] == [(2, 2, 4), (3, 3, 0), (4, 4, 4), (5, 5, 0)]


def test_the_newest_is_preempted_comes_back_first_and_nothing_is_admitted_meanwhile(schedule: Schedule) -> None:
    """Four blocks: 0 and 1 take two each, and 0 needs a third at its ninth token. 2 would fit in what 1 leaves."""
    config = small(max_model_len=16, kv_blocks=4, enable_prefix_caching=False)
    steps = schedule(config, [Request(0, 0, 7, 6), Request(1, 0, 7, 6), Request(2, 1, 3, 2)])
    assert [(step.time, step.scheduled, step.preempted, step.free_blocks) for step in steps] == [
        (0, ((0, 7), (1, 7)), (), 0),
        (1, ((0, 1), (1, 1)), (), 0),
        (2, ((0, 1),), (1,), 1),  # one block is left, and 2 has to wait all the same
        (3, ((0, 1),), (), 1),  # 1 is first in line, and its 9 tokens do not fit: 2 stays behind it
        (4, ((0, 1),), (), 1),
        (5, ((0, 1),), (), 1),
        (6, ((1, 9), (2, 3)), (), 0),
        (7, ((1, 1), (2, 1)), (), 0),
        (8, ((1, 1),), (), 1),
        (9, ((1, 1),), (), 1),
    ]
    assert [step.finished for step in steps if step.finished] == [(0,), (2,), (1,)]


def test_several_are_preempted_from_the_tail_and_come_back_in_order(schedule: Schedule) -> None:
    """Four hold two blocks each of eight, and all need a third: 3 makes room for 0 and 1, then 2 only for itself."""
    config = small(max_model_len=16, kv_blocks=8, enable_prefix_caching=False)
    steps = schedule(config, [Request(number, 0, 8, 4) for number in range(4)])
    assert preemptions(steps) == [(1, 3), (1, 2)]
    assert steps[1].scheduled == ((0, 1), (1, 1))
    assert admissions(steps)[4:] == [(4, 2, 0), (4, 3, 0)]
    assert steps[4].scheduled == ((2, 9), (3, 9))


def test_a_resumed_request_recomputes_what_the_cache_no_longer_holds(schedule: Schedule) -> None:
    config = small(max_model_len=16, kv_blocks=4)
    steps = schedule(config, [Request(0, 0, 7, 3), Request(1, 0, 7, 6)])
    # At 2, 0 takes the tail of 1, the second of its two blocks; 1 has 9 tokens by then, and finds its first four.
    assert preemptions(steps) == [(2, 1)]
    assert admissions(steps) == [(0, 0, 0), (0, 1, 0), (3, 1, 4)]
    assert dict(steps[3].scheduled) == {1: 5}


def test_a_request_may_preempt_itself(schedule: Schedule) -> None:
    config = small(max_model_len=12, kv_blocks=4)
    steps = schedule(config, [Request(0, 0, 4, 4), Request(1, 0, 7, 5)])
    assert preemptions(steps) == [(2, 1)]
    assert steps[2].scheduled == ((0, 1),)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_waiting_requests_go_by_priority_then_arrival_then_number(schedule: Schedule, policy: str) -> None:
    asked = [  # number, arrival, priority
        (0, 0, 9),
        (5, 1, 3),
        (4, 1, 3),
        (3, 2, 3),
        (2, 2, 0),
        (1, 3, 1),
    ]
    requests = [Request(number, arrival, 3, 6, priority=priority) for number, arrival, priority in asked]
    order = [number for _, number, _ in admissions(schedule(small(max_num_seqs=1, policy=policy), requests))]
    assert order == {"fcfs": [0, 4, 5, 2, 3, 1], "priority": [0, 2, 1, 4, 5, 3]}[policy]


def test_with_priorities_the_lowest_is_preempted_wherever_it_runs(schedule: Schedule) -> None:
    """2 finds no block. 1, the lowest, is already scheduled in this step, and is taken out of it."""
    config = small(max_model_len=16, kv_blocks=5, policy="priority", enable_prefix_caching=False)
    steps = schedule(
        config,
        [Request(1, 0, 4, 6, priority=5), Request(2, 1, 11, 4, priority=1), Request(3, 2, 2, 1, priority=9)],
    )
    taken = next(step for step in steps if step.preempted)
    assert taken.preempted == (1,)
    assert taken.scheduled == ((2, 1),)
    assert taken.time == 3


def test_of_equally_low_ones_that_came_together_the_first_to_run_is_preempted(schedule: Schedule) -> None:
    config = small(max_model_len=12, kv_blocks=6, policy="priority")
    arrivals = {"together": (0, 0, 0), "the last later": (0, 0, 1)}
    victims = {}
    for case, instants in arrivals.items():
        requests = [Request(number, instant, 7, 5) for number, instant in enumerate(instants)]
        victims[case] = preemptions(schedule(config, requests))[0][1]
    assert victims == {"together": 0, "the last later": 2}


def test_when_the_lowest_preempts_itself_no_other_is_looked_at_and_no_time_passes(schedule: Schedule) -> None:
    config = small(max_model_len=12, kv_blocks=4, policy="priority")
    steps = schedule(config, [Request(0, 0, 7, 4, priority=1), Request(1, 1, 6, 4, priority=0)])
    assert [(step.time, step.scheduled, step.preempted) for step in steps[:4]] == [
        (0, ((0, 7),), ()),
        (1, ((0, 1), (1, 6)), ()),
        (2, (), (0,)),
        (2, ((1, 1),), ()),
    ]


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, 0), (0.1, 0), (0.2, 3), (0.3, 3)])
def test_the_watermark_holds_only_while_something_runs(schedule: Schedule, watermark: float, admitted: int) -> None:
    """int(watermark * 11) of ten blocks stay free beside 0, which takes six; 1 wants three. 0 may take all ten."""
    config = small(max_model_len=40, kv_blocks=10, watermark=watermark)
    steps = schedule(config, [Request(0, 0, 22, 3), Request(1, 0, 12, 2)])
    assert admissions(steps) == [(0, 0, 0), (admitted, 1, 0)]
    steps = schedule(config, [Request(0, 0, 39, 1), Request(1, 1, 2, 1)])
    assert admissions(steps) == [(0, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize(("reserve_full_prompt", "admitted"), [(True, 2), (False, 0)])
def test_a_prompt_is_admitted_whole_or_by_its_first_chunk(
    schedule: Schedule, reserve_full_prompt: bool, admitted: int
) -> None:
    config = small(kv_blocks=16, max_num_batched_tokens=16, reserve_full_prompt=reserve_full_prompt)
    steps = schedule(config, [Request(0, 0, 8, 2), Request(1, 0, 60, 1)])
    assert admissions(steps) == [(0, 0, 0), (admitted, 1, 0)]


@pytest.mark.parametrize(
    ("case", "kv_blocks", "found", "admitted"),
    [
        ("found, and held by a running request", 16, 8, 2),
        ("found, and free", 17, 8, 4),
        ("found, and free", 18, 8, 2),
        ("not found", 17, 0, 4),
        ("not found", 18, 0, 2),
    ],
)
def test_what_is_reserved_counts_the_blocks_that_leave_the_free_ones(
    schedule: Schedule, case: str, kv_blocks: int, found: int, admitted: int
) -> None:
    """Beside a request that holds three blocks until 4, a prompt of 15 blocks comes, with two in the cache."""
    trunk = Chain("trunk")
    longer = Request(2, 2, 60, 1, chain=Chain("right", trunk, 9) if found else None)
    if case == "found, and held by a running request":
        before = [Request(0, 0, 9, 4, chain=Chain("left", trunk, 9))]
    else:
        before = [Request(0, 0, 9, 1, chain=Chain("left", trunk, 9)), Request(1, 0, 9, 4)]
    steps = schedule(small(kv_blocks=kv_blocks), [*before, longer])
    assert admissions(steps)[-1] == (admitted, 2, found)


def test_cancellations_come_before_arrivals_of_the_same_instant(schedule: Schedule) -> None:
    requests = [
        Request(0, 0, 4, 50, cancel_at=2),
        Request(1, 2, 4, 1),
        Request(2, 1, 4, 5, cancel_at=1),  # never seen
        Request(3, 1, 4, 5, cancel_at=2),  # cancelled while it waits
    ]
    steps = schedule(small(max_num_seqs=1), requests)
    assert [(step.time, step.scheduled) for step in steps] == [(0, ((0, 4),)), (1, ((0, 1),)), (2, ((1, 4),))]


def test_what_a_cancelled_request_computed_can_be_hit(schedule: Schedule) -> None:
    chain = Chain("prompt")
    requests = [Request(0, 0, 16, 5, chain=chain, cancel_at=1), Request(1, 3, 16, 1, chain=chain)]
    steps = schedule(small(max_num_batched_tokens=10), requests)
    assert admissions(steps) == [(0, 0, 0), (3, 1, 8)]  # its ten tokens filled two blocks


def test_requests_that_fit_only_in_part_all_complete_with_preemptions(schedule: Schedule) -> None:
    config = EngineConfig(max_model_len=128, kv_blocks=24, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
    steps = schedule(config, [Request(number, 0, 64, 64) for number in range(8)])
    assert sorted(ends(steps)) == list(range(8))
    assert len(preemptions(steps)) >= 1


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_of_a_random_case_everything_ends(random_steps: RandomSteps, seed: int) -> None:
    config, requests = random_case(seed)
    steps = random_steps(seed)
    finished = [number for step in steps for number in step.finished]
    assert len(set(finished)) == len(finished)
    ended = ends(steps)
    for request in requests:
        if request.cancel_at is None:
            assert request.number in ended
        else:
            assert ended.get(request.number, 0) <= request.cancel_at
    for step in steps:
        assert sum(tokens for _, tokens in step.scheduled) <= config.max_num_batched_tokens
        assert len(step.scheduled) <= config.max_num_seqs
        assert 0 <= step.free_blocks <= config.kv_blocks
        assert not (step.preempted and step.cached)
    for before, after in pairwise(steps):
        assert after.time > before.time or not before.scheduled


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_a_seed_names_one_case_and_a_case_has_one_schedule(
    schedule: Schedule, random_steps: RandomSteps, seed: int
) -> None:
    assert schedule(*random_case(seed)) == random_steps(seed)


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_a_chain_that_goes_on_has_come_to_its_end(random_steps: RandomSteps, seed: int) -> None:
    """Two requests that generate on one chain are copies with one token each, or one starts where the other ended."""
    ended = ends(random_steps(seed))
    by_chain: dict[Chain, list[Request]] = {}
    for request in sorted(random_case(seed)[1], key=lambda request: request.arrival):
        if request.chain is not None:
            by_chain.setdefault(request.chain, []).append(request)
    for turns in by_chain.values():
        for before, after in pairwise(turns):
            if before.output_tokens == after.output_tokens == 1 and before.prompt_tokens == after.prompt_tokens:
                continue
            assert after.prompt_tokens >= before.prompt_tokens + before.output_tokens
            end = ended.get(before.number, before.cancel_at)
            assert end is not None
            assert end <= after.arrival


def test_random_cases_are_hard(random_steps: RandomSteps) -> None:
    cases = [random_steps(seed) for seed in range(RANDOM_CASES)]
    assert sum(any(step.preempted for step in steps) for steps in cases) >= RANDOM_CASES // 3
    assert sum(any(tokens for step in steps for _, tokens in step.cached) for steps in cases) >= RANDOM_CASES // 2


@pytest.mark.parametrize(
    ("changes", "requests", "message"),
    [
        ({"pipeline_parallel_size": 2}, [], "pipeline_parallel_size is 2.*set it to 1"),
        ({}, [Request(1, 0, 1, 1), Request(1, 0, 1, 1)], "number them apart"),
        ({}, [Request(-1, 0, 1, 1)], "number it from 0"),
        ({}, [Request(0, -1, 1, 1)], "time begins at 0"),
        ({}, [Request(0, 0, 0, 1)], "1 token or more"),
        ({}, [Request(0, 0, 1, 0)], "1 token or more"),
        ({}, [Request(0, 0, 64, 1)], "leaves none to generate"),
    ],
)
def test_what_the_scheduler_alone_cannot_answer_is_refused(
    schedule: Schedule, changes: dict[str, Any], requests: list[Request], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(small(**changes), requests)
