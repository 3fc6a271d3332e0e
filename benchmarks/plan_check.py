"""Whether plans keep their promise under the user's router: the chosen plan against others, and against its prediction.

Invariant: the plan and its rivals run on the same draws, with seeds that the planner has not seen.

    python -m benchmarks.plan_check [--quick] [--promises] [--json FILE] [--jobs N]

A question is a cluster, a model, a recipe and a log; each is asked with three routers. The planner proposes and
simulates as `libra plan` does. Its plan then runs in whole-run simulation beside the best plan with one size of
engines, an even split, the greedy plan and six random plans of the menu. All run with one fresh seed; the plan, the
one-size plan and the two fastest others also with four more. Two processes and the compiled core
(`make compiled`), half an hour. --promises runs no rivals.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import fmean
from time import process_time

from benchmarks.command import command_line, show
from benchmarks.plan_check_questions import QUESTIONS, rivals
from benchmarks.rows import Row, at_most, none
from libra import Effort, Trajectory, choose_plan
from libra.choose.intervals import mean_and_error
from libra.choose.rehearsal import Rehearsals
from libra.plan.allocation import Allocation
from libra.plan.options.price import solution
from libra.plan.plan import Plan, answer
from libra.route.catalogue import policy_named
from libra.sim.of_plan import teach

ROUTERS = ("cmlfq", "least-loaded", "sticky")
FIRST_SEED = 7_000  # those of the planner are below
_SEEDS = 5
_SAMPLES = 2  # of a run, each of as many steps as batches are under way, and two at least
_SECONDS = 40.0  # that the planner simulates in one process: as long as `libra plan` does in two
PLAN = "the plan"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one question with one router. Seconds are of a step."""

    case: str
    predicted: float
    promised: float  # by the planner's own simulation
    told: bool  # whether the plan says that both differ by more than a tenth
    simulated: Mapping[str, tuple[float, ...]]  # by plan, for each fresh seed
    planning: float  # CPU seconds of this process; simulations are in others

    def __str__(self) -> str:
        over = f"{self.ratio:.3f} of the best, " if self.simulated else ""
        return f"{self.case}: {over}{self.promised:.1f} s promised, {self.predicted:.1f} s predicted"

    @property
    def error(self) -> float:
        """The promised step over the predicted one, less 1."""
        return self.promised / self.predicted - 1

    @property
    def ratio(self) -> float:
        """The plan's step over that of the fastest rival with all seeds; 1 where the plan is the fastest."""
        return max(1.0, fmean(self.simulated[PLAN]) / min(map(fmean, self._complete().values())))

    def over(self, rival: str) -> tuple[float, float | None]:
        """Seconds that the plan's step is longer than the rival's, and half of the 95 % interval."""
        pairs = zip(self.simulated[PLAN], self.simulated[rival], strict=False)
        return mean_and_error([plan - other for plan, other in pairs])

    def _complete(self) -> dict[str, tuple[float, ...]]:
        seeds = len(self.simulated[PLAN])
        return {name: its for name, its in self.simulated.items() if len(its) == seeds}


def rows(options: Namespace) -> list[Row]:
    asked = list(QUESTIONS)[: 2 if options.quick else None]
    seeds = 0 if options.promises else 2 if options.quick else _SEEDS
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        pending = [pool.submit(check, name, router, seeds) for name in asked for router in ROUTERS]
        verdicts = []
        for one in pending:
            verdicts.append(one.result())
            print(verdicts[-1], file=sys.stderr, flush=True)
    return rows_of(verdicts)


def check(name: str, router: str, seeds: int) -> Verdict:
    """Ask one question with one router; without `seeds` there are no rivals."""
    planner, log = QUESTIONS[name]()
    planner = replace(planner, recipe=planner.recipe.model_copy(update={"router": router}))
    tracker, began = planner.tracker(log), process_time()
    plan = choose_plan(planner.request(tracker), log, effort=Effort(_SECONDS))
    planning = process_time() - began
    simulated = _simulated(plan, log, router, seeds) if seeds else {}
    assert plan.simulated is not None
    case = f"{name}, {router}"
    return Verdict(case, plan.predicted.step, plan.simulated.seconds, abs(plan.surprise) > 0.1, simulated, planning)


def _simulated(plan: Plan, log: Sequence[Trajectory], router: str, seeds: int) -> dict[str, tuple[float, ...]]:
    menu = plan.request.menu()
    plans = {PLAN: plan} | {
        name: answer(plan.request, menu, solution(menu.problem, allocation))
        for name, allocation in rivals(menu.problem, FIRST_SEED).items()
    }
    found = {name: [seconds] for name, seconds in _steps(plans, log, router, FIRST_SEED).items()}
    others = sorted((name for name in found if name not in (PLAN, "one size")), key=lambda name: found[name])
    kept = {name: plans[name] for name in (PLAN, "one size", *others[:2])}
    for seed in range(FIRST_SEED + 1, FIRST_SEED + seeds):
        for name, seconds in _steps(kept, log, router, seed).items():
            found[name].append(seconds)
    return {name: tuple(its) for name, its in found.items()}


def _steps(plans: Mapping[str, Plan], log: Sequence[Trajectory], router: str, seed: int) -> dict[str, float]:
    """Seconds of a step of each plan, on the same draws."""
    policy = policy_named(router, seed=seed)
    teach(policy, log)
    same: dict[Allocation, str] = {}
    for name, plan in plans.items():
        same.setdefault(plan.allocation, name)
    distinct = list(same.values())
    with Rehearsals([plans[name] for name in distinct], log, policy, seed=seed) as runs:
        samples = _SAMPLES if runs.steps_a_sample > 1 else 2 * _SAMPLES
        found = dict(runs.upto(dict.fromkeys(range(len(distinct)), samples)))
    by_allocation = {plans[name].allocation: fmean(found[index]) for index, name in enumerate(distinct)}
    return {name: by_allocation[plan.allocation] for name, plan in plans.items()}


def rows_of(verdicts: Sequence[Verdict]) -> list[Row]:
    """A row a question, then those with goals."""
    found = []
    for it in verdicts:
        if it.simulated:
            found.append(Row(it.case, "step, fresh seeds", fmean(it.simulated[PLAN]), "s"))
            found.append(Row(it.case, "over the best rival", it.ratio, ""))
        found.append(Row(it.case, "simulated over predicted, as printed", 100 * it.error, "%"))
    name = f"{len(verdicts)} questions and routers"
    errors = [abs(it.error) for it in verdicts]
    quiet = [it for it in verdicts if abs(it.error) > 0.15 and not it.told]
    return [
        *found,
        *(_against_rivals(name, verdicts) if verdicts[0].simulated else ()),
        at_most(name, "simulated and predicted, mean", 100 * fmean(errors), "%", 6),
        Row(name, "simulated and predicted, worst", 100 * max(errors), "%", "at most 15 %, or told", not quiet),
        Row(name, "planning, CPU of one process, worst", max(it.planning for it in verdicts), "s"),
    ]


def _against_rivals(name: str, verdicts: Sequence[Verdict]) -> Iterator[Row]:
    ratios = [it.ratio for it in verdicts]
    slower = [it for it in verdicts if _slower_than_one_size(it)]
    yield at_most(name, "over the best rival, mean", fmean(ratios), "", 1.01)
    yield at_most(name, "over the best rival, worst", max(ratios), "", 1.05)
    yield none(name, "slower than one size, beyond the interval", len(slower))
    for it in slower:
        yield Row(it.case, "over one size", it.over("one size")[0], "s")


def _slower_than_one_size(verdict: Verdict) -> bool:
    if "one size" not in verdict.simulated:
        return False
    mean, error = verdict.over("one size")
    return error is not None and mean > error


if __name__ == "__main__":
    parser = command_line("plan_check", __doc__, quick="two questions, two seeds: a first look, not a verdict")
    parser.add_argument("--promises", action="store_true", help="plan only: the promised step over the predicted one")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    show(parser, rows)
