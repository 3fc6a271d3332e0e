"""Chooses a plan by simulation: the solver proposes candidates, and simulations of whole runs decide.

Invariant: the promised step is simulated under the plan's router, on the same draws as all other candidates. Equal
arguments give equal plans if the race has enough time to end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from libra.choose.candidates import Proposed, candidates
from libra.choose.effort import Effort
from libra.choose.expectation import expected_steps
from libra.choose.intervals import mean_and_error
from libra.choose.race import Standings, race
from libra.choose.recall import with_recall
from libra.choose.rehearsal import Rehearsals
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan, answer
from libra.plan.problem import Problem
from libra.plan.simulated import Finalist, RehearsedStep
from libra.plan.solution import Solution
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.trajectory import Trajectory

_PROMISED = (3, 8)  # samples of the chosen plan for its promised step: the minimum, and the number if time permits
_RACE = 0.7  # share of the time for the race; the remaining time is for more samples of the chosen plan


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """Progress of a choice."""

    words: str
    done: int = 0  # number of runs in this round
    of: int = 0


def choose_plan(
    request: ClusterRequest,
    log: Sequence[Trajectory],
    *,
    router: Policy | None = None,
    effort: Effort | None = None,
    placed: Sequence[DeviceGroup] = (),
    solved: Callable[[Problem], Solution] = solve,
    tell: Callable[[ChoiceProgress], None] = lambda _: None,
) -> Plan:
    """The plan with the shortest simulated step among the best of each kind (`candidates`), with its finalists.

    `log` has the trajectories behind the request's statistics; groups are drawn from the finished ones. `router` is an
    untrained policy, by default the recipe's; it first learns from the log. `placed` groups stay on their devices if
    possible. Raises `InfeasiblePlanError` if no plan exists, and ValueError if the log has no finished trajectory, or a
    trajectory that fits no engine.
    """
    effort = Effort() if effort is None else effort
    policy = policy_named(request.recipe.router, seed=effort.seed) if router is None else router
    finished = [trajectory for trajectory in log if trajectory.finished]
    began = monotonic()
    tell(ChoiceProgress("solving"))
    request, menu, best = with_recall(
        request,
        finished,
        policy,
        seed=effort.seed,
        solved=solved,
        measuring=lambda: tell(ChoiceProgress("measuring the recall of the router")),
    )
    kinds = candidates(menu, best, solved)
    plans = [answer(request, menu, it.solution, placed) for it in kinds]
    teach(policy, finished)
    with Rehearsals(plans, finished, policy, seed=effort.seed, jobs=effort.jobs) as runs:
        sampler = _Told(runs, tell, len(plans))
        standings = race(
            sampler,
            expected_steps([it.solution for it in kinds]),
            first=runs.fewest,
            most=effort.samples,
            time_left=lambda: monotonic() - began < _RACE * effort.seconds,
        )
        steps, chosen = runs.steps_a_sample, _simplest(standings, kinds)
        least, enough = _PROMISED
        while (samples := len(standings.samples[chosen])) < enough:
            if samples >= least and monotonic() >= began + effort.seconds:
                break
            standings = standings.with_samples(dict(sampler.upto({chosen: samples + 1})))
    finalists = _finalists(standings, kinds, chosen, request.recipe.router, steps, effort.seed)
    cut_short = effort.seconds if standings.cut_short else None
    return replace(plans[chosen], simulated=finalists[0].simulated, finalists=finalists, cut_short=cut_short)


def _simplest(standings: Standings, kinds: Sequence[Proposed]) -> int:
    """The simplest plan that is not clearly slower than the fastest; among equally simple plans, the fastest. A plan
    with several engine sizes must be clearly faster, since it depends on its router.
    """
    order = standings.finalists
    return min(standings.equals, key=lambda it: (kinds[it].simplicity, order.index(it)))


def _finalists(
    standings: Standings, kinds: Sequence[Proposed], chosen: int, router: str, steps: int, seed: int
) -> tuple[Finalist, ...]:
    """The chosen plan, then the other plans by simulated step; plans that were not simulated by predicted step."""

    def finalist(index: int) -> Finalist:
        its, samples = kinds[index], standings.samples[index]
        simulated = slower = error = None
        if samples:
            simulated = RehearsedStep(*mean_and_error(samples), router, steps * len(samples), seed)
            if index != chosen:
                slower, error = standings.slower(index, chosen)
        step = its.solution.predicted.step
        return Finalist(its.kind, its.solution.allocation, step, simulated, slower, error)

    others = [finalist(index) for index in range(len(kinds)) if index != chosen]
    others.sort(key=lambda it: (it.slower is None, it.predicted if it.slower is None else it.slower))
    return (finalist(chosen), *others)


class _Told:
    """A sampler that reports the progress of its rounds."""

    def __init__(self, sampler: Rehearsals, tell: Callable[[ChoiceProgress], None], contenders: int) -> None:
        self._sampler, self._tell, self._contenders = sampler, tell, contenders

    def upto(self, wanted: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        versions = next(iter(wanted.values())) * self._sampler.steps_a_sample
        words = f"simulating {len(wanted)} of {self._contenders} plans, {versions} steps each"
        self._tell(ChoiceProgress(words, 0, len(wanted)))
        for done, samples in enumerate(self._sampler.upto(wanted), start=1):
            self._tell(ChoiceProgress(words, done, len(wanted)))
            yield samples
