"""What the engines did between two looks: engines that stay, come, go and start again."""

from __future__ import annotations

from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import cast

import pytest
from fakes.small_run import episode, make_observations

from libra.backends.transport.engine_messages import LoanState
from libra.backends.vllm.engine_handle import EngineHandle
from libra.cost.device import EngineCost
from libra.loop.fleet import ServingEngine
from libra.loop.observations import EngineCounters, EngineWork, LoanCounters
from libra.records.schema import StepLoan


def engine(link: int, busy: float, iterations: int, generated: int, prefilled: int, turns: int) -> ServingEngine:
    counters = SimpleNamespace(
        link=link,
        busy_seconds=busy,
        iterations=iterations,
        generated_tokens=generated,
        prefilled_tokens=prefilled,
        finished_turns=turns,
        lent=False,
        loan=None,
    )
    return ServingEngine(cast(EngineHandle, counters), "short", 100)


# (what happened, the engines at this look, what was gained, busiest engine's seconds)
LOOKS = [
    (
        "two new engines count from zero",
        [(1, 2.0, 20, 200, 40, 8), (2, 1.0, 10, 100, 30, 4)],
        (3.0, 30, 300, 70, 12),
        2.0,
    ),
    ("nothing was done", [(1, 2.0, 20, 200, 40, 8), (2, 1.0, 10, 100, 30, 4)], (0.0, 0, 0, 0, 0), 0.0),
    ("both worked", [(1, 2.5, 24, 230, 50, 9), (2, 2.0, 15, 160, 31, 6)], (1.5, 9, 90, 11, 3), 1.0),
    ("one is gone with what it did", [(2, 2.25, 16, 170, 33, 7)], (0.25, 1, 10, 2, 1), 0.25),
    (
        "its slot's next engine is another one",
        [(2, 2.25, 16, 170, 33, 7), (3, 0.5, 5, 50, 9, 1)],
        (0.5, 5, 50, 9, 1),
        0.5,
    ),
    ("no engine", [], (0.0, 0, 0, 0, 0), 0.0),
    ("a process id that is used again is a new engine", [(2, 0.5, 5, 50, 9, 1)], (0.5, 5, 50, 9, 1), 0.5),
]


def lent(version: int, wanted: float | None, had: float, away: str = "", gone: float = 0.0) -> ServingEngine:
    """`wanted` None: it has said nothing yet."""
    loan = None if wanted is None else LoanState(away, wanted, had, 1, 0)
    handle = SimpleNamespace(name="lent-0", link=1, lent=True, version=version, loan=loan, away_seconds=gone)
    return ServingEngine(cast(EngineHandle, handle), "lent", 9)


def test_what_each_lent_engine_had_between_two_looks() -> None:
    counters = LoanCounters()
    counters.observe([lent(0, 1.0, 0.5)])
    counters.observe([lent(2, 3.0, 2.0, "4 requests/s, lent up to 3")])
    assert counters.last == {"lent-0": StepLoan(2.0, 1.5, 2, "4 requests/s, lent up to 3")}
    counters.observe([])
    assert counters.last == {} and 0.5 < counters.share < 0.75


def test_a_device_that_is_recalled_is_not_had() -> None:
    """For 6 of 10 s it was lent, for 3 of these there were turns to make, for 1.5 of these it was had."""
    times = iter((5.0, 15.0, 25.0))
    counters = LoanCounters(lambda: next(times))
    counters.observe([lent(-1, None, 0.0, gone=7.0)])
    assert counters.share == 1.0 and counters.last == {"lent-0": StepLoan(0.0, 0.0, -1, "")}
    counters.observe([lent(0, 3.0, 1.5, "recalled", gone=11.0)])
    assert counters.share == pytest.approx(0.5 * 0.6)
    counters.observe([lent(0, 3.0, 1.5, "recalled", gone=21.0)])
    assert 0.1 < counters.share < 0.2


def test_looks() -> None:
    counters = EngineCounters()
    for what, engines, gained, busiest in LOOKS:
        assert counters.gained(engine(*numbers) for numbers in engines) == EngineWork(*gained), what
        assert counters.busiest_seconds == busiest, what


@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_engines_are_as_fast_as_their_work_says(slower: float) -> None:
    """Two tokens were generated, to contexts of 3 and 5."""
    seen, cost = make_observations(), EngineCost(0.01, 0.001, 0.0005, 0.0001, 0.002)
    seen.profile = replace(seen.profile, engine=cost)
    seen.observe([episode(0, 0)], (5, 100))
    seconds = 30 * 0.01 + 200 * 0.001 + 200 * 4 * 0.0005 + 70 * 0.0001 + 8 * 0.002
    seen.observe_engines(EngineWork(slower * seconds, 30, 200, 70, 8))
    assert astuple(seen.current_profile().engine) == pytest.approx([slower * each for each in astuple(cost)])


@pytest.mark.parametrize(
    ("limits", "hit"),
    [
        ((5, 100), 1.0),  # it ends in the first bucket, of which nothing has to be told by its turns
        ((4, 5), 1.0),  # its second turn was made where it ends
        ((4, 100), 1.0),
        ((2, 4, 5), 0.0),
    ],
)
def test_a_router_hits_with_turns_that_are_made_in_the_bucket_where_their_episode_ends(
    limits: tuple[int, ...], hit: float
) -> None:
    made = episode(0, 0)
    assert (made.trajectory.peak_context, made.turn_buckets) == (5, (0, 1))
    seen = make_observations()
    seen.observe([made], limits)
    assert seen.site((), None).router_hit == 1.0  # until its step is over
    seen.observe_engines(EngineWork())
    assert seen.site((), None).router_hit == hit


def test_a_turn_elsewhere_is_a_miss() -> None:
    late = replace(episode(0, 0), turn_buckets=(0, 0))
    seen = make_observations()
    seen.observe([late], (5, 100))
    seen.observe_engines(EngineWork())
    assert seen.site((), None).router_hit == 1.0  # it was to be told of none
    seen.observe([late, episode(0, 1)], (4, 100))
    seen.observe_engines(EngineWork())
    assert seen.site((), None).router_hit == 0.5


def test_episodes_without_limits_say_nothing_of_the_router() -> None:
    seen, late = make_observations(), replace(episode(0, 0), turn_buckets=(0, 0))
    seen.observe([episode(0, 1)], ())
    seen.observe([late], (4, 100))
    seen.observe_engines(EngineWork())
    assert seen.site((), None).router_hit == 0.0


def test_short_episodes_that_are_made_in_a_longer_bucket_load_it_as_long_ones_do() -> None:
    """Half of the long tokens are made where they belong, and as many short ones beside them: it is as busy as if all
    long ones were."""
    seen = make_observations()
    short, long = episode(0, 0), episode(0, 1)
    short = replace(short, trajectory=replace(short.trajectory, prompt_tokens=1), turn_buckets=(0, 1))
    limits = (short.trajectory.peak_context, 100)
    assert long.trajectory.peak_context > limits[0]
    seen.observe([long, replace(long, turn_buckets=(0, 0)), short], limits)
    seen.observe_engines(EngineWork())
    assert seen.site((), None).router_hit == 1.0
    seen.observe([long, replace(long, turn_buckets=(0, 0)), replace(short, turn_buckets=(0, 0))], limits)
    seen.observe_engines(EngineWork())
    assert 0.5 < seen.site((), None).router_hit < 1.0
