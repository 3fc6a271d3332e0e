"""Which deployments serve requests within objectives: what a bound leaves is simulated, best bound first.

Invariant: the answer depends on the question and the menu alone, not on how many processes find it; and the Pareto set
is the one that simulating everything would give, since only what a bound proves to be no part of it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import Cluster
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import RecordedRequest
from libra.sizing.answer import By, NearMiss, Point, Rejection, SizingAnswer, pareto, point_of, rival, tenths
from libra.sizing.bound import Bounds, RateBound, refuse_impossible
from libra.sizing.candidate import ServingCandidate
from libra.sizing.holding import Held, checked, held_rate
from libra.sizing.ladder import LOWEST, STEPS, Asking, rate_of, simulator
from libra.sizing.menu import DEFAULT, MenuFile, ServingMenu, load_menu, refuse_empty
from libra.sizing.objective import Objective, parse_objectives
from libra.sizing.question import Drafter, Origin, SizingQuestion

_WAVE = 8  # candidates that are simulated between two looks at what is left
_NEXT = 4  # candidates that may be the next best


@dataclass(frozen=True, slots=True)
class Progress:
    candidates: int
    out: int  # by bound, or dominated
    simulated: int
    best: Point | None


def search(
    cluster: Cluster | Path | str,
    model: ModelSpec | str,
    requests: Sequence[RecordedRequest] | Path | str,
    slo: str | Sequence[Objective],
    *,
    rate: float | None = None,
    gpus: int | None = None,
    budget: float | None = None,
    menu: MenuFile | Path | str = DEFAULT,
    profile: str = "auto",
    host: str = "default",
    jobs: int = 1,
    note: Callable[[str], None] = lambda _: None,
    progress: Callable[[Progress], None] | None = None,
) -> SizingAnswer:
    """The Pareto set of deployments that serve the requests within the objectives: goodput per GPU (or per cost, where
    the menu has prices) against TTFT and TPOT.

    Cluster, model, requests and menu are values or files; `slo` is such as `ttft_p99=1,tpot_p99=0.05`. The other
    arguments are those of `SizingQuestion` and `engine_profiles`; `jobs` is the number of processes. Raises ValueError
    where the question has no answer to look for.
    """
    file = menu if isinstance(menu, MenuFile) else load_menu(Path(menu))
    return answer(
        question_of(
            cluster,
            model,
            requests,
            slo,
            rate=rate,
            gpus=gpus,
            budget=budget,
            menu=file,
            profile=profile,
            host=host,
            note=note,
        ),
        ServingMenu(file),
        jobs=jobs,
        progress=progress,
    )


def question_of(
    cluster: Cluster | Path | str,
    model: ModelSpec | str,
    requests: Sequence[RecordedRequest] | Path | str,
    slo: str | Sequence[Objective],
    *,
    rate: float | None = None,
    gpus: int | None = None,
    budget: float | None = None,
    menu: MenuFile = DEFAULT,
    profile: str = "auto",
    host: str = "default",
    note: Callable[[str], None] = lambda _: None,
) -> SizingQuestion:
    """What `search` asks, read from files where they are given; of the cluster, the classes that the menu names."""
    there = menu.cluster(cluster if isinstance(cluster, Cluster) else load_cluster(cluster))
    shape = model if isinstance(model, ModelSpec) else load_model(model)
    recorded = read_requests(requests) if isinstance(requests, Path | str) else tuple(requests)
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=shape.max_context)
    profiles = engine_profiles(there, shape, recipe, profile, note, host)
    objectives = parse_objectives(slo) if isinstance(slo, str) else tuple(slo)
    if not all(isinstance(it, Objective) for it in objectives):
        raise ValueError(f"slo is {slo!r:.60}; give a text such as ttft_p99=1,tpot_p99=0.05, or Objectives")
    drafters = {}
    for name in menu.drafters:
        small = load_model(name)
        its = Recipe(batch=1, samples_per_prompt=1, max_length=small.max_context)
        drafters[name] = Drafter(small, engine_profiles(there, small, its, profile, lambda _: None, "none"))
    prices = dict(menu.cost_per_hour)
    origin = Origin(
        shape.name if isinstance(model, ModelSpec) else str(model),
        profile,
        host,
        str(requests) if isinstance(requests, Path | str) else None,
    )
    return SizingQuestion(there, shape, profiles, recorded, objectives, rate, gpus, budget, prices, drafters, origin)


def answer(
    question: SizingQuestion, menu: ServingMenu, *, jobs: int = 1, progress: Callable[[Progress], None] | None = None
) -> SizingAnswer:
    """Raises ValueError where the menu is empty for the question, or an objective below what any of it can do: of these
    `InfeasiblePlanError` where more GPUs or money would give it something."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; give the number of processes, 1 or more")
    candidates = list(menu.candidates(question))
    if not candidates:
        refuse_empty(question, menu)
    bounds = Bounds(question)
    bounded = {it: bounds.of(it) for it in candidates}
    refuse_impossible(question, bounds, candidates)
    with simulator(question, jobs, held_rate) as simulate:
        found = _Found(question, bounded, progress)
        for wave in found.waves():
            found.take(simulate(wave))
        return found.answer(candidates)


class _Found:
    """What is known so far."""

    def __init__(
        self,
        question: SizingQuestion,
        bounded: Mapping[ServingCandidate, RateBound],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.question, self.bounded, self.progress = question, bounded, progress
        self.points: list[Point] = []
        self.reasons: dict[ServingCandidate, Rejection] = {}
        self.runs = 0
        self.front: list[Point] = []
        self.rivals: dict[ServingCandidate, Point | None] = {}  # of those that are simulated

    def waves(self) -> Iterator[list[Asking]]:
        """Candidates to simulate, and their bounds: those that the bound promises most of come first."""
        question = self.question
        left = []
        for candidate, bound in self.bounded.items():
            wanted = question.rate
            if bound.rate < (wanted or rate_of(LOWEST)):
                why = bound.reason
                if bound.rate and wanted is not None:
                    why = f"at most {bound.rate:.3g} requests/s ({bound.reason})"
                self._reject(candidate, "bound", why)
            else:
                left.append(candidate)
        left.sort(key=lambda it: -self._promised(it))
        while left:
            wave: list[Asking] = []
            while left and len(wave) < _WAVE:
                candidate = left.pop(0)
                bound = self.bounded[candidate]
                better = rival(tenths(question, bound.ttft, bound.tpot), self.front)
                if better is not None and better.value > self._promised(candidate):
                    self._reject(candidate, "bound", f"cannot be better in any respect than {better.candidate}")
                else:
                    least = 0.0 if better is None else better.value * question.cost(candidate)
                    wave.append(Asking(candidate, bound.rate, least))
                    self.rivals[candidate] = better
            if wave:
                yield wave

    def take(self, simulated: Iterable[tuple[Asking, Held]]) -> None:
        for asking, held in simulated:
            candidate = asking.candidate
            self.runs += held.runs
            point = point_of(self.question, candidate, self.bounded[candidate].rate, held)
            better = self.rivals.pop(candidate)
            if point is not None:
                self.points.append(point)
            elif held.too_little and better is not None:
                reason = f"serves less than {better.candidate}, which is no slower: misses {held.missed}"
                self._reject(candidate, "dominated", reason)
            else:
                self._reject(candidate, "simulation", f"misses {held.missed}")
        self.front, _ = pareto(self.points)
        if self.progress is not None:
            simulated_now = len(self.points) + sum(it.by != "bound" for it in self.reasons.values())
            out = len(self.reasons) + len(self.points) - simulated_now
            self.progress(Progress(len(self.bounded), out, simulated_now, self.front[0] if self.front else None))

    def answer(self, candidates: Sequence[ServingCandidate]) -> SizingAnswer:
        front, beaten = pareto(self.points)
        rates = {it.candidate: it.trial.rate for it in self.points}
        for candidate, better in beaten.items():
            self._reject(candidate, "dominated", f"{better.candidate} is no worse in any respect", rates[candidate])
        rejected = tuple(self.reasons[it] for it in candidates if it in self.reasons)
        possible = []
        if front:
            best = front[0]
            possible = [it for it in candidates if it != best.candidate and self._promised(it) > best.value]
            possible = [it for it in possible if self.bounded[it].rate >= (self.question.rate or 0)]
        near = self._near_miss(front[0], possible, rates) if possible else None
        return SizingAnswer(self.question, tuple(front), rejected, self.runs, len(possible), near)

    def _promised(self, candidate: ServingCandidate) -> float:
        """Requests/s per cost that a bound allows."""
        return min(self.bounded[candidate].rate, self.question.rate or inf) / self.question.cost(candidate)

    def _reject(self, candidate: ServingCandidate, by: By, reason: str, rate: float | None = None) -> None:
        cost, bound = self.question.cost(candidate), self.bounded[candidate].rate
        self.reasons[candidate] = Rejection(candidate, cost, by, reason, bound, rate)

    def _near_miss(
        self, best: Point, possible: Sequence[ServingCandidate], rates: Mapping[ServingCandidate, float]
    ) -> NearMiss | None:
        """By how much the next best misses an objective where it would be better than the best; None where none of the
        next ends.

        Of deployments that were asked for their goodput it is the one with the most; of those that failed at one rate,
        the one that is nearest to its objectives, of the few that the bound promises most of.
        """
        question = self.question

        def promise(candidate: ServingCandidate) -> tuple[float, float]:
            return rates.get(candidate, 0.0) / question.cost(candidate), self.bounded[candidate].rate

        most = 1 if question.rate is None else _NEXT
        next_best = sorted(possible, key=promise, reverse=True)[:most]
        misses = [it for candidate in next_best if (it := self._worst_miss(best, candidate)) is not None]
        return min(misses, key=lambda it: it.seconds / it.limit, default=None)

    def _worst_miss(self, best: Point, candidate: ServingCandidate) -> NearMiss | None:
        """Of the objective that it is farthest from; None where a simulation of it does not end."""
        rate = self.question.rate or best.value * self.question.cost(candidate) * 2 ** (1 / STEPS)
        trials = checked(self.question, candidate, rate)
        self.runs += len(trials)
        if not all(it.latency for it in trials.values()):
            return None
        misses = (
            NearMiss(candidate, objective.name, objective.limit, one.latency[objective.name], name)
            for name, one in trials.items()
            for objective in self.question.objectives
        )
        return max(misses, key=lambda it: it.seconds / it.limit)
