"""What pools and idle engines say of a pair: no simulation of the pair betters it."""

from __future__ import annotations

import numpy as np
import pytest

from libra.serving.bound import Bounds
from libra.serving.candidate import ServingCandidate
from libra.serving.holding import held_bounds, held_rate
from libra.serving.ladder import Asking, rate_of, rung_of
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.objective import parse_objectives
from libra.serving.pools import Pools
from libra.serving.question import SizingQuestion
from tests.serving.small_questions import question, requests


def pairs(seed: int) -> tuple[SizingQuestion, list[ServingCandidate]]:
    generator = np.random.default_rng(seed)
    asked = question(requests(generator, 40), *parse_objectives("ttft_p95=0.5,tpot_p90=0.05"), gpus=4)
    file = MenuFile(
        architectures=("prefill-decode",),
        nodes=("h100", "l40s"),
        tensor_parallel_size=(1,),
        max_num_seqs=(8,),
        max_num_batched_tokens=(512,),
    )
    every = list(ServingMenu(file).candidates(asked))
    return asked, [every[it] for it in generator.choice(len(every), 3, replace=False)]


@pytest.mark.parametrize("seed", range(4))
def test_a_pair_serves_no_more_than_its_pools(seed: int) -> None:
    asked, candidates = pairs(seed)
    bounds = Bounds(asked)
    pools, bounded = Pools(asked, bounds, candidates), held_bounds(bounds, candidates)
    for candidate in candidates:
        held = held_rate(asked, Asking(candidate))
        if held.trial is None:
            continue
        rate = held.trial.rate
        assert pools.miss(candidate, rate) is None
        assert rate <= pools.highest(candidate, rate)
        assert rate <= bounded[candidate].rate <= bounds.of(candidate).rate
        ttft, tpot = bounds.idle(candidate)
        assert bounded[candidate].ttft <= ttft <= held.trial.ttft
        assert bounded[candidate].tpot <= tpot <= held.trial.tpot
        assert pools.ttft(candidate, rate) <= held.trial.ttft


def test_a_miss_of_a_pool_is_known_at_higher_rates_and_of_fewer_engines() -> None:
    asked, candidates = pairs(0)
    pools = Pools(asked, Bounds(asked), candidates)
    candidate = candidates[0]
    most = pools.highest(candidate, 1.0)
    above = rate_of(rung_of(most) + 2)
    miss = pools.miss(candidate, above)
    assert miss is not None and miss.pool == candidate.pools[0]
    assert str(miss).startswith("its prefill engines alone miss ttft_p95 at ")
    runs = pools.runs
    assert pools.miss(candidate, 2 * above) == miss
    assert pools.runs == runs
