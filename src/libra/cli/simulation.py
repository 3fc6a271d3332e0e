"""`libra simulate`. Bad input is refused before the simulation begins."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from libra.cli.errors import bad_input, of_option, require
from libra.cli.options import Exact, ResultAsJson, ResultFile, ResultPage, TraceFile, TruncateContext
from libra.cli.output import check_writable, tell_note, tell_notes, write_text, writing
from libra.report.words import printable

if TYPE_CHECKING:
    from libra.sim.deployment import Deployment
    from libra.sim.of_plan import PlannedRollout
    from libra.sim.outcome.result import SimulationResult


def simulate(
    what: Annotated[
        Path, typer.Argument(metavar="WHAT", help="plan.json of `libra plan`, or a YAML file that describes engines.")
    ],
    trajectories: Annotated[
        Path | None, typer.Option("--trajectories", "-t", help="Log of trajectories to replay.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests", help="Requests to replay: .jsonl, or another log, such as Azure's traces. Not with a plan."
        ),
    ] = None,
    route: Annotated[
        str | None, typer.Option("--route", help="Routing policy, or path.py:Class (default: the file's, or cmlfq).")
    ] = None,
    learn_from: Annotated[
        Path | None, typer.Option("--learn-from", help="Log of trajectories from which the policy learns first.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Limit on trajectories in flight (default: none; for a plan, its bound on staleness)."),
    ] = None,
    samples_per_prompt: Annotated[
        int | None, typer.Option(help="Number of samples to run for each trajectory (default: 1).")
    ] = None,
    unknown_tool_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds of tool calls without a recorded time (default: 1, or the plan's value)."),
    ] = None,
    truncate_context: TruncateContext = False,
    rate_scale: Annotated[
        float | None, typer.Option(help="Factor on the arrival rate of requests (default: 1).")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Number of times to replay the requests, one after another (default: 1).")
    ] = None,
    start: Annotated[float | None, typer.Option(help="Skip requests that arrive before this time, in seconds.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after this many simulated seconds.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the choice of trajectories, and of policies with random choices.")
    ] = 0,
    exact: Exact = False,
    output: ResultFile = None,
    requests_out: Annotated[
        Path | None, typer.Option("--requests-out", help="Write one line of JSON per request to this file.")
    ] = None,
    timeline: TraceFile = None,
    report: ResultPage = None,
    as_json: ResultAsJson = False,
) -> None:
    """Simulate the engines of a plan, or of a file, token by token.

    For a plan, the rollout of one step is simulated; `libra rehearse` simulates whole runs with training. The
    simulation follows vLLM's scheduler, with the planner's iteration times. The same inputs give the same output.

    Exit status: 0 done, 2 bad input, 130 interrupted.
    """
    # Imported here, so that `--help` need not load the simulator.
    from libra.cli.simulation_input import asked
    from libra.report.live import SimulationProgress
    from libra.sim.of_plan import teach
    from libra.sim.simulate import simulate_deployment as run
    from libra.trajectory import read_trajectories

    options = {
        "--concurrency": concurrency,
        "--samples-per-prompt": samples_per_prompt,
        "--unknown-tool-seconds": unknown_tool_seconds,
        "--truncate-context": truncate_context or None,
        "--rate-scale": rate_scale,
        "--repeat": repeat,
        "--start": start,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if report is not None:
        require("report")
    try:
        check_writable(output, requests_out, timeline, report, reads=(what, trajectories, requests, learn_from))
        _check_numbers(seed, time_limit, given)
        work = asked(what, trajectories, requests, given, seed)
        deployment = _routed(work.deployment, route)
        policy = deployment.policy(seed)
        if learn_from is not None:
            _require_learner(deployment.route)
            teach(policy, read_trajectories(learn_from, tell_note))
        limit = deployment.time_limit if time_limit is None else time_limit
        with SimulationProgress(sys.stderr, requests=work.workload.describe()["requests"]) as progress:
            result = run(deployment, work.workload, policy, seed=seed, time_limit=limit, exact=exact, progress=progress)
        text = _document(result, replace(deployment, time_limit=limit), seed, work.forecast)
        _write(result, text, output, requests_out, timeline, report, what.name)
    except (ValueError, OSError) as error:
        bad_input(of_option(error, given))
    if as_json:
        typer.echo(text, nl=False)
    else:
        _show(result, work.forecast)
    tell_notes((*work.notes, *(_cold_router(deployment) if learn_from is None else ())), err=as_json)


def _routed(deployment: Deployment, route: str | None) -> Deployment:
    if route is None:
        return deployment
    try:
        return replace(deployment, route=route)
    except ValueError as error:
        raise ValueError(f"--route: {error}") from None


def _require_learner(route: str) -> None:
    from libra.route.catalogue import is_path
    from libra.route.cmlfq import CMLFQ
    from libra.route.published import PublishedCMLFQ

    if route not in (PublishedCMLFQ.NAME, CMLFQ.NAME) and not is_path(route):
        raise ValueError(
            f"--learn-from needs a policy that learns, but {route} does not: leave it out, or give --route"
            f" {PublishedCMLFQ.NAME}"
        )


def _cold_router(deployment: Deployment) -> list[str]:
    from libra.route.published import PublishedCMLFQ

    if deployment.route != PublishedCMLFQ.NAME or deployment.limits is None or len(deployment.limits) < 2:
        return []
    return [
        f"{deployment.route} starts without evidence, so trajectories stay in the first bucket until some have "
        f"finished; give --learn-from to start with a log"
    ]


def _document(result: SimulationResult, deployment: Deployment, seed: int, forecast: PlannedRollout | None) -> str:
    from libra.sim.clock import seconds
    from libra.sim.outcome.result_file import document

    asked = {
        "route": deployment.route,
        "sticky": deployment.sticky,
        "limits": deployment.limits,
        "turn_tokens": deployment.turn_tokens,
        "time_limit": deployment.time_limit,
        "seed": seed,
    }
    if deployment.kv_transfer is not None:
        asked["kv_transfer"] = {**asdict(deployment.kv_transfer), "route": deployment.decode_route}
    compared: dict[str, Any] = {}
    if forecast is not None:
        simulated = seconds(result.makespan)
        compared["plan"] = {
            "predicted_rollout": forecast.seconds,
            "simulated_makespan": simulated,
            "difference": None if result.partial else forecast.error(simulated),
        }
    return json.dumps({**document(result), "run": asked, **compared}, indent=1, allow_nan=False) + "\n"


def _write(
    result: SimulationResult,
    text: str,
    output: Path | None,
    requests_out: Path | None,
    timeline: Path | None,
    report: Path | None,
    title: str,
) -> None:
    from libra.report.simulation_trace import write_simulation_trace
    from libra.report.simulation_view import simulation_view
    from libra.sim.outcome.result_file import write_outcomes

    if output is not None:
        write_text(output, text)
    if requests_out is not None:
        with writing(requests_out):
            write_outcomes(result, requests_out)
    if timeline is not None:
        with writing(timeline):
            write_simulation_trace(result, timeline)
    if report is not None:
        from libra.report.simulation_page import simulation_page

        write_text(report, simulation_page(simulation_view(result), f"Simulation of {title}"))


def _show(result: SimulationResult, forecast: PlannedRollout | None) -> None:
    from rich.console import Console

    from libra.report.simulation_table import simulation_tables
    from libra.report.simulation_view import headline, notices, simulation_view

    view = simulation_view(result)
    console = Console()
    for line in (headline(view), *notices(view), *_compared(result, forecast)):
        console.print(printable(line), highlight=False, soft_wrap=True, markup=False)
    for table in simulation_tables(view, console.width):
        console.print(table)


def _compared(result: SimulationResult, forecast: PlannedRollout | None) -> list[str]:
    from libra.report.words import duration, plural, signed_percent
    from libra.sim.clock import seconds

    if forecast is None or result.partial:
        return []
    simulated = seconds(result.makespan)
    return [
        f"Rollout of {plural(forecast.steps, 'step')}: the plan says {duration(forecast.seconds)} (engines with"
        f" weight loads {duration(forecast.work)}, longest trajectory {duration(forecast.longest)}); simulated"
        f" {duration(simulated)}, {signed_percent(forecast.error(simulated), 1)}."
    ]


def _check_numbers(seed: int, time_limit: float | None, given: dict[str, Any]) -> None:
    from libra.sim.clock import LONGEST

    if seed < 0:
        raise ValueError(f"--seed is {seed}; give 0 or more")
    if time_limit is not None and not 0 < time_limit < LONGEST:
        raise ValueError(f"--time-limit is {time_limit}; give more than 0 seconds, and less than {LONGEST:.3g}")
    for name in ("--start", "--unknown-tool-seconds"):
        if name in given and not 0 <= given[name] < LONGEST:
            raise ValueError(f"{name} is {given[name]}; give 0 seconds or more, and less than {LONGEST:.3g}")
