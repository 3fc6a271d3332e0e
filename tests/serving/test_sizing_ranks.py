"""Data-parallel ranks on the menu: what they are, and that no bound of theirs is bettered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.bound import Bounds
from libra.serving.candidate import DataParallel, Drafts, EnginePool, EngineSetup, ServingCandidate
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.objective import Objective
from libra.serving.question import SizingQuestion
from libra.serving.search import answer
from libra.sim.engine.speculative import Speculative
from tests.serving.small_questions import question, requests, simulations_within

CLUSTER = Cluster((NodeClass("h200", 2, 8, GPUS["H200"], GPUS["H200"].link, 4e11),))
MODEL = load_model("Qwen/Qwen3-30B-A3B")


def of_experts(host: str, generator: np.random.Generator, count: int, *objectives: Objective) -> SizingQuestion:
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    profiles = engine_profiles(CLUSTER, MODEL, recipe, "roofline", host=host)
    return SizingQuestion(CLUSTER, MODEL, profiles, tuple(requests(generator, count)), objectives, None)


@pytest.mark.parametrize("seed", range(4))
def test_simulation_never_betters_the_bound_of_ranks(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(5):
        shape, other = (
            EngineSetup(
                "h200",
                int(generator.choice([1, 2])),
                1,
                int(generator.choice([2, 16, 64])),
                int(generator.choice([128, 1024])),
                bool(generator.random() < 0.5),
                parallel=DataParallel(
                    int(generator.choice([2, 4])),
                    "deepep_low_latency" if generator.random() < 0.5 else "allgather_reducescatter",
                ),
            )
            for _ in range(2)
        )
        if generator.random() < 0.4:
            drafts = Drafts(Speculative(str(generator.choice(["eagle3", "mtp"])), 3, (0.8, 0.5, 0.3)))
            shape, other = replace(shape, drafts=drafts), replace(other, drafts=drafts)
        if generator.random() < 0.5:  # prompts without experts divided, or the other way round
            other = replace(other, parallel=None)
        objectives = [Objective("ttft", "p90", float(10 ** generator.uniform(-1.5, 0.5)))]
        if generator.random() < 0.6:
            objectives.append(Objective("tpot", "mean", float(10 ** generator.uniform(-2.2, -1))))
        host = str(generator.choice(["none", "default"]))
        asked = of_experts(host, generator, int(generator.choice([4, 40])), *objectives)
        candidate = ServingCandidate((EnginePool("colocated", shape, 1),))
        if generator.random() < 0.5:
            pools = EnginePool("prefill", other, 1), EnginePool("decode", shape, 1)
            candidate = ServingCandidate(pools)
        bounds = Bounds(asked)
        bound = bounds.of(candidate)
        assert "memory" not in bound.reason or "KV memory" in bound.reason
        simulations_within(bounds, bound, candidate, generator)


def test_the_menu_has_the_ranks_that_divide_the_experts() -> None:
    asked = of_experts("none", np.random.default_rng(0), 4, Objective("ttft", "p99", 1.0))
    menu = ServingMenu(
        MenuFile(
            data_parallel_size=(1, 3, 8),
            all2all_backend=("deepep_low_latency",),
            tensor_parallel_size=(1,),
            max_num_seqs=(64,),
            max_num_batched_tokens=(1024,),
            architectures=("colocated",),
            engines=(1, 2),
        )
    )
    told = [str(it) for it in menu.candidates(replace(asked, rate=1.0))]
    assert told == [
        "1 x h200 tp1 seqs 64 tokens 1024 async",
        "2 x h200 tp1 seqs 64 tokens 1024 async",
        "1 x h200 tp1 dp8 deepep_low_latency seqs 64 tokens 1024 async",
        "2 x h200 tp1 dp8 deepep_low_latency seqs 64 tokens 1024 async",
    ]
    roles = ServingMenu(menu.file.model_copy(update={"architectures": ("prefill-decode",), "engines": (1,)}))
    assert [str(it) for it in roles.candidates(replace(asked, rate=1.0))] == [
        f"prefill: 1 x h200 tp1{one} seqs 64 tokens 1024 async, decode: 1 x h200 tp1{two} seqs 64 tokens 1024 async"
        for one in ("", " dp8 deepep_low_latency")
        for two in ("", " dp8 deepep_low_latency")
    ]
    found = answer(replace(asked, rate=1.0), menu)
    assert {point.candidate.devices for point in found.points} <= {1, 2, 8, 16}


def test_ranks_without_experts_are_refused() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    with pytest.raises(
        ValueError, match=r"data_parallel_size 2 of the menu: .* has no experts to divide; leave it out"
    ):
        list(ServingMenu(MenuFile(data_parallel_size=(1, 2))).candidates(asked))
