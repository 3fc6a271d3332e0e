"""The simulated schedule against vLLM's: random workloads on which every step has to be the same.

Invariant: both sides are given the same engine and the same requests, on a clock of one tick a step, and a case is
equal only if all its steps are: who computes how many tokens in which order, who is preempted, what the prefix cache
had, how many blocks are free, and who finishes in which order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import zip_longest

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.clocked import ClockedEngine, TierWorker, serve, simulated_steps, vllm_schedule
from tests.oracles.fidelity.groups import random_ranks, simulated_ranks
from tests.oracles.fidelity.prefill_decode import random_pair, simulated_pair, vllm_pair
from tests.oracles.fidelity.pulls import random_pulls, simulated_pulls, vllm_pulls
from tests.oracles.fidelity.random_workloads import async_case, random_case
from tests.oracles.fidelity.variants import Tiered, random_tier, tiered_cluster, with_drafts, with_groups
from tests.oracles.fidelity.vllm_ranks import vllm_ranks
from tests.oracles.fidelity.vllm_schedule import Step, VllmEngine

_OVERLAPPED = 1_000_000  # to the seed that stands for one whose tier is so slow that turns of a session overlap


@dataclass(frozen=True, slots=True)
class Compared:
    """Random cases, one or all. The counts are of vLLM's schedule."""

    cases: int
    equal: int
    counts: Mapping[str, int]
    difference: str | None  # the first one, for a reader


def case_of(kind: str, seed: int) -> tuple[EngineConfig, tuple[Request, ...]]:
    """The random case of a seed, with one engine."""
    config, requests = async_case(seed) if kind.endswith("async") else random_case(seed)
    if kind.startswith("hybrid"):
        config = with_groups(config, seed)
    return with_drafts(config, seed) if kind.startswith("drafts") else config, requests


def compare(seeds: Iterable[int], kind: str = "sync") -> Iterator[Compared]:
    """Compare the cases of these seeds lazily; each takes a few tens of milliseconds."""
    for seed in seeds:
        config, requests, ours, theirs = _schedules(kind, seed)
        wanted = [step for steps in theirs for step in steps]
        differences = (difference(mine, its) for mine, its in zip(ours, theirs, strict=True))
        found = next((it for it in differences if it is not None), None)
        counts = {
            "steps": len(wanted),
            "tokens scheduled": sum(tokens for step in wanted for _, tokens in step.scheduled),
            "preemptions": sum(len(step.preempted) for step in wanted),
            "prefix cache hits": sum(1 for step in wanted for _, tokens in step.cached if tokens),
            "cancelled requests": sum(request.status == "cancelled" for request in requests),
            "workloads with priorities": int(config.policy == "priority"),
        }
        settings = ", ".join(f"{field.name}={getattr(config, field.name)}" for field in fields(config))
        told = None if found is None else f"seed {seed} ({settings}), {found}"
        yield Compared(1, int(found is None), counts, told)


def _schedules(
    kind: str, seed: int
) -> tuple[EngineConfig, Sequence[Request], Sequence[Sequence[Step]], Sequence[Sequence[Step]]]:
    """An engine, the requests as they were simulated, and the steps of each engine: simulated, and vLLM's."""
    ahead, drafts, family = kind.endswith("-async"), "drafts" in kind, kind.partition("-")[0]
    if family in ("pull", "both"):
        pulls = partial(random_pulls, seed, drafts=kind == "both", ahead=ahead)
        config, requests, transfers = pulls()
        return config, requests, [simulated_pulls(config, requests, transfers)], [vllm_pulls(*pulls())]
    if family == "pd":
        tier, fails = kind == "pd-tiers", kind.startswith("pd-fails")
        ahead = seed % 2 == 1 if tier else ahead or drafts
        pairs = partial(random_pair, seed, ahead=ahead, drafts=drafts, tier=tier, fails=fails)
        pair, requests = pairs()
        return pair.decode, requests, simulated_pair(pair, requests), vllm_pair(*pairs())
    if family == "tiers":
        tiers = partial(random_tier, seed, ahead=seed % 2 == 1 if drafts else ahead, drafts=drafts)
        case, requests = tiers()
        iterations: list[Iteration] = []
        try:
            tiered_cluster(case, requests, trace=iterations.append).run()
        except ValueError as error:
            if "at the same time" not in str(error):
                raise
            return _schedules(kind, seed + _OVERLAPPED)
        return case.config, requests, [simulated_steps(iterations)], [vllm_tier(*tiers())]
    if family == "dp":
        groups = partial(random_ranks, seed, ahead=ahead, drafts=drafts)
        ranks, requests = groups()
        return ranks.config, requests, simulated_ranks(ranks, requests), vllm_ranks(*groups())
    config, requests = case_of(kind, seed)
    wanted = vllm_schedule(*case_of(kind, seed))
    return config, requests, [simulated_schedule(config, requests)], [wanted]


def summary(compared: Iterable[Compared]) -> Compared:
    """All cases together."""
    counts, cases = Counter[str](), list(compared)
    for case in cases:
        counts.update(case.counts)
    first = next((case.difference for case in cases if case.difference is not None), None)
    return Compared(len(cases), sum(case.equal for case in cases), counts, first)


def simulated_schedule(config: EngineConfig, requests: Sequence[Request]) -> tuple[Step, ...]:
    """Steps of the simulated engine, a tick each, jumping where it can. Writes the requests."""
    iterations: list[Iteration] = []
    workload = _Ended(requests)
    SimCluster([EngineSpec("engine", config, AffineCost(1))], workload, trace=iterations.append).run()
    return simulated_steps(iterations, finished=workload.finished_at)


def vllm_tier(case: Tiered, requests: Sequence[Request]) -> tuple[Step, ...]:
    """vLLM's steps with the scheduler half of its `OffloadingConnector`, which has the same costs of a block."""
    worker = TierWorker(case.store, case.load)
    return serve(ClockedEngine(VllmEngine(case.config), case.step, case.per_token, worker), requests)


def difference(ours: Sequence[Step], theirs: Sequence[Step]) -> str | None:
    """The first step that is not the same, told field by field. None: all are."""
    for number, (simulated, wanted) in enumerate(zip_longest(ours, theirs)):
        if simulated == wanted:
            continue
        if simulated is None or wanted is None:
            longer, step = ("vLLM's", wanted) if simulated is None else ("the simulated", simulated)
            return f"step {number}: only {longer} schedule goes on: {step}"
        told = [
            f"  {field.name}: simulated {mine}, vLLM {its}"
            for field in fields(Step)
            if (mine := getattr(simulated, field.name)) != (its := getattr(wanted, field.name))
        ]
        return "\n".join([f"step {number} at tick {wanted.time}:", *told])
    return None


class _Ended(Requests):
    """The requests, and in which order they finished."""

    def __init__(self, requests: Sequence[Request]) -> None:
        ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
        super().__init__(lambda: ordered, {})
        self.finished_at: dict[int, list[int]] = {}  # by tick

    def finished(self, request: Request, now: int) -> None:
        if request.status == "finished":
            self.finished_at.setdefault(now, []).append(request.number)
