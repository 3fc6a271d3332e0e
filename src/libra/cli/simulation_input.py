"""The input of `libra simulate`, from files and options.

Invariant: an option that does not apply to the deployment and its workload is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from libra.config.input_file import read_input
from libra.plan.plan import parse_plan, require_answer
from libra.report.words import plural
from libra.route.catalogue import is_path
from libra.sim.deployment import Deployment
from libra.sim.engines_file import load_engines
from libra.sim.of_plan import PlannedRollout, forecast_of, planned_run
from libra.sim.planned_engines import PlacementError
from libra.sim.workload.replay import Replay
from libra.sim.workload.request_file import RequestFormatError, read_requests
from libra.sim.workload.requests import Workload, recorded_requests, repeated
from libra.trajectory import read_trajectories, read_workload

LENT = "lent engines always have their share of the device: serving and recalls are not simulated"
_TRUNCATE = "--truncate-context"
_OF_TRAJECTORIES = ("--concurrency", "--samples-per-prompt", "--unknown-tool-seconds", _TRUNCATE)
_OF_REQUESTS = ("--rate-scale", "--repeat", "--start")
_MEANT_FOR = {
    **dict.fromkeys(_OF_TRAJECTORIES, "trajectories (--trajectories)"),
    **dict.fromkeys(_OF_REQUESTS, "requests (--requests)"),
}

Options = Mapping[str, Any]  # given options by name


@dataclass(frozen=True, slots=True)
class Asked:
    """A deployment and its workload, with notes for the user."""

    deployment: Deployment
    workload: Workload
    notes: tuple[str, ...]
    forecast: PlannedRollout | None = None  # of the plan; None for a file of engines


def asked(what: Path, trajectories: Path | None, requests: Path | None, given: Options, seed: int) -> Asked:
    """Read the deployment (a plan or engines) and its workload from files. Raises ValueError with a message for the
    user, and OSError for an unreadable file.
    """
    if what.suffix == ".json":
        if requests is not None or trajectories is None:
            raise ValueError("a plan needs trajectories: give --trajectories instead of --requests")
        _only(given, *_OF_TRAJECTORIES)
        return _plan(what, trajectories, given, seed)
    if what.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{what}: give a plan.json of `libra plan`, or a YAML file such as examples/engines.yaml")
    if requests is not None and trajectories is None:
        _only(given, *_OF_REQUESTS)
        return _requests(what, requests, given)
    if trajectories is not None and requests is None:
        _only(given, *_OF_TRAJECTORIES)
        return _trajectories(what, trajectories, given)
    raise ValueError("the engines have no work: give either --requests FILE or --trajectories FILE")


def _plan(what: Path, trajectories: Path, given: Options, seed: int) -> Asked:
    plan = parse_plan(read_input(what), where=str(what))
    request = plan.request
    require_answer(plan, request.menu().problem)
    notes: list[str] = []
    log = list(read_workload(trajectories, request.longest_context, given.get(_TRUNCATE, False), notes.append))
    try:
        deployment, workload = planned_run(plan, log, seed=seed, **_keywords(given))
    except PlacementError as error:
        raise ValueError(f"{what}: {error}") from None
    described = workload.describe()
    source, samples = described["source"], described["samples_per_prompt"]
    notes += [_drawing(source["drawn"], source["log"], source["steps"], samples, seed)]
    if source["log"] < len(log):
        notes.append(f"{len(log) - source['log']:,} of {len(log):,} trajectories in the log left out: unfinished")
    if plan.loans:
        notes.append(LENT)
    if request.kind == "cluster" and is_path(request.recipe.router):
        notes.append(
            f"the plan's router is {request.recipe.router}, which needs --route; the simulation uses {deployment.route}"
        )
    elif request.kind == "cluster":
        deployment = replace(deployment, route=request.recipe.router)
    return Asked(deployment, workload, tuple(notes), forecast_of(plan, source["steps"]))


def _requests(what: Path, requests: Path, given: Options) -> Asked:
    notes: list[str] = []
    deployment = load_engines(what, notes.append)
    try:
        recorded = read_requests(requests, notes.append)
    except RequestFormatError:
        if _is_log(requests):
            raise ValueError(f"{requests}: a log of trajectories, not requests; give it to --trajectories") from None
        raise
    workload = recorded_requests(
        repeated(recorded, given.get("--repeat", 1)),
        start_seconds=given.get("--start", 0.0),
        rate_scale=given.get("--rate-scale", 1.0),
        source={"file": requests.name},
    )
    return Asked(deployment, workload, tuple(notes))


def _is_log(path: Path) -> bool:
    """Whether the first line of the file is a trajectory."""
    try:
        return next(read_trajectories(path), None) is not None
    except ValueError:
        return False


def _trajectories(what: Path, trajectories: Path, given: Options) -> Asked:
    notes: list[str] = []
    deployment = load_engines(what, notes.append)
    log = list(read_workload(trajectories, deployment.longest_context, given.get(_TRUNCATE, False), notes.append))
    unfinished = sum(not trajectory.finished for trajectory in log)
    if unfinished:
        notes.append(
            f"{unfinished:,} of {len(log):,} trajectories in the log are unfinished: simulated up to "
            f"their last recorded turn"
        )
    return Asked(deployment, Replay(log, source={"file": trajectories.name}, **_keywords(given)), tuple(notes))


def _only(given: Options, *known: str) -> None:
    """Raise ValueError that names a given option outside `known`."""
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is for {_MEANT_FOR[name]}; leave it out")


def _keywords(given: Options) -> dict[str, Any]:
    return {name.removeprefix("--").replace("-", "_"): it for name, it in given.items() if name != _TRUNCATE}


def _drawing(drawn: int, log: int, steps: int, samples: int, seed: int) -> str:
    how = "without replacement" if drawn <= log else "each once, then more with replacement"
    each = "" if samples == 1 else f", each run as {samples} samples"
    return (
        f"{plural(steps, 'step')}: {plural(drawn, 'trajectory', 'trajectories')} drawn from {log:,} finished ones,"
        f" {how} (seed {seed}){each}"
    )
