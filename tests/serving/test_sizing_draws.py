"""Draws of a record: the same each time, with longer requests of the record in their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.serving.draws import ANSWER_DRIFT, GAP_DRIFT, PROMPT_DRIFT, draws, drift_of, raised
from libra.serving.holding import checked, held_rate
from libra.serving.ladder import Asking
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.objective import parse_objectives
from libra.sim.workload.requests import RecordedRequest
from tests.serving.small_questions import question, requests

ONE = ServingMenu(MenuFile(nodes=("h100",), tensor_parallel_size=(1,), max_num_seqs=(64,), engines=(1,)))


@pytest.mark.parametrize("seed", range(5))
def test_a_draw_raises_one_mean_and_the_rate(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(5, 0.7, (2, 900)).astype(int) + 1
    arrivals = (generator.exponential(1e11, 900).cumsum() + 5e12).astype(int).tolist()
    record = tuple(RecordedRequest(at, p, o) for at, (p, o) in zip(arrivals, lengths.T.tolist(), strict=True))
    made = draws(record)
    assert made == draws(tuple(record)) and [it.name for it in made] == ["longer prompts", "longer answers"]
    for draw, of, prior in zip(made, (0, 1), (PROMPT_DRIFT, ANSWER_DRIFT), strict=True):
        drawn = [(it.prompt_tokens, it.output_tokens)[of] for it in draw.requests]
        longer, denser = raised(lengths[of].astype(float), prior, np.diff(arrivals))
        assert np.mean(drawn) / lengths[of].mean() == pytest.approx(longer, rel=0.05)
        gap = np.diff([it.arrival for it in draw.requests]).mean()
        assert np.diff(arrivals).mean() / gap == pytest.approx(denser, rel=1e-6) and draw.density == denser
        known = {(it.prompt_tokens, it.output_tokens) for it in record}
        assert {(it.prompt_tokens, it.output_tokens) for it in draw.requests} <= known


@pytest.mark.parametrize("seed", range(5))
def test_no_direction_raises_the_load_more(seed: int) -> None:
    """By the first order of the load, over all directions of three standard deviations."""
    generator = np.random.default_rng(seed)
    lengths, gaps = generator.lognormal(5, 1, 2500), generator.exponential(1.0, 2499)
    longer, denser = raised(lengths, PROMPT_DRIFT, gaps)
    angle = np.linspace(0, np.pi / 2, 10_001)
    another = drift_of(lengths, PROMPT_DRIFT) * np.sqrt(1 + 1000 / 3500)
    load = 3 * (another * np.cos(angle) + drift_of(gaps, GAP_DRIFT) * np.sin(angle))
    assert longer + denser - 2 == pytest.approx(load.max(), rel=1e-6)


def test_a_request_that_is_drawn_again_has_a_prefix_of_its_own() -> None:
    record = tuple(RecordedRequest(it * 10**12, 10 + 90 * (it % 2), 5 + it, "p", 8) for it in range(40))
    prompts = draws(record)[0].requests
    for request in prompts:
        assert [it.prefix for it in prompts if it.output_tokens == request.output_tokens].count(request.prefix) == 1


def test_requests_of_one_length_have_no_draws() -> None:
    assert draws(tuple(RecordedRequest(it * 10**12, 300, 40) for it in range(60))) == ()


def test_steady_lengths_are_believed_the_more_the_more_there_are() -> None:
    few, many = (np.tile([100.0, 300.0], count) for count in (100, 10_000))
    assert PROMPT_DRIFT > drift_of(few, PROMPT_DRIFT) > 3 * drift_of(many, PROMPT_DRIFT)


def test_what_holds_was_served_on_every_draw() -> None:
    asked = question(requests(np.random.default_rng(1), 60), *parse_objectives("ttft_p90=0.5,tpot_mean=0.05"))
    candidate = next(ONE.candidates(asked))
    held = held_rate(asked, Asking(candidate))
    assert held.trial is not None
    again = checked(asked, candidate, held.trial.rate)
    assert [it.name for it in held.checks] == list(again)
    for check in held.checks:
        assert max(check.shares.values()) <= 1
        assert check.shares == {it.name: again[check.name].latency[it.name] / it.limit for it in asked.objectives}
    too_much = held_rate(asked, Asking(candidate, least=64 * held.trial.rate))
    assert too_much.too_little and too_much.trial is None
    given = replace(asked, rate=held.trial.rate)
    assert held_rate(given, Asking(candidate)).trial is not None
