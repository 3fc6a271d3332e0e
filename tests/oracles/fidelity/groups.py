"""Data-parallel ranks that step together: simulated, and what a step of theirs takes by vLLM's rules.

Invariant: the kind and the padding that hold for all are those of vLLM's dispatcher of CUDA graphs and of its
`dp_utils`. Both sides have the same costs. At a tick steps end, requests are cancelled, requests arrive, the next steps
are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.dp_utils import _post_process_cudagraph_mode, _post_process_dp_padding, _post_process_ubatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.ubatch_utils import check_ubatch_thresholds

from libra.cost.graphs import capture_sizes
from libra.cost.host import NO_HOST, HostCost
from libra.route.baselines import RoundRobin
from libra.route.policy import Fleet, Placement, TurnRequest
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.group_cost import Graph, GroupSpec, MicroBatching, Together
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.clocked import simulated_steps
from tests.oracles.fidelity.graphs import dispatcher
from tests.oracles.fidelity.variants import drawn_case, stretch
from tests.oracles.fidelity.vllm_schedule import Step

_KINDS = {"NONE": 0, "PIECEWISE": 3, "FULL": 1}  # ticks of launching
_WHOLE = 5  # ticks more of a step that is not divided into micro-batches


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step takes `step + own * requests of the rank with most + each * tokens of all + its graph's` ticks, padding
    counted among all tokens."""

    step: int
    own: int
    each: int
    host: HostCost = NO_HOST

    def rank(self, graph: Graph) -> AffineCost:
        return AffineCost(self.step, per_sequence=self.own, per_chunk=self.own)

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        return Together(((1, self.each * tokens + _KINDS[graph.kind] + _WHOLE * graph.whole),))


@dataclass(frozen=True, slots=True)
class Ranks:
    count: int
    config: EngineConfig
    cost: StepCost
    sync_interval: int
    micro_batching: MicroBatching | None


def random_ranks(seed: int, *, ahead: bool = False, drafts: bool = False) -> tuple[Ranks, tuple[Request, ...]]:
    """The random case of a seed for ranks like its engine, with CUDA graphs or without; with `ahead` they schedule
    asynchronously."""
    config, requests = drawn_case(seed, ahead=ahead, drafts=drafts)
    random = Random(seed)
    cost = StepCost(random.randint(1, 50), random.randint(0, 2), random.randint(0, 1))
    stretch(requests, cost.step)
    if random.random() < 0.7:
        sizes = capture_sizes(config.max_num_seqs, config.max_num_batched_tokens, tokens_each=config.tokens_each)
        config = replace(config, capture_sizes=sizes)
    count, interval = random.randint(2, 6), random.choice((1, 3, 16, 16))
    micro_batching = None
    if random.random() < 0.5:
        parts = random.choice((2, 2, 3))
        micro_batching = MicroBatching(parts, random.randint(parts, 12), random.randint(parts, 40))
    return Ranks(count, config, cost, interval, micro_batching), requests


class _ByNumber(RoundRobin):
    """Requests go to the rank of their number."""

    def __init__(self, requests: Sequence[Request], count: int) -> None:
        super().__init__()
        self._priorities = {str(request.number): request.priority for request in requests}
        self._count = count

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement:
        name = request.trajectory_id
        return Placement(f"rank {int(name) % self._count}", 0, False, "its number", self._priorities[name])


def simulated_ranks(ranks: Ranks, requests: Sequence[Request]) -> list[tuple[Step, ...]]:
    """The steps of each simulated rank except its dummy batches."""
    iterations: list[Iteration] = []
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    group = GroupSpec("group", ranks.cost, ranks.sync_interval, ranks.micro_batching)
    cost = ranks.cost.rank(Graph("NONE"))
    specs = [EngineSpec(f"rank {place}", ranks.config, cost, group=group) for place in range(ranks.count)]
    workload = Requests(lambda: ordered, {})
    SimCluster(specs, workload, _ByNumber(requests, ranks.count), trace=iterations.append).run()
    return [simulated_steps(iterations, place) for place in range(ranks.count)]


def step_ticks(ranks: Ranks, rows_of_ranks: Sequence[Sequence[int]]) -> int:
    """Ticks of a step; `rows_of_ranks` has, for each rank, the tokens of each of its requests."""
    config, dispatch = ranks.config, None
    if config.capture_sizes:
        dispatch = dispatcher("FULL_AND_PIECEWISE", config.max_num_seqs, config.capture_sizes, config.tokens_each)
    told, rule = [], ranks.micro_batching
    parallel: Any = SimpleNamespace(use_ubatching=rule is not None)
    if rule is not None:
        parallel.dbo_decode_token_threshold = rule.dbo_decode_token_threshold
        parallel.dbo_prefill_token_threshold = rule.dbo_prefill_token_threshold
    for rows in rows_of_ranks:
        kind, size = CUDAGraphMode.NONE, sum(rows)
        uniform = GPUModelRunner._is_uniform_decode(max(rows), config.tokens_each, sum(rows), len(rows))
        if dispatch is not None:
            kind, graph = dispatch.dispatch(sum(rows), uniform_decode=uniform)
            size = graph.num_tokens
        told.append((sum(rows), size, check_ubatch_thresholds(parallel, sum(rows), uniform), kind.value))
    synchronised = torch.tensor(told, dtype=torch.int32).T
    mode = _post_process_cudagraph_mode(synchronised)
    divided = rule is not None and _post_process_ubatch(synchronised, rule.count)
    padded = int(_post_process_dp_padding(synchronised, should_dp_pad=mode != 0 or divided).sum())
    cost, launch = ranks.cost, _KINDS[CUDAGraphMode(mode).name] + _WHOLE * (rule is not None and not divided)
    return cost.step + cost.own * max(map(len, rows_of_ranks)) + cost.each * padded + launch
