"""`libra plan`: makes a plan from files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from libra.cli.errors import bad_input, infeasible
from libra.cli.options import TruncateContext
from libra.cli.output import STDOUT, check_writable, reading, tell_notes, write_text

if TYPE_CHECKING:
    from libra.plan.offline import LogEvidence
    from libra.plan.plan import Plan, Solver


class SolverName(StrEnum):
    cp_sat = "cp-sat"
    ilp = "ilp"


def plan(
    where: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER",
            help="cluster.yaml with classes of nodes, or the configuration of a run. Optional with --compare.",
        ),
    ] = None,
    *,
    trajectories: Annotated[
        Path,
        typer.Option(
            "--trajectories", "-t", help="Log of trajectories, in Libra's format or a format of `libra trace formats`."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model: its config.json, the directory of that file, or a known name."),
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option("--request", "-r", help="request.yaml with batch, mode, lengths and settings of training."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            help="Source of engine times: auto, tables, roofline or a calibration file. For a run: its profile.json.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Host overhead on top of kernel times: default (vLLM's, by layers), fast, none, or the file of a fit.",
        ),
    ] = None,
    truncate_context: TruncateContext = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Change an input: gpus=64, gpu=H200, NODES=12 (nodes of a class), or a key of the request, such "
            "as batch=1024; repeatable.",
        ),
    ] = None,
    longest_tool_call: Annotated[
        float | None,
        typer.Option(
            "--longest-tool-call",
            metavar="SECONDS",
            min=0,
            help="Shorten longer tool calls to this time, for logs in which calls wait for people.",
        ),
    ] = None,
    solver: Annotated[
        SolverName, typer.Option("--solver", help="cp-sat or ilp (an integer linear program; needs the extra ilp).")
    ] = SolverName.cp_sat,
    router: Annotated[
        str | None,
        typer.Option(
            "--router",
            help="Policy that will route the turns: a name, or path.py:Class (default: the request's router).",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="NAME",
            help="Plan only what this framework supports: a name of `libra export`, such as verl, slime or trl; "
            "or libra, for `libra run`.",
        ),
    ] = None,
    simulate_for: Annotated[
        float,
        typer.Option(
            "--simulate-for",
            metavar="SECONDS",
            min=0,
            help="Approximate time for comparing plans in simulation; inf: until the comparison is decided.",
        ),
    ] = 20.0,
    no_simulation: Annotated[
        bool, typer.Option("--no-simulation", help="Return the plan with the shortest predicted step at once.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Number of simulation processes (default: one per core).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulated draws.")] = 0,
    offers: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="OFFERS",
            help="Compare clusters: NAME:GPUS or NAME:FIRST..LAST, such as h100:8..64,b200:8..32. NAME is a class "
            "of CLUSTER or a GPU. Needs --steps.",
        ),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option("--cost", metavar="NAME=DOLLARS,...", help="Dollars per GPU and hour, such as h100=2.5,b200=5."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Optimiser steps of the whole training, to compute its days and dollars."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", help="With --compare: time limit of the training, such as 7d or 36h.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="With --compare: write the comparison as an HTML page to this file.")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Also solve with the other solver, and compare the results.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON to this file; - for standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on standard output.")] = False,
) -> None:
    """Plan post-training: which GPUs train and which generate, in which parallelism, and which lengths each engine
    serves.

    With --model, the plan is for a cluster of GPUs. The solver proposes the best plan of each kind, and simulations of
    whole runs under your router choose among them. The plan has both the predicted and the simulated step. The solver's
    proof (status, bound, gap) is for the predicted step.

    Without --model, CLUSTER is the configuration of a run on one machine (as for `libra run`), and --profile is the
    profile.json that a run has measured. The step is then only predicted.

    The plan embeds its request. With --simulate-for inf or --no-simulation, the same inputs give the same output.

    With --compare, each offered cluster gets a plan. The fastest cluster, and the cheapest within --deadline, are also
    simulated.

    Exit status: 0 a plan, 1 the solvers disagree (--confirm), 2 bad input, 3 no plan exists (the message names the
    conflict), or no cluster of --compare meets the deadline.
    """
    # Imported here, so that `--help` need not load the solver.
    from libra.cli.cluster_plan import PlanInputs, plan_cluster
    from libra.cli.offers import Buying, show_offers
    from libra.config.yaml_file import ConfigError
    from libra.plan.explain.explained import bound_and_pools
    from libra.plan.explain.framework_cost import framework_cost
    from libra.plan.plan import DisagreementError, dump_plan
    from libra.plan.problem import InfeasiblePlanError
    from libra.report.framework_words import framework_sentence
    from libra.report.plan_headline import disagreement, headline, job_sentence, little_evidence
    from libra.report.plan_table import log_notes, plan_tables

    notes: list[str] = []
    if output == STDOUT:
        output, as_json = None, True
    try:
        named = [Path(it) / within for it in (model, profile, host) if it is not None for within in ("", "config.json")]
        check_writable(output, html, reads=(where, trajectories, request, *named))
        buying = Buying(offers, cost, steps, deadline, output, html, as_json, confirm)
        buying.require_whole(model)
        if model is None:
            _refuse_of_clusters(host, router, framework)
            run = _given(where)
            found, evidence = _plan_run(run, trajectories, profile, what_if, longest_tool_call, solver.value, notes)
        else:
            inputs = PlanInputs(
                log=trajectories,
                model=model,
                request=request,
                profile="auto" if profile is None else profile,
                host="default" if host is None else host,
                truncate=truncate_context,
                longest_tool_call=longest_tool_call,
                solver=solver.value,
                router=router,
                framework=framework,
                simulated=None if no_simulation else (simulate_for, jobs, seed),
            )
            if offers is not None:
                show_offers(where, what_if or [], inputs, buying)
                return
            found, evidence = plan_cluster(_given(where), what_if or [], inputs, notes)
        if confirm:
            notes.append(_confirmed(found, solver.value))
        text = dump_plan(found)
        bound, pools = bound_and_pools(found)
        if output is not None:
            write_text(output, text)
    except InfeasiblePlanError as error:
        infeasible(error)
    except DisagreementError as error:
        typer.echo(f"libra: {error}", err=True)
        raise typer.Exit(1) from None
    except (ConfigError, ModuleNotFoundError, ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(text, nl=False)
    else:
        console = Console()
        job = () if steps is None else (job_sentence(found, steps),)
        restricted = framework_sentence(framework_cost(found))
        for line in (*headline(found), *job, *restricted, *disagreement(found), *little_evidence(found)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        for table in plan_tables(found, bound, pools):
            console.print(table)
    tell_notes((*notes, *log_notes(found, bound, evidence)), err=as_json)


def _refuse_of_clusters(host: str | None, router: str | None, framework: str | None) -> None:
    """Raise ValueError for an option that applies only to clusters of GPUs."""
    if host is not None:
        raise ValueError("--host is for a cluster of GPUs: the profile.json of a run already contains the host's time")
    if router is not None:
        raise ValueError("--router is for a cluster of GPUs: the configuration of a run names its router")
    if framework is not None:
        raise ValueError("--for is for a cluster of GPUs: only libra run carries out a plan for its configuration")


def _given(where: Path | None) -> Path:
    if where is None:
        raise ValueError("CLUSTER is missing: give a cluster.yaml, the configuration of a run, or --compare")
    return where


def _confirmed(plan: Plan, solver: Solver) -> str:
    from libra.plan.plan import confirm

    other = confirm(plan, "ilp" if solver == "cp-sat" else "cp-sat")
    return (
        f"confirmed: {solver} has a step of {plan.predicted.step:,.4f} s and proves that none is below"
        f" {plan.proof.bound:,.4f} s; {other.solver} has {other.step:,.4f} s and {other.bound:,.4f} s"
    )


def _plan_run(
    where: Path,
    log: Path,
    profile: str | None,
    what_if: list[str] | None,
    longest_tool_call: float | None,
    solver: Solver,
    notes: list[str],
) -> tuple[Plan, LogEvidence]:
    from libra.config.run import ConfigError, load_config
    from libra.cost.sources.files import load_profile
    from libra.plan.offline import gather, request_from
    from libra.plan.plan import make_plan
    from libra.trajectory import read_trajectories

    if profile is None:
        raise ConfigError(
            "--model or --profile is missing: give --model for a cluster of GPUs, or --profile profile.json "
            "(measured by a run) for a run on one machine"
        )
    if what_if:
        raise ConfigError("--what-if is for a cluster of GPUs: change the configuration of a run in its file")
    settings = load_config(where)
    evidence = gather(settings, reading(log, read_trajectories(log, notes.append), "trajectories"), longest_tool_call)
    try:
        measured = load_profile(Path(profile))
    except ConfigError as error:
        raise ConfigError(f"--profile {error}") from None
    request = request_from(settings, evidence, measured)
    return make_plan(request, seed=settings.seed, solver=solver), evidence
