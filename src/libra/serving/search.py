"""Search for deployments that serve requests within objectives, by simulation of the candidates that the bounds allow.

Invariant: the answer depends only on the question and the menu, not on the number of processes. Under the assumptions
of `pools` and `idle`, a simulation of all candidates would give the same Pareto set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from libra.choose.forked import mapping
from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.cost.unmeasured import unmeasured
from libra.hardware.cluster import Cluster
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.serving.answer import SizingAnswer
from libra.serving.bound import Bounds, refuse_impossible
from libra.serving.found import Found, Progress
from libra.serving.holding import held_rate
from libra.serving.menu import DEFAULT, MenuFile, ServingMenu, load_menu, refuse_empty
from libra.serving.objective import Objective, parse_objectives
from libra.serving.question import Drafter, Origin, SizingQuestion
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import RecordedRequest


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
    """Find the Pareto set of deployments that serve the requests within the objectives: goodput per GPU (or per cost,
    if the menu has prices) against TTFT and TPOT.

    Cluster, model, requests and menu are values or files. `slo` is a text like `ttft_p99=1,tpot_p99=0.05` or a sequence
    of objectives. `jobs` is the number of processes; see `SizingQuestion` and `engine_profiles` for the other
    arguments. Raises ValueError if the question is invalid or no candidate can meet an objective.
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
    """Make the question of `search`: read the files of given paths, and keep only the cluster's classes on the menu."""
    there = menu.cluster(cluster if isinstance(cluster, Cluster) else load_cluster(cluster))
    shape = model if isinstance(model, ModelSpec) else load_model(model, note)
    told = unmeasured(shape)
    if told is not None:
        note(told)
    recorded = read_requests(requests, note) if isinstance(requests, Path | str) else tuple(requests)
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
    """Answer the question. Raises ValueError if no candidate of the menu fits the question, or none can meet an
    objective; `InfeasiblePlanError` if candidates would fit with more GPUs or a larger budget."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; give the number of processes, 1 or more")
    candidates = list(menu.candidates(question))
    if not candidates:
        refuse_empty(question, menu)
    bounds = Bounds(question)
    refuse_impossible(question, bounds, candidates)
    with mapping(partial(held_rate, question), jobs) as simulate:
        found = Found(question, bounds, candidates, progress)
        for wave in found.waves():
            found.take(zip(wave, simulate(wave), strict=True))
        return found.answer(candidates)
