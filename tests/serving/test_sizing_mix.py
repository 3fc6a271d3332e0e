"""Plans of many engines: what single ones serve, the simulation of the whole, and what follows when that misses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.serving import ladder, mix
from libra.serving.candidate import EnginePool, ServingCandidate
from libra.serving.ladder import STEPS, highest_rate, repeated
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import plan_mix
from libra.serving.mix_problem import ServingPlan, ServingProblem, solve_serving
from libra.serving.objective import parse_objectives
from libra.serving.question import LASTING, SizingQuestion
from libra.serving.trial import trial
from libra.sim.workload.requests import RecordedRequest
from tests.serving.small_questions import question, requests

MENU = ServingMenu(
    MenuFile(max_num_seqs=(64,), max_num_batched_tokens=(512,), tensor_parallel_size=(1,), nodes=("h100", "l40s"))
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SizingQuestion:
    monkeypatch.setattr(mix, "_ARRIVALS", 200)
    monkeypatch.setattr(ladder, "LASTING", 4)  # what lasts as long as that is enough for so few
    recorded = requests(np.random.default_rng(3), 60)
    return question(recorded, *parse_objectives("ttft_p99=1,tpot_p99=0.06"), rate=60.0)


def test_a_plan_serves_the_rate_within_the_objectives(asked: SizingQuestion) -> None:
    told: list[tuple[str, int, int]] = []
    found = plan_mix(asked, MENU, tell=lambda *it: told.append(it))
    *engines, last = told
    assert [it[1:] for it in engines] == [(done, len(engines) - 1) for done in range(len(engines))]
    assert last == (f"simulating plan {len(found.missed) + 1}: {found.candidate}", 0, 0)
    assert found.trial.rate == 60
    assert all(found.trial.latency[it.name] <= it.limit for it in asked.objectives)
    assert found.plan.proven
    assert found.candidate.devices == sum(
        option.gpus * count for option, count in zip(found.options, found.plan.counts, strict=True)
    )


def test_a_plan_that_misses_is_cut(asked: SizingQuestion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single engines that promise too much: plans grow until one does."""
    honest = mix.single_engines

    def boasting(*arguments: object) -> object:
        options, shapes = honest(*arguments)  # type: ignore[arg-type]
        return tuple(replace(it, rate=4 * it.rate) for it in options), shapes

    tried: list[ServingPlan] = []

    def remembered(problem: ServingProblem) -> ServingPlan:
        assert len(problem.cuts) == len(tried)
        tried.append(solve_serving(problem))
        return tried[-1]

    monkeypatch.setattr(mix, "single_engines", boasting)
    monkeypatch.setattr(mix, "solve_serving", remembered)
    found = plan_mix(asked, MENU)
    assert len(found.missed) == len(tried) - 1 > 0
    assert [it.cost for it in tried] == sorted(it.cost for it in tried)
    assert f"{len(found.missed)} cheaper plans missed" in found.claim()


def test_what_single_engines_serve_lasts(asked: SizingQuestion, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 requests are over so soon that an engine serves them at rates at which it falls behind all the time."""
    monkeypatch.setattr(ladder, "LASTING", LASTING)
    options, shapes = mix.single_engines(
        asked, ServingMenu(MENU.file.model_copy(update={"architectures": ("colocated",)}))
    )
    alone = replace(asked, rate=None)
    short = 0
    for option, shape in zip(options, shapes, strict=True):
        candidate = ServingCandidate((EnginePool("colocated", shape, 1),))
        rung_below = option.rate / 2 ** (1 / STEPS)
        assert trial(alone, candidate, rung_below, requests=repeated(asked.requests, 10_000)).passed
        once = highest_rate(alone, candidate)
        assert once is not None
        short += once.rate > option.rate
    assert short


def test_a_record_is_repeated_at_its_own_rate() -> None:
    record = [RecordedRequest(1, 5, 5), RecordedRequest(3, 6, 6), RecordedRequest(5, 7, 7)]
    assert [it.arrival for it in repeated(record, 5)] == [1, 3, 5, 7, 9, 11]
    assert repeated(record, 2) == tuple(record)
