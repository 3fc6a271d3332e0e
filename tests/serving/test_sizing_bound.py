"""What a bound refuses, simulation misses, too; and no request is faster in simulation than it says."""

from __future__ import annotations

import numpy as np
import pytest

from libra.serving.bound import Bounds
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.ladder import rate_of
from libra.serving.objective import Objective
from libra.serving.trial import trial
from libra.sim.workload.requests import RecordedRequest
from tests.serving.small_questions import CLUSTER, question, requests, simulations_within

CASES = 30  # for each seed
STATISTICS = ("mean", "p50", "p90", "p99")


def random_objectives(generator: np.random.Generator) -> list[Objective]:
    def one(metric: str, low: float, high: float) -> Objective:
        return Objective(metric, str(generator.choice(STATISTICS)), float(10 ** generator.uniform(low, high)))  # type: ignore[arg-type]

    objectives = [one("ttft", -1.5, 1)]
    if generator.random() < 0.8:
        objectives.append(one("tpot", -2.2, -0.5))
    if generator.random() < 0.3:
        objectives.append(one("latency", -0.5, 1.5))
    return objectives


def random_candidate(generator: np.random.Generator) -> ServingCandidate:
    apart = generator.random() < 0.5

    def pool(role: str) -> EnginePool:
        stages = 1 if role == "decode" or generator.random() < 0.7 else 2
        shape = EngineSetup(
            nodes=str(generator.choice([nodes.name for nodes in CLUSTER.nodes])),
            tensor_parallel_size=int(generator.choice([1, 2])),
            pipeline_parallel_size=stages,
            max_num_seqs=int(generator.choice([2, 16, 128])),
            max_num_batched_tokens=int(generator.choice([128, 512, 1024])),
            async_scheduling=stages == 1 and bool(generator.random() < 0.5),
        )
        return EnginePool(role, shape, int(generator.integers(1, 4)))  # type: ignore[arg-type]

    return ServingCandidate((pool("prefill"), pool("decode")) if apart else (pool("colocated"),))


@pytest.mark.parametrize("seed", range(10))
def test_simulation_never_betters_the_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    looked = 0
    for _ in range(CASES):
        recorded = requests(generator, int(generator.choice([4, 12, 40])), prefixes=bool(generator.random() < 0.3))
        host = str(generator.choice(["none", "default"]))
        asked = question(recorded, *random_objectives(generator), host=host)
        candidate = random_candidate(generator)
        bounds = Bounds(asked)
        bound = bounds.of(candidate)
        if "memory leaves" in bound.reason or "max_num_batched_tokens 128" in bound.reason:
            continue
        looked += simulations_within(bounds, bound, candidate, generator)
    assert looked > CASES


def test_memory_that_does_not_hold_a_request_is_a_reason() -> None:
    asked = question([RecordedRequest(0, 30_000, 10), RecordedRequest(10**12, 10, 10)], Objective("ttft", "p99", 1))
    bound = Bounds(asked).of(
        ServingCandidate((EnginePool("colocated", EngineSetup("small", 1, 1, 16, 512, False), 1),))
    )
    assert bound.rate == 0
    assert "less than the longest request (30,010)" in bound.reason


def test_what_cannot_be_met_without_a_queue_is_a_reason() -> None:
    asked = question(
        [RecordedRequest(0, 1000, 100), RecordedRequest(10**12, 1000, 100)], Objective("ttft", "p99", 1e-3)
    )
    bound = Bounds(asked).of(ServingCandidate((EnginePool("colocated", EngineSetup("h100", 1, 1, 16, 512, False), 1),)))
    assert bound.rate == 0
    assert bound.reason.startswith("ttft_p99 is 0.0")
    assert bound.reason.endswith("s or more without any queue")


def test_a_saturated_engine_comes_close_to_its_bound() -> None:
    """Prompts alone, whole batches of them: nothing that the bound leaves out is left out in simulation."""
    recorded = [RecordedRequest(number * 10**12, 512, 1) for number in range(400)]
    asked = question(recorded, Objective("ttft", "p99", 1.0))
    candidate = ServingCandidate((EnginePool("colocated", EngineSetup("h100", 1, 1, 16, 1024, False), 1),))
    bound = Bounds(asked).of(candidate).rate
    passed = [rung for rung in range(6 * 16, 8 * 16) if trial(asked, candidate, rate_of(rung)).passed]
    assert rate_of(max(passed)) <= bound <= 1.15 * rate_of(max(passed))
