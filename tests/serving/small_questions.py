"""Small questions about small clusters, with engine times of rooflines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite

import numpy as np

from libra.config.recipe import Recipe
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.bound import Bounds, RateBound
from libra.serving.candidate import ServingCandidate
from libra.serving.ladder import HIGHEST, LOWEST, rate_of
from libra.serving.objective import Objective
from libra.serving.question import Drafter, SizingQuestion
from libra.serving.trial import trial
from libra.sim.clock import ticks
from libra.sim.workload.requests import RecordedRequest

MODEL = load_model("Qwen/Qwen3-8B")
DRAFTER = "Qwen/Qwen3-0.6B"
_SMALL = GPU("Small", 21.5e9, 900e9, 100e12, 32e9, "none: of KV it holds some thousand tokens")
CLUSTER = Cluster(
    (
        NodeClass("h100", 4, 4, GPUS["H100"], GPUS["H100"].link, 50e9),
        NodeClass("l40s", 4, 4, GPUS["L40S"], 25e9, 12.5e9),
        NodeClass("small", 4, 4, _SMALL, 25e9, 12.5e9),
    )
)


@cache
def profiles(host: str = "none") -> tuple[EngineProfile, ...]:
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    return engine_profiles(CLUSTER, MODEL, recipe, "roofline", host=host)


@cache
def drafter() -> Drafter:
    small = load_model(DRAFTER)
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    return Drafter(small, engine_profiles(CLUSTER, small, recipe, "roofline"))


def question(
    requests: Sequence[RecordedRequest], *objectives: Objective, host: str = "none", **settings: float
) -> SizingQuestion:
    drafters = {DRAFTER: drafter()}
    return SizingQuestion(
        CLUSTER,
        MODEL,
        profiles(host),
        tuple(requests),
        objectives,
        drafters=drafters,
        **settings,  # type: ignore[arg-type]
    )


def requests(generator: np.random.Generator, count: int, *, prefixes: bool = False) -> list[RecordedRequest]:
    """Of lengths that differ much, from one draw to the next, too."""
    arrivals = np.cumsum(generator.exponential(generator.choice([0.1, 1.0]), count))
    prompts = np.clip(generator.lognormal(generator.uniform(2, 7), generator.uniform(0, 1), count), 1, 1500)
    outputs = np.clip(generator.lognormal(generator.uniform(0, 5), generator.uniform(0, 1), count), 1, 300)
    return [
        RecordedRequest(
            ticks(float(arrival)),
            int(prompt),
            int(output),
            *((f"prefix {number % 2}", int(prompt) // 2) if prefixes else ()),
        )
        for number, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def simulations_within(
    bounds: Bounds, bound: RateBound, candidate: ServingCandidate, generator: np.random.Generator
) -> int:
    """Simulate a candidate at random rates and at the first that its bound refuses; none may better the bound. Returns
    how many there were."""
    asked = bounds.question
    rungs = generator.integers(LOWEST, HIGHEST, 2).tolist()
    if isfinite(bound.rate) and bound.rate > 0:
        rungs.append(next(rung for rung in range(LOWEST, HIGHEST + 2) if rate_of(rung) > bound.rate))
    for rung in rungs:
        simulated = trial(asked, candidate, rate_of(rung), to_the_end=True)
        for objective in asked.objectives:
            least = bounds.least(candidate, objective)
            assert simulated.latency[objective.name] >= least * (1 - 1e-9), (candidate, objective)
        assert not (simulated.passed and rate_of(rung) > bound.rate), (candidate, asked.objectives, bound)
    return len(rungs)
