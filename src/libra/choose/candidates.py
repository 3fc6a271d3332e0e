"""Candidates: the best plan of each kind. Prices may rank them wrongly, so simulations compare them.

Invariant: every candidate is the optimum of the problem with one decision fixed, so it is on the menu and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from libra.plan.allocation import Allocation
from libra.plan.loan import solve_loans
from libra.plan.options.menu import Menu
from libra.plan.options.price import own_training, solution
from libra.plan.problem import InfeasiblePlanError, Problem, TrainingOption
from libra.plan.solution import Solution

ONE_SIZE = "one engine size"
MOST = 6  # candidates
# Candidates with longer predicted steps than this multiple of the best are not simulated, except the best plan with one
# engine size. Assumed.
_HOPELESS = 1.25

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Proposed:
    """The best plan of a kind, with the bound and status of the whole problem."""

    kind: str
    solution: Solution

    @property
    def simplicity(self) -> tuple[int, int]:
        """Numbers of buckets and of prefill/decode pairs; lower is simpler."""
        buckets = self.solution.allocation.buckets
        return len(buckets), sum(">" in bucket.shape for bucket in buckets)


def candidates(menu: Menu, best: Solution, solved: Solve) -> tuple[Proposed, ...]:
    """At most `MOST` different plans: the best one with a single engine size first, the others by predicted step.

    `best` is the optimum of the menu's problem; `solved` solves a problem with fewer options.
    """
    found: dict[Allocation, Proposed] = {}
    for kind, allocation in _kinds(menu, best, solved):
        priced = solution(menu.problem, allocation, best.proof.bound, best.proof.status)
        found.setdefault(allocation, Proposed(kind, priced))
    first = [it for it in found.values() if it.kind == ONE_SIZE]
    others = [it for it in found.values() if it.kind != ONE_SIZE]
    limit = _HOPELESS * best.predicted.step
    kept = [it for it in others if it.solution.predicted.step <= limit or it.solution.allocation == best.allocation]
    kept.sort(key=lambda it: it.solution.predicted.step)
    return (*first, *kept[: MOST - len(first)])


def _kinds(menu: Menu, best: Solution, solved: Solve) -> Iterator[tuple[str, Allocation]]:
    problem = menu.problem

    def optimum(changed: Problem) -> Allocation | None:
        try:
            return solve_loans(replace(menu, problem=changed), solved).allocation
        except InfeasiblePlanError:
            return None

    single = optimum(replace(problem, most_buckets=1))
    if single is not None:
        yield ONE_SIZE, single
    yield "shortest predicted step", best.allocation
    # An imperfect router may do better than its price, so ranges are proposed as for a perfect router.
    perfect = (max(problem.recall_possible),)
    unerring = replace(problem, recall_known=perfect, recall_possible=perfect, current=None)
    for most in range(2, 1 + (problem.most_buckets or len(problem.peaks))):
        yield from _named(f"at most {most} ranges of length", optimum(replace(unerring, most_buckets=most)))
    for base in dict.fromkeys(it for it in (single, best.allocation) if it is not None):
        buckets = len(base.buckets)
        size = ONE_SIZE if buckets == 1 else f"{buckets} ranges of length"
        changed = replace(problem, most_buckets=buckets)
        for words, options in _splits(changed, base):
            yield from _named(f"{size}, {words}", optimum(replace(changed, training=options)))
    if single is not None:
        others = tuple(it for it in problem.engines if it.shape != single.buckets[0].shape)
        another = replace(problem, engines=others, most_buckets=1)
        yield from _named("another engine size", optimum(another) if others else None)
    if any(option.prefill for option in problem.engines):
        together = tuple(it for it in problem.engines if it.prefill is None)
        if together:
            yield from _named("no prefill/decode pairs", optimum(replace(problem, engines=together)))


def _named(kind: str, allocation: Allocation | None) -> Iterator[tuple[str, Allocation]]:
    if allocation is not None:
        yield kind, allocation


def _splits(problem: Problem, base: Allocation) -> Iterator[tuple[str, tuple[TrainingOption, ...]]]:
    """Yield the training options with fewer devices than the option of `base`, then the options with more devices."""
    own = own_training(problem, base).devices
    for words, options in (
        ("fewer devices train", tuple(it for it in problem.training if it.devices < own)),
        ("more devices train", tuple(it for it in problem.training if it.devices > own)),
    ):
        if options:
            yield words, options
