"""A plan in a few sentences, and the plans with which it was compared.

Invariant: the headline has the predicted step, and also the simulated step if there is one.
"""

from __future__ import annotations

from rich.table import Table

from libra.choose.offers import Job, OfferedCluster
from libra.cost.sources.rates import published_mfu
from libra.plan.allocation import Allocation
from libra.plan.memory import device_memory, host_bytes
from libra.plan.options.layouts import priced_step
from libra.plan.options.request import PlanningRequest
from libra.plan.plan import Plan
from libra.plan.simulated import Finalist, RehearsedStep
from libra.report.tables import number
from libra.report.words import (
    cell,
    days,
    dollars,
    duration,
    percent,
    plural,
    printable,
    signed_duration,
    signed_percent,
)

SURPRISE = 0.10  # relative difference of simulated and predicted step that causes a warning


def headline(plan: Plan) -> tuple[str, ...]:
    """Sentences on split, step, an undecided comparison, tokens per second, cost, training, memory, and engines on
    several nodes.
    """
    return (
        _split(plan),
        _step(plan),
        *_cut_short(plan),
        _pace(plan),
        *_cost(plan),
        *_training(plan),
        *_memory(plan),
        *_several_nodes(plan),
    )


def job_sentence(plan: Plan, steps: int) -> str:
    """Days, and, if nodes have a cost, dollars of a training of `steps` optimiser steps."""
    job, here = Job(steps), OfferedCluster(plan.of_cluster.cluster, plan)
    amount = here.dollars(job)
    cost = "" if amount is None else f" and cost {dollars(amount)}"
    return f"{plural(steps, 'step')} take {days(here.seconds(job))}{cost}, if all take as long as this step."


def proof_sentence(plan: Plan) -> str:
    """A sentence with the proven bound and its assumed router."""
    request: PlanningRequest = plan.request
    proof, router = plan.proof, f" for {request.assumed_router}" if request.assumed_router else ""
    above = f"; this plan's prediction is {percent(proof.gap, 2)} above that" if proof.gap > 0 else ""
    return f"By price{router}, no plan on the menu has a step below {proof.bound:,.2f} s ({proof.status}){above}."


def step_words(step: RehearsedStep) -> str:
    """Text of a simulated step, such as `5 min 2 s ± 10 s`."""
    return duration(step.seconds) + ("" if step.error is None else f" ± {duration(step.error)}")


def finalist_rows(plan: Plan) -> tuple[tuple[str, str, str, str], ...]:
    """(plan, predicted, simulated, slower) of each plan compared by simulation, the chosen plan first. A plan that
    dropped out early has its number of steps next to `slower`, instead of an interval.
    """
    return tuple(
        (f"{finalist.kind}: {roles_of(finalist.allocation)}", *_figures(finalist, chosen=not place))
        for place, finalist in enumerate(plan.finalists)
    )


def finalists_table(plan: Plan) -> Table:
    """The `finalist_rows` of a plan as a table for a terminal."""
    table = Table("the best with", *map(number, ("predicted", "simulated", "slower")), title="Finalists")
    for words, *figures in finalist_rows(plan):
        table.add_row(cell(words), *figures)
    if plan.simulated is not None:
        table.caption = (
            f"simulated: whole runs under {plan.simulated.router} on the same draws (seed {plan.simulated.seed}), "
            f"without the first steps; slower: over the steps that both ran, with its 95 % interval. Plans are "
            f"ranked by predicted and simulated step, weighted by their errors. Among plans within 1 % of the "
            f"fastest, the simplest is chosen"
        )
    return table


def roles_of(allocation: Allocation) -> str:
    """Text such as `2 ranks train, 3 a800/tp2 to 11,162 + 1 a800/tp8 to 40,960`. Ranks are data-parallel ranks."""
    several = len(allocation.buckets) > 1
    engines = " + ".join(
        f"{bucket.engines} {bucket.shape}" + (f" to {bucket.up_to:,}" if several else "")
        for bucket in allocation.buckets
    )
    return f"{plural(allocation.replicas, 'rank')} {'trains' if allocation.replicas == 1 else 'train'}, {engines}"


def _figures(finalist: Finalist, *, chosen: bool) -> tuple[str, str, str]:
    simulated = finalist.simulated
    slower = "not simulated"
    if chosen:
        slower = "chosen"
    elif finalist.slower is not None and simulated is not None:
        few = f" ({plural(simulated.steps, 'step')}: no interval)"
        error = few if finalist.slower_error is None else f" ± {duration(finalist.slower_error)}"
        slower = signed_duration(finalist.slower) + error
    return duration(finalist.predicted), "-" if simulated is None else duration(simulated.seconds), slower


def _split(plan: Plan) -> str:
    allocation = plan.allocation
    if plan.layout is None:
        return f"{printable(allocation.describe())}."
    training = sum(group.devices for group in plan.placement if group.role == "train")
    generating = sum(group.devices for group in plan.placement if group.role != "train")
    engines = printable(" + ".join(f"{count} x {shape}" for shape, count in allocation.engines_by_shape.items()))
    ranks = plural(allocation.replicas, "data-parallel rank")
    if plan.of_cluster.recipe.mode == "colocated":
        verbs = "generates and then trains" if training == 1 else "generate and then train"
        return f"{plural(training, 'GPU')} {verbs} ({engines}; {ranks})."
    return (
        f"{plural(training, 'GPU')} {'trains' if training == 1 else 'train'}"
        f" ({ranks}), {generating} generate ({engines})."
    )


def _step(plan: Plan) -> str:
    predicted, simulated = duration(plan.predicted.step), plan.simulated
    if simulated is None:
        request = plan.request
        perfect = request.kind == "cluster" and len(plan.allocation.buckets) > 1 and not request.recall
        assumed = " under a router without errors" if perfect else ""
        return f"A step is predicted to take {predicted}{assumed}; it was not simulated."
    interval = "" if simulated.error is None else "; ± is a 95 % interval"
    return (
        f"A step takes {step_words(simulated)} in simulation under {simulated.router} ({simulated.steps} steps, seed"
        f" {simulated.seed}{interval}); predicted {predicted}."
    )


def _cut_short(plan: Plan) -> tuple[str, ...]:
    if plan.cut_short is None:
        return ()
    steps = ", ".join(str(0 if it.simulated is None else it.simulated.steps) for it in plan.finalists)
    return (
        f"The comparison with others was cut short at {duration(plan.cut_short)}, before it was decided (steps of the"
        f" finalists: {steps}). With --simulate-for inf it continues until it is decided.",
    )


def disagreement(plan: Plan) -> tuple[str, ...]:
    """A warning if simulated and predicted step differ by more than `SURPRISE`."""
    if abs(plan.surprise) <= SURPRISE:
        return ()
    return (
        f"Simulation and prediction disagree: the simulated step differs by {signed_percent(plan.surprise)}. "
        f"Trust the simulated step, which uses your router.",
    )


def little_evidence(plan: Plan) -> tuple[str, ...]:
    """A warning if the log has fewer trajectories than a step."""
    request: PlanningRequest = plan.request
    known = [cls.seen for cls in request.classes if cls.seen is not None]
    if len(known) < len(request.classes) or sum(known) >= request.trajectories:
        return ()
    return (
        f"The lengths come from {round(sum(known)):,} trajectories, fewer than the {request.trajectories:,} of a step."
        " Plan and simulation contain no trajectory longer than the longest of these; a longer log gives a safer "
        "prediction.",
    )


def _pace(plan: Plan) -> str:
    request: PlanningRequest = plan.request
    tokens = request.trajectories * sum(cls.share * cls.generated for cls in request.classes)
    rate = tokens / plan.step if plan.step > 0 else 0.0
    return f"That is {rate:,.0f} generated tokens/s, {rate / request.devices:,.0f} a device."


def _cost(plan: Plan) -> tuple[str, ...]:
    if plan.layout is None:
        return ()
    cluster = plan.of_cluster.cluster
    hourly, amount = cluster.cost_per_hour, OfferedCluster(cluster, plan).dollars(Job(1))
    if hourly is None or amount is None:
        return ()
    return (f"A step costs {dollars(amount)}, at {dollars(hourly)} an hour for the nodes.",)


def _training(plan: Plan) -> tuple[str, ...]:
    if plan.layout is None:
        return ()
    request = plan.of_cluster
    pool = next(group.pool for group in plan.placement if group.role == "train")
    nodes = request.cluster.node_class(pool)
    step = priced_step(request.model, nodes, request.recipe, request.classes, plan.layout)
    fp8 = request.recipe.dtype == "fp8"
    published = None if fp8 else published_mfu(nodes.gpu)
    beside = (
        ""
        if published is None
        else f"; published runs of dense models, without log-probabilities, reach {percent(published)}"
    )
    return (
        f"A training step takes {duration(step.total)}, at {percent(step.mfu)} of the data sheet's FLOP/s"
        f"{' in bf16' if fp8 else ''} (MFU), log-probabilities included{beside}.",
    )


def _memory(plan: Plan) -> tuple[str, ...]:
    words = [
        f"{printable(it.duty)} {it.used / 1e9:.0f} of {it.there / 1e9:.0f} GB"
        f" ({', '.join(f'{name} {size / 1e9:.0f}' for name, size in it.parts)})"
        for it in device_memory(plan)
    ]
    states = host_bytes(plan)
    host = (f" A trainer's host needs {states / 1e9:.0f} GB for optimiser state.",) if states else ()
    return (f"Memory of a GPU: {'; '.join(words)}.{''.join(host)}",) if words else ()


def _several_nodes(plan: Plan) -> tuple[str, ...]:
    """A sentence for each engine size that is larger than a node."""
    sizes = {it.name: len(it.nodes) for it in plan.placement if it.role != "train" and len(it.nodes) > 1}
    return tuple(
        f"An engine of {printable(name)} is on {count} nodes: its all-reduces cross the network. No such engine "
        f"has been measured."
        for name, count in sizes.items()
    )
