"""KV tiers on the menu: which engines have them, that no bound of theirs is bettered, and what they are worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.serving.bound import Bounds
from libra.serving.candidate import Drafts, EnginePool, EngineSetup, ServingCandidate
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import single_engines
from libra.serving.objective import Objective, parse_objectives
from libra.serving.search import answer
from libra.serving.trial import trial
from libra.sim.described_tiers import DescribedTier
from libra.sim.workload.requests import RecordedRequest
from tests.serving.small_questions import CLUSTER, question, requests, simulations_within
from tests.serving.test_sizing_bound import random_objectives
from tests.serving.test_sizing_drafts import EAGLE, random_drafts
from tests.serving.test_sizing_search import simulate_everything

CASES = 15  # for each seed
HOST = {"name": "host", "gib": 16, "bandwidth": 25e9}


def turns(generator: np.random.Generator, sessions: int, *, most: int = 400) -> list[RecordedRequest]:
    """Sessions whose turns go on with all that was said and up to `most` tokens, while others push it out of the GPU.
    Now and then somebody asks for the very same again; some lengths are whole blocks."""
    made, think = [], 20.0
    for session in range(sessions):
        arrival, known = float(generator.uniform(0, think)), 0
        for _ in range(int(generator.integers(1, 6))):
            new = 0 if known and generator.random() < 0.2 else int(generator.integers(1, most))
            if generator.random() < 0.5:
                new += -(known + new) % 16
            prompt, output = known + new, int(generator.integers(1, 60))
            if not prompt or prompt + output > 3500:
                break
            shared = prompt if generator.random() < 0.8 else known
            made.append(RecordedRequest(round(arrival * 1e12), prompt, output, f"session {session}", shared))
            arrival += float(generator.exponential(think))
            known = prompt + (output if generator.random() < 0.8 else 0)
    return sorted(made, key=lambda it: it.arrival)


def random_tiers(generator: np.random.Generator) -> tuple[DescribedTier, ...]:
    chunk, prompts = int(generator.choice([1, 1, 4])), bool(generator.random() < 0.6)
    return tuple(
        DescribedTier(
            name,
            float(generator.choice([0.6, 2.0, 64.0])),
            float(10 ** generator.uniform(8.5, 11)),
            float(generator.choice([0.0, 1e-3])),
            "arc" if generator.random() < 0.3 else "lru",
            chunk,
            prompts,
        )
        for name in ("host", "disk")[: int(generator.integers(1, 3))]
    )


def random_candidate(generator: np.random.Generator, drafts: Drafts | None) -> ServingCandidate:
    def pool(role: str) -> EnginePool:
        shape = EngineSetup(
            nodes=str(generator.choice([nodes.name for nodes in CLUSTER.nodes] + ["small"] * 2)),
            tensor_parallel_size=int(generator.choice([1, 2])),
            pipeline_parallel_size=1,
            max_num_seqs=int(generator.choice([2, 16, 128])),
            max_num_batched_tokens=int(generator.choice([128, 512, 1024])),
            async_scheduling=(drafts is None or drafts.speculative.method != "ngram") and bool(generator.integers(2)),
            drafts=drafts,
            kv_tiers=() if role == "decode" else random_tiers(generator),
        )
        return EnginePool(role, shape, int(generator.integers(1, 3)))  # type: ignore[arg-type]

    return ServingCandidate((pool("prefill"), pool("decode")) if generator.random() < 0.4 else (pool("colocated"),))


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("seed", range(6))
def test_simulation_never_betters_the_bound_of_tiers(seed: int, drafted: bool) -> None:
    generator = np.random.default_rng([seed, drafted])
    looked = 0
    for _ in range(CASES):
        if generator.random() < 0.8:
            recorded = turns(generator, int(generator.choice([2, 8, 20])), most=int(generator.choice([40, 400, 1200])))
        else:
            recorded = requests(generator, 12, prefixes=True)
        if len(recorded) < 2:
            continue
        asked = question(recorded, *random_objectives(generator), host=str(generator.choice(["none", "default"])))
        candidate = random_candidate(generator, random_drafts(generator) if drafted else None)
        bounds = Bounds(asked)
        bound = bounds.of(candidate)
        if "memory leaves" in bound.reason or "max_num_batched_tokens 128" in bound.reason:
            continue
        looked += simulations_within(bounds, bound, candidate, generator)
    assert looked > CASES


def test_whole_prompts_that_are_loaded_are_known_to_the_bound() -> None:
    """Of the same prompts of a block each, again and again, a tier leaves one token to compute, and the GPU's own cache
    all sixteen: far more are served than could be without tiers."""
    recorded = [RecordedRequest(number * 10**12, 16, 1, f"prompt {number % 200}", 16) for number in range(4000)]
    asked = question(recorded, Objective("ttft", "p50", 0.05))
    shape = EngineSetup("h100", 1, 1, 256, 256, async_scheduling=False)
    without = ServingCandidate((EnginePool("colocated", shape, 1),))
    tier = DescribedTier("host", 64.0, 1e12)
    having = ServingCandidate((EnginePool("colocated", replace(shape, kv_tiers=(tier,)), 1),))
    bounds = Bounds(asked)
    rate = 1.5 * bounds.of(without).rate
    assert trial(asked, having, rate).passed
    assert bounds.of(having).rate > rate


def menu(**given: object) -> ServingMenu:
    some = {"tensor_parallel_size": (1,), "max_num_seqs": (8, 64), "max_num_batched_tokens": (512,), "engines": (1,)}
    return ServingMenu(MenuFile.model_validate({**some, **given}))


@pytest.mark.parametrize("settings", [{"gpus": 2}, {"gpus": 2, "rate": 0.3}], ids=["any rate", "a rate"])
@pytest.mark.parametrize("drafts", [[None], [None, EAGLE]], ids=["plain", "drafts"])
def test_the_pareto_set_with_tiers_is_that_of_brute_force(settings: dict[str, float], drafts: list[object]) -> None:
    generator = np.random.default_rng(4)
    recorded = turns(generator, 20, most=1200)
    asked = question(recorded, *parse_objectives("ttft_p90=1,tpot_mean=0.1"), **settings)
    listed = menu(nodes=("small",), kv_tiers=(None, [HOST], [{**HOST, "gib": 0.6}]), speculative=drafts)
    found = answer(asked, listed)
    assert {str(it.candidate) for it in found.points} == simulate_everything(asked, listed)
    best, without = found.points[0], answer(asked, menu(nodes=("small",), speculative=drafts)).points[0]
    assert best.candidate.pools[0].shape.kv_tiers
    assert (-best.value, best.trial.ttft) < (-without.value, without.trial.ttft)


def test_engines_that_cannot_have_tiers_have_none() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0), rate=1.0)
    found = menu(nodes=("h100",), max_num_seqs=(64,), pipeline_parallel_size=(1, 2), kv_tiers=(None, [HOST]))
    shape = "h100 tp1 seqs 64 tokens 512 async"
    kinds = (shape, f"{shape} + 16 GiB host at 25 GB/s", "h100 tp1 pp2 seqs 64 tokens 512")
    assert [str(it) for it in found.candidates(asked)] == [
        *(f"1 x {it}" for it in kinds),
        *(f"prefill: 1 x {it}, decode: 1 x {shape}" for it in kinds),
    ]


def test_a_plan_mixes_engines_with_the_tiers_that_serve_most() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0), rate=1.0)
    options, shapes = single_engines(asked, menu(nodes=("h100",), max_num_seqs=(64,), kv_tiers=([HOST],)))
    roles = {it.role for it, shape in zip(options, shapes, strict=True) if shape.kv_tiers}
    assert roles == {"colocated", "prefill"} < {it.role for it in options}
    both = menu(nodes=("h100",), max_num_seqs=(64,), kv_tiers=([HOST], None))
    assert not any(it.kv_tiers for it in single_engines(asked, both)[1])  # nobody shares a prefix
    asked = question(turns(np.random.default_rng(4), 20, most=1200), Objective("ttft", "p90", 0.6), rate=1.0)
    both = menu(architectures=["colocated"], nodes=("small",), max_num_seqs=(64,), kv_tiers=(None, [HOST]))
    (option,), (shape,) = single_engines(asked, both)
    assert shape.kv_tiers and "16 GiB host" in option.name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [{**HOST, "gib": 0.001}],
            r"kv_tiers.1.0.gib is 0.001: host has room for 0 tokens, less than the longest request of .*: raise gib",
        ),
        (
            [{**HOST, "bandwidth": 1e3}],
            r"kv_tiers.1.0.bandwidth is 1000 bytes/s: .* more than 60 minutes: raise bandwidth",
        ),
        ([HOST, HOST], r"kv_tiers.1.1.name is host, the name of another tier: give each tier its own name"),
        (
            [HOST, {**HOST, "name": "disk", "blocks_per_chunk": 4}],
            r"kv_tiers.1.1.blocks_per_chunk is 4, but that of host is 1",
        ),
        (
            [{**HOST, "shared": True}],
            r"kv_tiers.1.0.shared of the menu: a search supports no shared tiers; leave it out",
        ),
    ],
)
def test_tiers_that_cannot_be_are_refused(given: object, said: str) -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    with pytest.raises(ValueError, match=said):
        answer(asked, menu(nodes=("h100",), kv_tiers=(None, given)))


def test_tiers_of_engines_that_generate_for_others_are_refused() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    shape = EngineSetup("h100", 1, 1, 16, 512, async_scheduling=False, kv_tiers=(DescribedTier("host", 16.0, 25e9),))
    with pytest.raises(ValueError, match=r"kv_tiers of decode-1\.0, which has the role decode, are not simulated"):
        trial(asked, ServingCandidate((EnginePool("prefill", shape, 1), EnginePool("decode", shape, 1))), 1.0)
