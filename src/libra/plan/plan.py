"""The answer to a planning request, and its JSON.

Invariant: a `Plan` embeds its request, and contains no wall time, host name or date, so equal requests give equal
bytes. A written plan is read back as an equal value. Any text that is not a plan of this format version is refused,
with the place and the reason, and never repaired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from libra.config.extras import install_command
from libra.config.input_file import MOST, beyond_floats
from libra.hardware.parallel import ParallelLayout
from libra.plan.allocation import Allocation
from libra.plan.loan import Loan, loans_of, solve_loans
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.options.price import bucket_prices, infeasibility, price
from libra.plan.options.slots import SlotRequest
from libra.plan.placement import DeviceGroup, place
from libra.plan.problem import STRICT, InfeasiblePlanError, Problem
from libra.plan.simulated import Finalist, RehearsedStep
from libra.plan.solution import Prediction, Proof, Solution

FORMAT = 6

Solver = Literal["cp-sat", "ilp"]
PlanRequest = SlotRequest | ClusterRequest

_ROUNDING = 1e-9  # relative rounding error between a bound and a price


class DocumentError(ValueError):
    """A text is not a plan of this format version. The message names the place and the fault."""


class DisagreementError(RuntimeError):
    """A plan of one solver contradicts the bound of the other. The message names the wrong solver."""


@dataclass(frozen=True, slots=True)
class Plan:
    __pydantic_config__ = STRICT

    allocation: Allocation
    predicted: Prediction
    proof: Proof
    max_num_seqs: tuple[int, ...]  # [bucket] sequences that decode together in one engine
    layout: ParallelLayout | None  # of the trainers; None if each device is a replica
    placement: tuple[DeviceGroup, ...]  # empty if devices are interchangeable
    loans: tuple[Loan, ...]  # lent engines that the plan uses
    simulated: RehearsedStep | None  # None: the step is only predicted
    finalists: tuple[Finalist, ...]  # plans that were compared by simulation, this plan first
    cut_short: float | None = field(default=None, kw_only=True)  # seconds after which the comparison ended undecided
    request: Annotated[PlanRequest, Field(discriminator="kind")]
    format: int = FORMAT

    def __post_init__(self) -> None:
        seqs, buckets = len(self.max_num_seqs), len(self.allocation.buckets)
        if seqs != buckets:
            raise ValueError(f"max_num_seqs has {seqs} values, and allocation {buckets} buckets: plan again")

    @property
    def of_cluster(self) -> ClusterRequest:
        """The request of a plan for a cluster of GPUs. Raises ValueError if it is for slots of one machine."""
        if isinstance(self.request, SlotRequest):
            raise ValueError(
                "this plan is for the slots of one machine, but a plan for a cluster of GPUs is needed: make one with"
                " libra plan CLUSTER --model MODEL"
            )
        return self.request

    @property
    def step(self) -> float:
        """Seconds of a step: simulated if available, otherwise predicted."""
        return self.predicted.step if self.simulated is None else self.simulated.seconds

    @property
    def surprise(self) -> float:
        """Relative difference of the simulated step from the predicted step; 0 without a simulation."""
        return self.step / self.predicted.step - 1 if self.predicted.step > 0 else 0.0

    @property
    def solution(self) -> Solution:
        return Solution(self.allocation, self.predicted, self.proof)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The result of the other solver for the same problem."""

    solver: Solver
    step: float  # seconds of the solver's own best plan
    bound: float  # seconds; proven lower bound on any step


def make_plan(
    request: PlanRequest, *, placed: Sequence[DeviceGroup] = (), seed: int = 0, solver: Solver = "cp-sat"
) -> Plan:
    """The best plan for the request. The same request, placement, seed (CP-SAT's) and solver give the same plan.

    `placed` has the locations of the current allocation's groups, which stay where possible. Raises
    `InfeasiblePlanError` when no allocation can serve the request, ModuleNotFoundError without the extra `ilp`.
    """
    menu = request.menu()
    return answer(request, menu, solve_loans(menu, solver_named(solver, seed)), placed)


def confirm(plan: Plan, solver: Solver) -> Confirmation:
    """Solve the plan's request again with `solver`, which is not the plan's solver.

    Raises `DisagreementError` if one plan's step is shorter than the other solver's bound, and ModuleNotFoundError
    without the extra `ilp`.
    """
    first: Solver = "ilp" if solver == "cp-sat" else "cp-sat"
    try:
        second = solver_named(solver)(plan.request.menu().problem)
    except InfeasiblePlanError as error:
        raise DisagreementError(f"{solver} finds no plan ({error}), {first} has one: {solver} is wrong") from None
    return compare(first, plan.solution, solver, second)


def compare(first: Solver, one: Solution, solver: Solver, other: Solution) -> Confirmation:
    """Compare the answers of two solvers, each with its exact price. Raises `DisagreementError` if they contradict each
    other.
    """
    for wrong, proven, right, found in ((first, one, solver, other), (solver, other, first, one)):
        if found.predicted.step < proven.proof.bound * (1 - _ROUNDING):
            raise DisagreementError(
                f"{wrong} has proven that no step is shorter than {proven.proof.bound:.6g} s, and {right} has a plan of"
                f" {found.predicted.step:.6g} s: {wrong} is wrong; report it with the plan"
            )
    return Confirmation(solver, other.predicted.step, other.proof.bound)


def solver_named(solver: Solver, seed: int = 0) -> Callable[[Problem], Solution]:
    """The solver of this name; `seed` is for CP-SAT. Raises ModuleNotFoundError without the extra `ilp`."""
    if solver == "cp-sat":
        return partial(solve, seed=seed)
    try:
        from libra.plan.model.ilp import solve_ilp
    except ModuleNotFoundError as error:
        if error.name != "pulp":
            raise
        raise ModuleNotFoundError(
            f"PuLP, which solves the integer program, is not installed; {install_command('ilp')}", name="pulp"
        ) from None
    return solve_ilp


def answer(request: PlanRequest, menu: Menu, solution: Solution, placed: Sequence[DeviceGroup] = ()) -> Plan:
    """The plan of a solution of the request's menu; `placed` groups stay where possible."""
    problem, allocation = menu.problem, solution.allocation
    max_num_seqs = tuple(bucket.option.max_num_seqs for bucket in bucket_prices(problem, allocation))
    layout = menu.layouts.get((allocation.layout, allocation.replicas))
    placement = () if layout is None else place(problem, allocation, placed, menu.pairs)
    loans = loans_of(menu.lent, allocation)
    return Plan(
        allocation, solution.predicted, solution.proof, max_num_seqs, layout, placement, loans, None, (), request
    )


def require_answer(plan: Plan, problem: Problem) -> None:
    """Raise ValueError unless the plan's allocation, prediction and bound match its request, since the plan may have
    been edited.
    """
    reason = infeasibility(problem, plan.allocation)
    if reason is None:
        priced = price(problem, plan.allocation)
        if not math.isclose(priced.step, plan.predicted.step, rel_tol=1e-6):
            reason = f"its request prices a step at {priced.step:.6g} s, the plan says {plan.predicted.step:.6g} s"
        elif solve(problem, tie_break=False).predicted.step < plan.proof.bound * (1 - 1e-6):
            reason = "there is a plan below its stated bound"
    if reason is not None:
        raise ValueError(f"the plan does not answer its own request: {reason}; plan again")


def dump_plan(plan: Plan) -> str:
    """The JSON of a plan with its request at the end; keys are in the order of the fields."""
    fields = _plans().dump_python(plan, mode="json")
    del fields["format"]
    return _written({"format": plan.format, **fields}, "") + "\n"


def parse_plan(text: str | bytes, where: str = "plan") -> Plan:
    """Read the text of `dump_plan`; `where` (a file name) begins the error message. Raises `DocumentError`."""
    return _validated(_document(text, where), where)


@cache
def _plans() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _written(value: Any, indent: str) -> str:
    """JSON with one entry per line, except lists of numbers or names, which are in one line; this gives readable
    diffs.
    """
    if isinstance(value, dict) and value:
        inner = ",\n".join(f"{indent}  {json.dumps(k)}: {_written(v, indent + '  ')}" for k, v in value.items())
        return f"{{\n{inner}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        inner = ",\n".join(f"{indent}  {_written(part, indent + '  ')}" for part in value)
        return f"[\n{inner}\n{indent}]"
    return json.dumps(value, allow_nan=False)


def _document(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON ({error}); give a plan.json of `libra plan -o`") from None
    if beyond_floats(document):
        raise DocumentError(f"{where}: a whole number exceeds {MOST}; plan again")
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"{where}: format is missing; give the plan.json of this version of libra")
    if document["format"] != FORMAT:
        raise DocumentError(
            f"{where}: format is {document['format']!r}; this version of libra reads format {FORMAT}: plan again"
        )
    return document


def _validated(value: object, where: str) -> Plan:
    try:
        # As JSON, because strict validation of Python values would need tuples where JSON has only arrays.
        return _plans().validate_json(json.dumps(value))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise DocumentError(f"{where}: {problems}") from None
