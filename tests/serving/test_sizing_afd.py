"""Attention and FFN apart in a search: the bound stays below what is simulated, and the menu has what can be."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from libra.config.recipe import Recipe
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.bound import Bounds
from libra.serving.candidate import Apart, DataParallel, EnginePool, EngineSetup, ServingCandidate
from libra.serving.engines import engines
from libra.serving.menu import AfdMenu, MenuFile, ServingMenu
from libra.serving.objective import Objective
from libra.serving.question import SizingQuestion
from libra.serving.search import answer
from libra.sim.workload.requests import RecordedRequest
from tests.serving import small_questions
from tests.serving.test_sizing_bound import random_objectives

MODEL = load_model("Qwen/Qwen3-30B-A3B")
CLUSTER = Cluster((NodeClass("h100", 4, 8, GPUS["H100"], GPUS["H100"].link, 400e9),))


@cache
def profiles(host: str) -> tuple[EngineProfile, ...]:
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    return engine_profiles(CLUSTER, MODEL, recipe, "roofline", host=host)


def question(
    recorded: list[RecordedRequest], *objectives: Objective, host: str = "none", **more: float
) -> SizingQuestion:
    return SizingQuestion(CLUSTER, MODEL, profiles(host), tuple(recorded), objectives, **more)  # type: ignore[arg-type]


def random_candidate(generator: np.random.Generator) -> ServingCandidate:
    seqs, tokens = int(generator.choice([2, 16, 128])), int(generator.choice([128, 512, 1024]))
    ffn = int(generator.choice([1, 2, 4]))
    apart = Apart(ffn * int(generator.integers(1, 4)), ffn, int(generator.integers(1, 5)))
    ranks = None if generator.random() < 0.6 else DataParallel(int(generator.choice([2, 4])), "deepep_low_latency")
    prefill = EngineSetup("h100", 2, 1, 16, 1024, bool(generator.integers(2)), parallel=ranks)
    decode = EngineSetup("h100", int(generator.choice([1, 2])), 1, seqs, tokens, bool(generator.integers(2)), apart)
    return ServingCandidate(
        (EnginePool("prefill", prefill, int(generator.integers(1, 3))), EnginePool("decode", decode, 1))
    )


@pytest.mark.parametrize("seed", range(6))
def test_simulation_never_betters_the_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    looked = 0
    for _ in range(12):
        recorded = small_questions.requests(generator, int(generator.choice([4, 40, 160])))
        host = str(generator.choice(["none", "default"]))
        asked = question(recorded, *random_objectives(generator), host=host)
        candidate = random_candidate(generator)
        bounds = Bounds(asked)
        bound = bounds.of(candidate)
        if "below max_num_seqs" in bound.reason:
            continue
        looked += small_questions.simulations_within(bounds, bound, candidate, generator)
    assert looked > 12


def test_the_bound_knows_what_experts_take() -> None:
    """Few FFN ranks for many attention ranks: these bound the rate, however few contexts there are."""
    recorded = [RecordedRequest(number * 10**9, 16, 200) for number in range(4000)]
    asked = question(recorded, Objective("ttft", "p99", 1.0), Objective("tpot", "p99", 0.03))
    prefill = EnginePool("prefill", EngineSetup("h100", 2, 1, 256, 8192, False), 2)

    def rate(ffn: int) -> float:
        shape = EngineSetup("h100", 1, 1, 256, 2048, False, Apart(8, ffn, 2))
        return Bounds(asked).of(ServingCandidate((prefill, EnginePool("decode", shape, 1)))).rate

    assert rate(1) < rate(8)


def test_a_group_has_ranks_and_gpus() -> None:
    asked = question([RecordedRequest(number * 10**11, 100, 20) for number in range(4)], Objective("ttft", "p99", 1.0))
    shape = EngineSetup("h100", 2, 1, 16, 1024, False, Apart(4, 2, 3))
    pool = EnginePool("decode", shape, 2)
    assert (pool.devices, pool.ranks, pool.kv_devices) == (20, 8, 16)
    assert str(shape) == "h100 4A2F in 3 tp2 seqs 16 tokens 1024"
    candidate = ServingCandidate((EnginePool("prefill", EngineSetup("h100", 2, 1, 16, 1024, False), 1), pool))
    assert candidate.architecture == "attention-ffn" and candidate.devices == 22
    made = engines(asked, candidate)
    assert len(made) == 9 and len({it.group for it in made}) == 3
    assert {it.devices for it in made} == {2}


def test_the_menu_has_the_pairs_that_can_be() -> None:
    recorded = [RecordedRequest(number * 10**11, 100, 20) for number in range(4)]
    asked = question(recorded, Objective("ttft", "p99", 1.0), gpus=24, rate=1.0)
    afd = AfdMenu(attention=(4, 6), ffn=(2, 4, 3), micro_batches=(2,))
    file = MenuFile(architectures=("attention-ffn",), tensor_parallel_size=(2,), engines=(1,), afd=afd)
    found = list(ServingMenu(file).candidates(asked))
    assert {it.pools[1].shape.apart for it in found} == {Apart(4, 2, 2), Apart(6, 2, 2), Apart(4, 4, 2)}
    none = SizingQuestion(
        small_questions.CLUSTER,
        small_questions.MODEL,
        small_questions.profiles(),
        tuple(recorded),
        (Objective("ttft", "p99", 1.0),),
    )
    with pytest.raises(ValueError, match="attention-ffn of the menu: afd: Qwen/Qwen3-8B has no experts"):
        list(ServingMenu(MenuFile(architectures=("attention-ffn",))).candidates(none))


def test_ranks_that_divide_experts_compute_prompts_for_groups() -> None:
    recorded = [RecordedRequest(number * 10**11, 100, 20) for number in range(4)]
    asked = question(recorded, Objective("ttft", "p99", 1.0), rate=1.0)
    file = MenuFile(
        architectures=("attention-ffn",),
        tensor_parallel_size=(2,),
        data_parallel_size=(1, 4),
        max_num_seqs=(64,),
        max_num_batched_tokens=(2048,),
        engines=(1,),
        afd=AfdMenu(attention=(4,), ffn=(4,), micro_batches=(2,)),
    )
    found = list(ServingMenu(file).candidates(asked))
    assert [(it.pools[0].shape.parallel, it.pools[1].shape.parallel) for it in found] == [
        (None, None),
        (DataParallel(4), None),
    ]
    assert all(it.architecture == "attention-ffn" for it in found)
    best = answer(asked, ServingMenu(file))
    assert [it.candidate.devices for it in best.points] == [2 + 12]
    assert [(it.candidate.devices, it.by) for it in best.rejected] == [(8 + 12, "dominated")]


def test_a_search_weighs_the_three_architectures() -> None:
    recorded = [RecordedRequest(number * 10**11, 100, 40) for number in range(40)]
    asked = question(recorded, Objective("ttft", "p99", 1.0), Objective("tpot", "p99", 0.1), gpus=16)
    file = MenuFile(
        architectures=("colocated", "prefill-decode", "attention-ffn"),
        tensor_parallel_size=(2,),
        max_num_seqs=(64,),
        max_num_batched_tokens=(2048,),
        engines=(1, 2),
        afd=AfdMenu(attention=(4,), ffn=(4,), micro_batches=(2,)),
    )
    found = answer(asked, ServingMenu(file))
    looked = {
        *(it.candidate.architecture for it in found.points),
        *(it.candidate.architecture for it in found.rejected),
    }
    assert looked == {"colocated", "prefill-decode", "attention-ffn"}
