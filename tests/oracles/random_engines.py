"""Engines of every kind that is simulated, at random.

Invariant: they are drawn from a configuration that is given, and stay within what may be combined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from libra.cost.afd import StageGrid
from libra.cost.expert_grid import ExpertGrid
from libra.cost.experts import Balancing, power_law
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST, HostCost
from libra.sim.engine.afd import AfdCost, AttentionFFN, attention_ranks
from libra.sim.engine.config import DECODE, EngineConfig, EngineRole, EngineSpec
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.group_cost import Graph, GroupSpec, MicroBatching, Together
from libra.sim.engine.iteration_cost import AffineCost
from tests.oracles.fidelity.variants import with_drafts, with_tier

Kind = Literal[
    "synchronous",
    "asynchronous",
    "pipelines",
    "drafts",
    "drafts, asynchronous",
    "ranks",
    "ranks with experts",
    "attention and FFN apart",
    "tiers",
    "tiers beside drafts",
    "shared tiers",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEAVY: tuple[Kind, ...] = ("ranks with experts", "attention and FFN apart")
HEAVIER = 10**6  # factor on the ticks of an iteration

_OWN = EngineGrid(1, (1, 128), (1, 512), ((1e-9, 2e-9), (2e-9, 9e-9)), (1, 512), (0, 512), ((1e-9, 2e-9), (5e-9, 7e-9)))
_EXPERTS = ExpertGrid(
    own=_OWN.slowed(1e6),
    layers=2,
    gpus=4,
    tokens=(1, 64, 4096),
    experts=(2e-5, 5e-5, 4e-3),
    exchange=(1e-5, 2e-5, 1e-3),
    expert_bytes=1e6,
    link=1e10,
    source="made up",
)
_STAGES = StageGrid(
    attention=_OWN.slowed(1e5),
    layers=4,
    dense=1,
    tokens=(1, 4096),
    outside=(3e-6, 5e-5),
    head=(3e-6, 5e-5),
    experts=(7e-6, 8e-3),
    ffn=2,
    token_bytes=4096.0,
    source="made up",
)


@dataclass(frozen=True)
class TogetherCost:
    """Cost of ranks: the cost of an engine, and a tick for each token of all ranks."""

    cost: AffineCost
    host: HostCost = NO_HOST

    def rank(self, graph: Graph) -> AffineCost:
        return self.cost

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        return Together(((1, tokens),))


def random_engines(
    kind: Kind, config: EngineConfig, random: Random, step: int, role: EngineRole, bucket: int
) -> list[EngineSpec]:
    """A few engines, or groups of ranks, of one kind and in one bucket. Their iterations take about `step` ticks."""
    seed = random.randrange(1 << 32)
    if kind == "pipelines":
        config = replace(config, pipeline_parallel_size=random.choice((2, 2, 3)))
    elif kind in ("asynchronous", "drafts, asynchronous"):
        config = replace(config, async_scheduling=True)
    elif kind not in ("synchronous", "drafts"):
        config = replace(config, async_scheduling=random.random() < 0.4)
    of_ranks = kind in ("ranks", "ranks with experts") and random.random() < 0.3
    if "drafts" in kind or of_ranks:
        config = with_drafts(config, seed)
    cost = random_cost(random, step)
    if "tiers" in kind:
        config, _, _ = with_tier(config, random, step)
    if kind == "shared tiers":
        (tier,) = config.kv_tiers
        host = replace(tier, chunks=4 * tier.chunks, offload_prompt_only=True)
        store = replace(host, name=f"{role.name} store {bucket}", shared=True)
        config = replace(config, kv_tiers=random.choice(((store,), (host, store))))
    name = f"{role.name}{bucket}-"
    spec = EngineSpec(name, config, cost, bucket, role=role, kv_bytes=37.0 if role == DECODE else 0.0)
    if kind == "attention and FFN apart":
        afd = AttentionFFN(
            attention=random.choice((2, 4)),
            ffn=2,
            bandwidth=random.choice((1e8, 1e10)),
            latency=1e-6,
            micro_batches=random.randint(1, 3),
            serial_links=random.random() < 0.5,
        )
        apart = AfdCost(_STAGES, config, afd)
        return attention_ranks(replace(spec, name=f"{name}afd"), apart)
    engines = []
    for number in range(random.choice((1, 1, 2, 3))):
        one = replace(spec, name=f"{name}{number}")
        if not kind.startswith("ranks"):
            engines.append(one)
            continue
        group = GroupSpec(one.name, TogetherCost(cost), random.choice((1, 4, 16)))
        if kind == "ranks with experts":
            group = _experts(one.name, config, random)
        engines += [
            replace(one, name=f"{one.name}.{place}", cost=group.cost.rank(Graph("NONE")), group=group)
            for place in range(4 if kind == "ranks with experts" else random.randint(1, 3))
        ]
    return engines


def _experts(name: str, config: EngineConfig, random: Random) -> GroupSpec:
    phase, drawn = random.choice((None, 7)), random.choice((None, None, 3))
    load = ExpertLoad(lambda number: power_law(16, 2, 1.2, 2, seed=number), 2, phase, drawn)
    balancing = random.choice((None, Balancing(num_redundant_experts=4, window_size=5, step_interval=9)))
    micro_batching = random.choice((None, MicroBatching(2, 2, 4)))
    return GroupSpec(name, ExpertCost(_EXPERTS, config, load, balancing), random.choice((1, 4, 16)), micro_batching)


def random_cost(random: Random, step: int) -> AffineCost:
    return AffineCost(step, *(random.choice((0, random.randint(0, most * step // 100))) for most in (3, 1, 2)))
