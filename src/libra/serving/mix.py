"""Mixes of engines of many shapes and GPU types for a rate of requests. A solver plans a mix, a simulation checks it,
and after a miss the solver plans again.

Invariant: a returned mix served the requests within every objective in its own simulation. The solver proves that no
mix costs less at the rates of single engines. Many engines together serve more than the sum of single engines, so a
cheaper mix may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import process_time
from typing import Any

from libra.choose.forked import mapping
from libra.cost.quantization import AS_STORED
from libra.cost.transfer import fabric
from libra.route.baselines import LeastLoaded
from libra.route.policy import Instance
from libra.serving.answer import bottleneck
from libra.serving.bound import Bounds, refuse_impossible
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.ladder import Asking, lasting_rate, repeated
from libra.serving.menu import ServingMenu, refuse_empty, refuse_too_dear
from libra.serving.mix_problem import ServingOption, ServingPlan, ServingProblem, solve_serving
from libra.serving.objective import Objective
from libra.serving.question import SizingQuestion
from libra.serving.trial import Trial, trial

_AMPLE = 16  # engines of the other role in the simulation of one engine
_BOUNDED = 4_000  # least number of requests in bounds on the rate of one engine
_ARRIVALS = 20_000  # least number of requests in the simulation of a plan
_PLANS = 40  # simulated plans after which the search gives up
_GOLDEN = 0.618034  # golden ratio: the fractional parts of its multiples are spread evenly

Tell = Callable[[str, int, int], None]  # (message, finished steps, all steps); 0 and 0: unknown


class NoMixError(ValueError):
    """No engine serves any rate, or no plan passed its simulation."""


@dataclass(frozen=True, slots=True)
class ServingMix:
    question: SizingQuestion
    candidate: ServingCandidate
    options: tuple[ServingOption, ...]  # with the rates that single engines serve
    plan: ServingPlan
    trial: Trial
    missed: tuple[str, ...]  # earlier plans, each with its missed objective
    solver_seconds: float  # CPU time of all plans

    def claim(self) -> str:
        kind = "the least" if self.plan.proven else f"the least is {self.plan.bound:g} or more"
        tried = f"; {len(self.missed)} cheaper plans missed an objective in simulation" if self.missed else ""
        return f"{kind} for what single engines serve (proven by CP-SAT){tried}"

    def document(self) -> dict[str, Any]:
        """The mix as JSON values."""
        return {
            "candidate": asdict(self.candidate),
            "gpus": self.candidate.devices,
            "cost": self.plan.cost,
            "cost_bound": self.plan.bound,
            "claim": self.claim(),
            "rate": self.trial.rate,
            "latency": self.trial.latency,
            "bottleneck": bottleneck(self.question, self.candidate, self.trial),
            "options": [asdict(it) for it in self.options],
            "missed": list(self.missed),
        }


class Weighted(LeastLoaded):
    """Routes a request to the instance with the least load relative to the instance's rate."""

    NAME = "least-loaded-by-rate"
    REASON = "least loaded for its rate"

    def __init__(self, rates: Mapping[str, float]) -> None:
        super().__init__(sticky=False)
        self._rates = rates

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        rates = self._rates
        fitting = (place for place, it in enumerate(instances) if needed <= it.capacity_tokens)
        return min(
            fitting, key=lambda it: ((instances[it].load_tokens + needed) / rates[instances[it].id], it), default=None
        )


def plan_mix(
    question: SizingQuestion,
    menu: ServingMenu,
    *,
    jobs: int = 1,
    note: Callable[[str], None] = lambda _: None,
    tell: Tell = lambda *_: None,
) -> ServingMix:
    """Find the cheapest mix that serves the question's rate. `note` gets a line for each missed plan, and `tell` gets
    progress messages.

    Raises `InfeasiblePlanError` if the GPUs or the budget are too few, `NoMixError` if plans keep missing an objective,
    and ValueError if the question gives no rate.
    """
    rate = question.rate
    if rate is None:
        raise ValueError("rate is missing: give the rate of requests to plan for")
    refuse_too_dear(question, menu)
    options, shapes = single_engines(question, menu, jobs, tell)
    problem = ServingProblem(
        rate, options, {it.name: it.devices for it in question.cluster.nodes}, question.gpus, question.budget
    )
    records = repeated(question.requests, _ARRIVALS)
    missed: list[str] = []
    seconds = 0.0
    while len(missed) < _PLANS:
        before = process_time()
        plan = solve_serving(problem)
        seconds += process_time() - before
        candidate = ServingCandidate(
            tuple(
                EnginePool(it.role, shape, count)
                for it, shape, count in zip(options, shapes, plan.counts, strict=True)
                if count
            )
        )
        tell(f"simulating plan {len(missed) + 1}: {candidate}", 0, 0)
        tried = trial(question, candidate, rate, requests=records, routes=_routes(candidate, options, shapes))
        if tried.passed:
            return ServingMix(question, candidate, options, plan, tried, tuple(missed), seconds)
        missed.append(f"{candidate}: {tried.missed}")
        note(f"plan {len(missed)} misses {tried.missed}: {candidate}")
        problem = problem.without(plan.counts)
    raise NoMixError(
        f"{_PLANS} plans missed an objective, the last plan {tried.missed}: lower the rate, or raise a limit"
    )


def single_engines(
    question: SizingQuestion, menu: ServingMenu, jobs: int = 1, tell: Tell = lambda *_: None
) -> tuple[tuple[ServingOption, ...], tuple[EngineSetup, ...]]:
    """(options, their shapes): the lasting rate of one engine of each shape in each role, simulated with ample engines
    of the other role.

    Engines that serve no rate are left out. If shapes differ only in their KV tiers, the shape with the highest rate is
    kept. Sending and receiving KV is priced at the slowest network of the menu.
    """
    if "attention-ffn" in menu.file.architectures:
        raise ValueError(
            "architectures has attention-ffn, which a plan does not support: leave attention-ffn out, or --plan"
        )
    if "prefill-decode" in menu.file.architectures and len(menu.file.speculative) > 1:
        raise ValueError(
            "speculative has several entries, but a plan may combine any prefill and decode engines, and these need the"
            " same drafts: give one entry, or leave out prefill-decode or --plan"
        )
    alone = replace(question, rate=None, gpus=None, budget=None)
    bounds = Bounds(replace(alone, requests=repeated(alone.requests, _BOUNDED)))
    shapes = menu.shapes(question)
    apart = list(dict.fromkeys(replace(it, kv_tiers=()) for it in shapes if it.pipeline_parallel_size == 1))
    asked: dict[ServingCandidate, tuple[str, EngineSetup]] = {}
    if "colocated" in menu.file.architectures:
        asked |= {ServingCandidate((EnginePool("colocated", it, 1),)): ("colocated", it) for it in shapes}
    if "prefill-decode" in menu.file.architectures and apart:
        paces = {
            it: bounds.least(ServingCandidate((EnginePool("colocated", it, 1),)), Objective("latency", "mean", 1.0))
            for it in apart
        }
        fastest = min(apart, key=lambda it: paces[it])
        for it in shapes:
            one, many = EnginePool("prefill", it, 1), EnginePool("decode", fastest, _AMPLE)
            asked[ServingCandidate((one, many))] = ("prefill", it)
        for it in apart:
            one, many = EnginePool("decode", it, 1), EnginePool("prefill", fastest, _AMPLE)
            asked[ServingCandidate((many, one))] = ("decode", it)
    if not asked:
        refuse_empty(question, menu)
    refuse_impossible(alone, bounds, asked)
    bounded = {it: bounds.of(it) for it in asked}
    asking = [Asking(it, bound.rate) for it, bound in bounded.items() if bound.rate]
    if not asking:
        first, why = next(iter(bounded.items()))
        raise NoMixError(f"nothing on the menu serves any rate: {first}: {why.reason}; add larger engines")
    slowest = min(fabric(nodes).network / nodes.gpus for nodes in question.cluster.nodes)
    tokens = sum(it.prompt_tokens for it in question.requests) / len(question.requests)
    kv = tokens * AS_STORED.kv_bytes_per_token(question.model, context=question.longest)
    found: dict[tuple[str, EngineSetup], tuple[ServingOption, EngineSetup]] = {}  # by role, and shape without tiers
    for candidate, served in _served(alone, asking, jobs, tell).items():
        role, shape = asked[candidate]
        pool = next(it for it in candidate.pools if it.shape == shape and it.role == role)
        option = ServingOption(
            f"{role} {shape}",
            pool.role,
            shape.nodes,
            shape.devices,
            question.cost(ServingCandidate((replace(pool, count=1),))),
            served.rate,
            0.0 if role == "colocated" else slowest * shape.devices / kv,
        )
        alike = role, replace(shape, kv_tiers=())
        worth = option.rate, -len(shape.kv_tiers)
        if alike not in found or worth > (found[alike][0].rate, -len(found[alike][1].kv_tiers)):
            found[alike] = option, shape
    return tuple(option for option, _ in found.values()), tuple(shape for _, shape in found.values())


def _served(question: SizingQuestion, asking: Sequence[Asking], jobs: int, tell: Tell) -> dict[ServingCandidate, Trial]:
    """The lasting rates of the candidates that serve any rate."""
    # Slow engines are neighbours in the menu. In a spread order, the first engines are representative of all.
    spread = [it for _, it in sorted(enumerate(asking), key=lambda it: it[0] * _GOLDEN % 1)]
    tell(f"0 of {len(asking)} single engines simulated", 0, len(asking))
    found = {}
    with mapping(partial(_lasting, question), jobs) as simulate:
        for done, (asked, served) in enumerate(zip(spread, simulate(spread), strict=True), start=1):
            tell(f"{done} of {len(asking)} single engines simulated", done, len(asking))
            if served is not None:
                found[asked.candidate] = served
    return {it.candidate: found[it.candidate] for it in asking if it.candidate in found}


def _lasting(question: SizingQuestion, asking: Asking) -> Trial | None:
    return lasting_rate(question, asking.candidate, asking.bound)


def _routes(
    candidate: ServingCandidate, options: Sequence[ServingOption], shapes: Sequence[EngineSetup]
) -> tuple[Weighted, Weighted]:
    rate = {(option.role, shape): option.rate for option, shape in zip(options, shapes, strict=True)}
    rates = {
        f"{pool.role}-{place}.{number}{rank}": rate[pool.role, pool.shape]
        for place, pool in enumerate(candidate.pools)
        for number in range(pool.count)
        for rank in ([""] if pool.shape.parallel is None else [f"-dp{it}" for it in range(pool.shape.ranks)])
    }
    return Weighted(rates), Weighted(rates)
