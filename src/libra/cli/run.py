"""`libra run`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from libra.cli.errors import bad_input, require
from libra.config.input_file import read_input
from libra.config.run import AllocationMode, ConfigError, LauncherKind, LendingRule, RunConfig, load_config
from libra.environments.protocol import Environment
from libra.environments.served import EpisodeFailedError, ServedEnvironment

Result = TypeVar("Result")


def run(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, for example examples/calculator.yaml.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(help="Start with the layout, engines, buckets and placement of this plan.json of `libra plan`."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; its files are in <directory>/<name>.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Parent directory of runs (default: runs).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the model, the prompts and the sampling.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimiser steps.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the optimiser; 0 for a control run without learning.")
    ] = None,
    allocation: Annotated[
        AllocationMode | None,
        typer.Option(help="adaptive: change the roles of workers if that saves time. static: keep the start's roles."),
    ] = None,
    lending: Annotated[
        LendingRule | None,
        typer.Option(
            help="Rule for lent devices. gate: rollout uses them within the bound. off: rollout never uses them. "
            "Other rules are baselines."
        ),
    ] = None,
    launcher: Annotated[
        LauncherKind | None,
        typer.Option(help="local: run workers on this machine. ray: on the nodes of a Ray cluster."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Address of a running Ray cluster, or auto to find one (default: start a cluster for this run)."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve Prometheus metrics on this port (of 127.0.0.1, or metrics.host)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
) -> None:
    """Post-train an agent: vLLM engines generate, agents call tools, trainers learn, and workers change roles.

    Writes report.html, timeline.json (open it in ui.perfetto.dev), metrics.jsonl, decisions.jsonl, trajectories.jsonl
    and the trained model to <directory>/<name>.

    Exit status: 0 done, 1 failed, 2 bad input, 3 no allocation can continue, 130 interrupted.
    """
    overrides = {
        "name": name,
        "directory": str(directory) if directory is not None else None,
        "seed": seed,
        "training.steps": steps,
        "training.learning_rate": learning_rate,
        "allocation": allocation,
        "lending.rule": lending,
        "cluster.launcher": launcher,
        "cluster.ray_address": ray_address,
        "metrics.port": metrics_port,
    }
    try:
        settings = load_config(config, {key: value for key, value in overrides.items() if value is not None})
        planned = ""
        if plan is not None:
            settings, planned = _carrying(settings, plan, resume)
        raise typer.Exit(_run(settings, config.parent, resume, overwrite, as_json, planned))
    except ConfigError as error:
        bad_input(error)


def _carrying(settings: RunConfig, file: Path, resume: bool) -> tuple[RunConfig, str]:
    """The configuration of a run that carries out the plan in a file, and a text that describes the plan. Raises
    `ConfigError`.
    """
    from libra.backends.devices import run_gpus
    from libra.hardware.model_file import load_model
    from libra.plan.carried_plan import carried, carried_words
    from libra.plan.plan import parse_plan, require_answer

    if resume:
        raise ConfigError("--plan starts a run, and --resume continues one: leave one of them out")
    try:
        plan = parse_plan(read_input(file), where=str(file))
        require_answer(plan, plan.request.menu().problem)
        directory = settings.model.directory
        gpus = run_gpus(settings.cluster) if settings.cluster.launcher == "local" else ()
        model = load_model(directory / "config.json") if directory is not None else None
        memory = min((gpu.memory for gpu in gpus), default=None)
        return carried(settings, plan, model, memory), carried_words(plan)
    except OSError as error:
        raise ConfigError(f"--plan {file}: {error.strerror}; give a plan.json of `libra plan -o`") from None
    except ValueError as error:  # from reading the file, or from checking its plan
        raise ConfigError(
            f"--plan {error}" if str(error).startswith(str(file)) else f"--plan {file}: {error}"
        ) from None


def _run(settings: RunConfig, beside: Path, resume: bool, overwrite: bool, as_json: bool, planned: str) -> int:
    require("cpu")
    # Imported here, since planning and reading traces need none of these libraries.
    from libra.environments.registry import load_environment
    from libra.loop.preflight import check, check_environment
    from libra.loop.run_directory import locked
    from libra.records.files import DiskError

    environment = load_environment(settings.environment, beside)
    check(settings, resume, overwrite)
    check_environment(settings, environment)
    try:
        with locked(settings.run_directory):
            return _run_locked(settings, environment, resume, overwrite, as_json, planned)
    except DiskError as error:
        typer.echo(f"libra run: {error}", err=True)
        return 1


async def _until_terminated(work: Awaitable[Result]) -> Result:
    """The result of `work`; SIGTERM cancels it, like Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def _run_locked(
    settings: RunConfig,
    environment: Environment | ServedEnvironment,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    planned: str,
) -> int:
    from libra.backends.grpo.membership import CoreLostError, ExchangeError
    from libra.backends.grpo.trainers import DivergedError
    from libra.backends.launch.fork_server import LaunchError
    from libra.exec.journal import JournalError
    from libra.exec.protocols import WorkerFailedError, WorkerLostError
    from libra.loop.checkpoint import can_be_resumed
    from libra.loop.episode_file import EpisodeFileError
    from libra.loop.run import run as run_session
    from libra.loop.run_directory import prepare_run_directory
    from libra.plan.problem import InfeasiblePlanError
    from libra.records.files import DiskError, writing
    from libra.records.schema import RecordFormatError
    from libra.report.live import make_display
    from libra.report.run_page import render_report

    settings = prepare_run_directory(settings, resume, overwrite)
    run_directory = settings.run_directory
    display = make_display(sys.stderr)
    status, problem = 0, ""
    try:
        summary = asyncio.run(_until_terminated(run_session(settings, environment, display, resume, planned)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        status, problem = 130, f"interrupted (files are in {run_directory})"
    except InfeasiblePlanError as error:
        status, problem = 3, f"the run cannot continue: {error}"
    except (EpisodeFileError, JournalError, RecordFormatError) as error:
        bad_input(error)
    except DiskError as error:
        status, problem = 1, str(error)
    except (
        LaunchError,
        CoreLostError,
        DivergedError,
        EpisodeFailedError,
        ExchangeError,
        WorkerFailedError,
        WorkerLostError,
        TimeoutError,
    ) as error:
        status, problem = 1, f"{error} (logs are in {run_directory / 'logs'})"
    finally:
        display.close()
    report = run_directory / "report.html"
    if (run_directory / "metrics.jsonl").exists():
        try:
            with writing(report):
                report.write_text(render_report(run_directory), encoding="utf-8")
        except DiskError as error:
            status, problem = status or 1, problem or str(error)
        except ValueError as error:  # a record of an earlier session is damaged
            status, problem = status or 2, problem or f"there is no report: {error}"
    if problem:
        resumable = can_be_resumed(run_directory)
        fresh = "the run has no checkpoint yet; start again with --overwrite"
        remedy = "continue with --resume" if resumable else fresh
        typer.echo(f"libra run: {problem}; {remedy}", err=True)
        return status
    if as_json:
        typer.echo(summary.to_json())
    else:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        typer.echo(
            f"sampled accuracy {first.sampled_accuracy:.3f} -> {last.sampled_accuracy:.3f}, greedy"
            f" {first.greedy_accuracy:.3f} -> {last.greedy_accuracy:.3f} on {last.questions} held-out questions,"
            f" {summary.steps} steps in {summary.wall_seconds:.0f} s"
        )
        typer.echo(f"report: {report}")
    return 0
