"""Drafts on the menu: what they are, and that no bound of theirs is bettered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from libra.serving.bound import Bounds
from libra.serving.candidate import Drafts, EnginePool, EngineSetup, ServingCandidate
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import plan_mix
from libra.serving.objective import Objective, parse_objectives
from libra.serving.search import answer
from libra.sim.engine.speculative import SEQUENTIAL, Speculative
from tests.serving.small_questions import CLUSTER, DRAFTER, question, requests, simulations_within
from tests.serving.test_sizing_bound import random_objectives
from tests.serving.test_sizing_search import simulate_everything

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.8, 0.5, 0.3]}

CASES = 15  # for each seed


def random_drafts(generator: np.random.Generator) -> Drafts:
    method, count = str(generator.choice(SEQUENTIAL)), int(generator.integers(1, 6))
    rates = tuple(sorted(generator.uniform(0, 1, count).tolist(), reverse=True))
    if generator.random() < 0.3:
        speculative = Speculative(method, count, accepted=tuple(generator.integers(0, count + 1, 7).tolist()))
    else:
        speculative = Speculative(method, count, rates, seed=int(generator.integers(3)))
    return Drafts(speculative, DRAFTER if method == "draft_model" else None)


def random_candidate(generator: np.random.Generator) -> ServingCandidate:
    drafts = random_drafts(generator)

    def pool(role: str) -> EnginePool:
        shape = EngineSetup(
            nodes=str(generator.choice([nodes.name for nodes in CLUSTER.nodes])),
            tensor_parallel_size=int(generator.choice([1, 2])),
            pipeline_parallel_size=1,
            max_num_seqs=int(generator.choice([2, 16, 128])),
            max_num_batched_tokens=int(generator.choice([128, 512, 1024])),
            async_scheduling=drafts.speculative.method != "ngram" and bool(generator.random() < 0.5),
            drafts=drafts,
        )
        return EnginePool(role, shape, int(generator.integers(1, 3)))  # type: ignore[arg-type]

    return ServingCandidate((pool("prefill"), pool("decode")) if generator.random() < 0.5 else (pool("colocated"),))


@pytest.mark.parametrize("seed", range(5))
def test_simulation_never_betters_the_bound_of_drafts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    looked = 0
    for _ in range(CASES):
        recorded = requests(generator, int(generator.choice([4, 12, 40])), prefixes=bool(generator.random() < 0.3))
        asked = question(recorded, *random_objectives(generator), host=str(generator.choice(["none", "default"])))
        candidate = random_candidate(generator)
        bounds = Bounds(asked)
        bound = bounds.of(candidate)
        if "memory leaves" in bound.reason or "max_num_batched_tokens 128" in bound.reason:
            continue
        looked += simulations_within(bounds, bound, candidate, generator)
    assert looked > CASES


def menu(**given: object) -> ServingMenu:
    some = {"tensor_parallel_size": (1,), "max_num_seqs": (8, 64), "max_num_batched_tokens": (512,), "engines": (1,)}
    return ServingMenu(MenuFile.model_validate({**some, **given}))


@pytest.mark.parametrize("settings", [{"gpus": 2}, {"gpus": 2, "rate": 6.0}], ids=["any rate", "a rate"])
def test_the_pareto_set_with_drafts_is_that_of_brute_force(settings: dict[str, float]) -> None:
    generator = np.random.default_rng(5)
    asked = question(requests(generator, 40), *parse_objectives("ttft_p90=0.5,tpot_mean=0.05"), **settings)
    listed = menu(nodes=("h100", "l40s"), speculative=(None, EAGLE, {**EAGLE, "method": "ngram"}))
    found = answer(asked, listed)
    assert {str(it.candidate) for it in found.points} == simulate_everything(asked, listed)
    assert any(it.candidate.pools[-1].shape.drafts is not None for it in found.points)


def test_the_menu_leaves_out_what_is_not_simulated() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0), rate=1.0)
    found = menu(
        nodes=("h100",),
        max_num_seqs=(64,),
        pipeline_parallel_size=(1, 2),
        async_scheduling=(True, False),
        speculative=(EAGLE, {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_length": 1.5}),
    )
    shape = "h100 tp1 seqs 64 tokens 512"
    kinds = (
        f"{shape} async 3 drafts of eagle3 for 2.6 tokens",
        f"{shape} 2 drafts of ngram for 1.5 tokens",
        f"{shape} 3 drafts of eagle3 for 2.6 tokens",
    )
    assert [str(it) for it in found.candidates(asked)] == [
        *(f"1 x {it}" for it in kinds),
        *(
            f"prefill: 1 x {one}, decode: 1 x {two}"
            for one, two in product(kinds, kinds)
            if ("ngram" in one) == ("ngram" in two)
        ),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"synthetic_acceptance_rates": [0.2, 0.5, 0.3]}, r"speculative.1 of the menu: .* and rises"),
        ({"method": "dflash"}, r"speculative.1 of the menu: method is dflash"),
        ({"method": "draft_model"}, r"speculative.1 of the menu: model is None"),
    ],
)
def test_drafts_that_cannot_be_are_refused(given: dict[str, object], said: str) -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    with pytest.raises(ValueError, match=said):
        list(menu(speculative=(None, {**EAGLE, **given})).candidates(asked))


def test_pipelines_are_synchronous_and_do_not_generate_for_others() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0), rate=1.0)
    found = menu(nodes=("h100",), max_num_seqs=(64,), pipeline_parallel_size=(1, 2))
    one, two = "h100 tp1 seqs 64 tokens 512 async", "h100 tp1 pp2 seqs 64 tokens 512"
    assert [str(it) for it in found.candidates(asked)] == [
        f"1 x {one}",
        f"1 x {two}",
        f"prefill: 1 x {one}, decode: 1 x {one}",
        f"prefill: 1 x {two}, decode: 1 x {one}",
    ]
    assert not list(menu(pipeline_parallel_size=(2,), speculative=(EAGLE,)).candidates(asked))


def test_a_plan_with_roles_takes_one_kind_of_drafts() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0), rate=1.0)
    with pytest.raises(ValueError, match="speculative has several entries, but a plan"):
        plan_mix(asked, menu(speculative=(None, EAGLE)))


def test_a_draft_model_must_take_the_longest_request() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    drafter = asked.drafters[DRAFTER]
    short = replace(drafter, model=replace(drafter.model, max_context=8))
    with pytest.raises(ValueError, match="a draft model, is made for 8 tokens"):
        replace(asked, drafters={DRAFTER: short})
