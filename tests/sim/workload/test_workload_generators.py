"""What is made from distributions: that it follows them, and that a seed says it all."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import groupby, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.clock import TICKS
from libra.sim.engine.request import Request
from libra.sim.workload.distributions import (
    CHUNK,
    Arrivals,
    AtOnce,
    Constant,
    Lengths,
    LogNormal,
    LongTail,
    Poisson,
    Uniform,
)
from libra.sim.workload.generated import Agent, Tool, agent_trajectories, generated_requests
from libra.sim.workload.replay import Replay


def times(arrivals: Arrivals, count: int, seed: int = 0) -> list[int]:
    return [t for chunk in arrivals.chunks(count, np.random.default_rng(seed)) for t in chunk.tolist()]


def lengths(distribution: Lengths, count: int = 100_000, seed: int = 0) -> np.ndarray:
    return distribution.draw(count, np.random.default_rng(seed))


@pytest.mark.parametrize(("rate", "seed"), [(0.05, 1), (3.0, 2), (1e5, 3)])
def test_a_poisson_source_has_its_rate_and_its_gaps(rate: float, seed: int) -> None:
    arrivals = times(Poisson(rate), 100_000, seed)
    assert 100_000 / (arrivals[-1] / TICKS) == pytest.approx(rate, rel=0.01)
    gaps = np.diff(arrivals, prepend=0) * rate / TICKS
    assert gaps.std() == pytest.approx(1, rel=0.02)  # an exponential's deviation is its mean
    for x in (0.5, 1.0, 3.0):
        assert (gaps > x).mean() == pytest.approx(math.exp(-x), rel=0.05)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("arrivals", [AtOnce(), Poisson(3.0)], ids=lambda a: type(a).__name__)
def test_arrivals_never_fall_and_the_first_do_not_depend_on_how_many(arrivals: Arrivals) -> None:
    many = times(arrivals, 2 * CHUNK + 5)
    assert all(earlier <= later for earlier, later in pairwise(many))
    for count in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1):
        assert times(arrivals, count) == many[:count]


@pytest.mark.parametrize(
    ("distribution", "limits"),
    [
        (Constant(5), (5, 5)),
        (Uniform(3, 9), (3, 9)),
        (LogNormal(100, 1.0, 400), (1, 400)),
        (LongTail(100, 1.0, 0.1, 200, 0.5, 400), (1, 400)),
    ],
)
def test_lengths_are_whole_and_reach_their_limits(distribution: Lengths, limits: tuple[int, int]) -> None:
    drawn = lengths(distribution)
    assert drawn.dtype == np.int64
    assert (drawn.min(), drawn.max()) == limits


def test_a_uniform_length_has_equal_shares() -> None:
    drawn = lengths(Uniform(3, 7))
    assert [(drawn == n).mean() for n in range(3, 8)] == pytest.approx([0.2] * 5, rel=0.03)


def test_a_lognormal_has_its_median_and_sigma() -> None:
    drawn = lengths(LogNormal(1000, 0.5, 10**9))
    assert np.median(drawn) == pytest.approx(1000, rel=0.01)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.01)
    cut = lengths(LogNormal(1000, 0.5, 2000))
    assert (cut == np.minimum(drawn, 2000)).all()


def test_a_long_tail_is_a_pareto_one() -> None:
    drawn = lengths(LongTail(100, 0.5, 0.05, 2000, 1.5, 10**9), count=2_000_000)
    tail = drawn[drawn >= 2000]
    assert len(tail) / len(drawn) == pytest.approx(0.05, rel=0.03)
    for factor in (2, 5, 20):
        assert (tail > 2000 * factor).mean() == pytest.approx(factor**-1.5, rel=0.1)
    assert np.median(drawn[drawn < 2000]) == pytest.approx(100, rel=0.02)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Poisson(0.0), "rate is 0.0"),
    (lambda: Poisson(math.inf), "rate is inf"),
    (lambda: times(Poisson(1e-6), 100), "more than 106 days away"),
    (lambda: Constant(0), "tokens is 0 tokens"),
    (lambda: Uniform(5, 4), "high is 4, less than low 5"),
    (lambda: LogNormal(0.5, 1.0, 10), "median is 0.5"),
    (lambda: LogNormal(11, 1.0, 10), "median is 11"),
    (lambda: LogNormal(5, -1.0, 10), "sigma is -1.0"),
    (lambda: LogNormal(5, 1.0, 0), "limit is 0 tokens"),
    (lambda: LongTail(5, 1.0, 1.5, 6, 1.0, 10), "tail_share is 1.5"),
    (lambda: LongTail(5, 1.0, 0.5, 11, 1.0, 10), "tail_from is 11"),
    (lambda: LongTail(5, 1.0, 0.5, 6, 0.0, 10), "tail_index is 0.0"),
    (lambda: generated_requests(0, AtOnce(), Constant(1), Constant(1), 0), "count is 0"),
    (lambda: generated_requests(1, AtOnce(), Constant(1), Constant(1), 0, samples_per_prompt=0), "samples_per_prompt"),
    (lambda: Tool("t", 0.0, Constant(1), 1.0, 1.0), "'t': weight is 0.0"),
    (lambda: Tool("t", 1.0, Constant(1), 1.0, 99.0), "'t': seconds_sigma is 99.0"),
    (lambda: Tool("t", 1.0, Constant(1), 1.0, 1.0, 0.7, 0.7), "probabilities with a sum of at most 1"),
    (lambda: agent(mean_turns=0.5), "mean_turns is 0.5"),
    (lambda: Agent(Constant(1), Constant(1), 2.0, (), 10), "tools is empty"),
    (lambda: agent(max_context=1), "max_context is 1"),
    (lambda: agent_trajectories(agent(), 0, 0), "prompts is 0"),
    (lambda: agent_trajectories(agent(), 1, 0, samples_per_prompt=0), "samples_per_prompt is 0"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_parameters_that_make_no_sense_are_refused(bad: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad()


def told(request: Request) -> tuple[int, int, int, int]:
    return request.number, request.arrival, request.prompt_tokens, request.output_tokens


def test_single_requests_are_numbered_over_chunks_and_share_nothing() -> None:
    workload = generated_requests(2 * CHUNK + 5, Poisson(2.0), Uniform(1, 99), Uniform(1, 9), seed=4)
    requests = list(workload.start())
    assert [r.number for r in requests] == list(range(2 * CHUNK + 5))
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    assert {r.chain for r in requests} == {None}
    assert [told(r) for r in workload.start()] == [told(r) for r in requests]
    fewer = generated_requests(CHUNK + 3, Poisson(2.0), Uniform(1, 99), Uniform(1, 9), seed=4)
    assert [told(r) for r in fewer.start()] == [told(r) for r in requests[: CHUNK + 3]]
    other = generated_requests(100, Poisson(2.0), Uniform(1, 99), Uniform(1, 9), seed=5)
    assert [told(r) for r in other.start()] != [told(r) for r in requests[:100]]


def test_a_change_of_one_distribution_leaves_the_others_alone() -> None:
    one = generated_requests(50, Poisson(2.0), Uniform(1, 99), LogNormal(9, 1.0, 99), seed=4)
    other = generated_requests(50, Poisson(2.0), Uniform(1, 99), Constant(3), seed=4)
    assert [told(r)[:3] for r in one.start()] == [told(r)[:3] for r in other.start()]


def test_samples_of_a_prompt_arrive_at_once_and_share_it() -> None:
    prompts = CHUNK + 2
    workload = generated_requests(prompts, Poisson(2.0), Uniform(5, 99), Uniform(1, 10**6), 4, samples_per_prompt=3)
    requests = list(workload.start())
    assert [r.number for r in requests] == list(range(3 * prompts))
    assert len({r.output_tokens for r in requests}) > 2.5 * prompts  # drawn one by one
    groups = [list(group) for _, group in groupby(requests, key=lambda r: r.chain and r.chain.parent)]
    assert len(groups) == prompts
    for group in groups:
        assert len({r.chain for r in group}) == len(group) == 3
        assert len({(r.arrival, r.prompt_tokens, r.chain and r.chain.fork) for r in group}) == 1
        assert group[0].chain is not None and group[0].chain.fork == group[0].prompt_tokens


def test_a_million_requests_are_made_as_they_are_taken() -> None:
    made: list[int] = []

    class Counting(Constant):
        def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
            made.append(count)
            return super().draw(count, generator)

    workload = generated_requests(1_000_000, Poisson(2.0), Counting(1), Constant(1), 0)
    assert made == []
    assert len(list(islice(workload.start(), 10))) == 10
    assert made == [CHUNK]


def agent(mean_turns: float = 6.0, max_context: int = 100_000) -> Agent:
    return Agent(
        prompt_tokens=LogNormal(2000, 0.5, 8000),
        generated_tokens=LogNormal(120, 0.8, 4000),
        mean_turns=mean_turns,
        tools=(
            Tool("search", 3.0, LogNormal(400, 1.0, 4000), 0.8, 0.5, error_share=0.1, timeout_share=0.05),
            Tool("python", 1.0, Uniform(10, 50), 5.0, 1.0),
        ),
        max_context=max_context,
    )


def test_an_agent_takes_the_turns_and_tools_it_is_given() -> None:
    made = agent_trajectories(agent(max_context=10**9), 4000, seed=1, samples_per_prompt=2)
    assert len(made) == 8000
    turns = np.array([len(t.turns) for t in made])
    assert turns.mean() == pytest.approx(6.0, rel=0.03)
    assert (turns > 6).mean() == pytest.approx((1 - 1 / 6) ** 6, rel=0.05)  # geometric
    called = [turn for t in made for turn in t.turns[:-1]]
    of = {name: [turn for turn in called if turn.tool == name] for name in ("search", "python")}
    assert len(of["search"]) / len(called) == pytest.approx(0.75, rel=0.02)
    statuses = Counter(turn.status for turn in of["search"])
    assert statuses["error"] / len(of["search"]) == pytest.approx(0.1, rel=0.05)
    assert statuses["timeout"] / len(of["search"]) == pytest.approx(0.05, rel=0.08)
    assert {turn.status for turn in of["python"]} == {"ok"}
    assert np.median([turn.tool_seconds or 0 for turn in of["python"]]) == pytest.approx(5.0, rel=0.05)
    assert np.median([turn.returned_tokens for turn in of["search"]]) == pytest.approx(400, rel=0.03)
    assert {turn.returned_tokens for turn in of["python"]} == set(range(10, 51))
    assert np.median([turn.generated_tokens for t in made for turn in t.turns]) == pytest.approx(120, rel=0.02)


def test_samples_of_a_prompt_are_alike_in_the_prompt_only() -> None:
    made = agent_trajectories(agent(), 50, seed=1, samples_per_prompt=4)
    assert len({t.id for t in made}) == 200
    for prompt, group in groupby(made, key=lambda t: t.prompt_id):
        samples = list(group)
        assert len(samples) == 4, prompt
        assert len({t.prompt_tokens for t in samples}) == 1
        assert len({t.turns for t in samples}) == 4


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(2, 6000), st.floats(1, 30))
def test_no_trajectory_outgrows_its_context_and_all_can_be_run(seed: int, max_context: int, mean_turns: float) -> None:
    made = agent_trajectories(agent(mean_turns, max_context), 20, seed, samples_per_prompt=2)
    assert all(t.finished and t.prompt_tokens >= 1 and t.peak_context <= max_context for t in made)
    assert all(turn.generated_tokens >= 1 for t in made for turn in t.turns)
    assert made == agent_trajectories(agent(mean_turns, max_context), 20, seed, samples_per_prompt=2)
    assert len(list(Replay(made).start())) == 40


def test_a_description_names_every_parameter() -> None:
    described = generated_requests(3, Poisson(1.5), LogNormal(5, 1.0, 9), Constant(2), seed=8).describe()
    assert (
        json.loads(json.dumps(described))
        == described
        == {
            "name": "generated requests",
            "count": 3,
            "samples_per_prompt": 1,
            "arrivals": {"distribution": "Poisson", "rate": 1.5},
            "prompt_tokens": {"distribution": "LogNormal", "median": 5, "sigma": 1.0, "limit": 9},
            "output_tokens": {"distribution": "Constant", "tokens": 2},
            "seed": 8,
        }
    )
