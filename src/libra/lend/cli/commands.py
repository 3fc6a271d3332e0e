"""`libra lend`: lend idle time of serving deployments to rollouts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import TraceFile
from libra.cli.output import check_writable, tell_notes, write_text, writing
from libra.report.words import percent

if TYPE_CHECKING:
    from libra.lend.backend.agent import LendingPeriod
    from libra.lend.backend.lender_file import LoanOrder
    from libra.lend.certificate import Certificate
    from libra.lend.gate import Slo
    from libra.lend.sim.certify import LendingCase, LoadTrial

app = typer.Typer(no_args_is_help=True, help="Lend idle time of serving deployments to rollouts.")

_EACH = "{use}"  # placeholder in the name of a file
_LOADS = tuple(step / 10 for step in range(1, 21))  # multiples of the rate of the traffic


@app.callback()
def lend() -> None:
    """Lend idle time of serving deployments to rollouts."""


@app.command()
def check(
    engine: Annotated[
        Path, typer.Argument(metavar="ENGINE", help="YAML file with the serving engine, as for `libra simulate`.")
    ],
    traffic: Annotated[
        Path, typer.Option("--traffic", help="Requests of its users: .jsonl, or another log, such as Azure's.")
    ],
    ttft: Annotated[str, typer.Option(help="SLO: time to the first token, such as 1s; a bare number is seconds.")],
    tpot: Annotated[str, typer.Option(help="SLO: time per token after the first, such as 50ms.")],
    use: Annotated[
        str, typer.Option(help="Shares of tpot to which serving may be slowed down; each is tried.")
    ] = "0.6,0.8,0.95",
    longest_grant: Annotated[
        float, typer.Option(help="Longest time in seconds for which a rollout step has the device.")
    ] = 0.03,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the certificate of the highest rate to this file; with {use} in the name, write a file "
            "for each certificate.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all certificates as JSON.")] = False,
) -> None:
    """Find how much of a serving engine's time can be lent without costing its users their SLO.

    The traffic is replayed at 0.1, 0.2, ... 2 times its rate: alone, and with a borrower that uses every grant to its
    end. A certificate is valid up to the highest of these rates at which lending makes no request miss its SLO.

    Exit status: 0 done, 2 bad input (also an SLO that serving alone misses), 3 nothing can be lent.
    """
    # Imported here so that `--help` does not load the simulator.
    from libra.config.units import PLAUSIBLE, duration
    from libra.lend.certificate import best, certificate_json
    from libra.lend.gate import Slo
    from libra.lend.sim.certify import NothingToLendError, certify

    try:
        uses = _uses(use)
        if output is not None:
            check_writable(*{_file(output, each): None for each in uses}, reads=(engine, traffic))
        slo = Slo(*(duration(f"--{name}", it, PLAUSIBLE[name]) for name, it in (("ttft", ttft), ("tpot", tpot))))
        case = _case(engine, traffic, slo, longest_grant)
        found = certify(case, uses, _LOADS, _Told(as_json))
        chosen = best(found, max(it.covered for it in found))
        if output is not None:
            for it in found if _EACH in output.name else (chosen,):
                write_text(_file(output, it.use), certificate_json(it))
    except NothingToLendError as error:
        typer.echo(f"libra: {error}", err=True)
        raise typer.Exit(3) from None
    except (ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(json.dumps([json.loads(certificate_json(it)) for it in found], indent=1))
    else:
        _show(found, chosen)


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with the loan, as examples/loan.yaml.")],
    period: Annotated[float, typer.Option(help="Seconds between two progress lines.")] = 10.0,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", help="Directory for the logs of the processes (default: a temporary directory)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per period.")] = False,
) -> None:
    """Lend the device of a vLLM server on this machine to a rollout engine. The server runs with LendingScheduler.

    Starts the engine next to the server, and renews the lender's word every few seconds. The loan pauses while the load
    is outside the certificate's envelope, or the server is not running. The loan ends with this process. A controller
    connects to the engine at a Unix socket. Without a controller, the engine computes nothing and does not use the
    device.

    Runs until it is interrupted. Exit status: 0 ended by Ctrl-C or SIGTERM, 1 the loan cannot continue, 2 bad input.
    """
    import asyncio
    import shutil
    import tempfile

    from libra.config.yaml_file import ConfigError

    try:
        if not 0 < period < math.inf:
            raise ValueError(f"--period is {period:g}; give more than 0 seconds, and finite")
        if logs is not None and logs.exists() and not logs.is_dir():
            raise ValueError(f"--logs: {logs} is not a directory; give a directory, or a name that does not exist")
        require("cpu")
        from libra.backends.launch.fork_server import LaunchError
        from libra.lend.backend.agent import LoanEndedError
        from libra.lend.backend.device_page import LendingError
        from libra.lend.backend.lender_file import load_lender_file

        lender = load_lender_file(file)
        directory = Path(tempfile.mkdtemp(prefix="libra-lend-")) if logs is None else logs
        kept = logs is not None
        try:
            asyncio.run(_serve(lender, directory, period, as_json))
        except (LoanEndedError, LaunchError) as error:
            kept = True
            typer.echo(f"libra: {error} (logs: {directory})", err=True)
            raise typer.Exit(1) from None
        except LendingError as error:
            bad_input(error)
        finally:
            if not kept:
                shutil.rmtree(directory, ignore_errors=True)
    except (ConfigError, ValueError, OSError) as error:
        bad_input(error)


@app.command()
def report(
    record: Annotated[
        Path, typer.Argument(metavar="RECORD", help="Record of a borrower: the file that `record` of a loan names.")
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write the history as an HTML page to this file.")] = None,
    timeline: TraceFile = None,
) -> None:
    """Show the history of a loan: grants, recalls, load, and how early the tokens of users came.

    Exit status: 0 done, 2 bad input.
    """
    from libra.lend.records.loan_history import recorded_loan
    from libra.lend.records.loan_trace import write_loan_trace
    from libra.report.words import duration, plural

    if html is not None:
        require("report")
    try:
        check_writable(html, timeline, reads=(record,))
        loan = recorded_loan(record)
        if loan is None or not loan.seconds:
            raise ValueError(f"{record}: the record has no request to the gate; give one of a loan that was used")
        had = percent(sum(it.end - it.start for it in loan.grants) / loan.seconds)
        given = f"{plural(len(loan.grants), 'grant')}, {plural(len(loan.recalls), 'recall')}"
        words = f"In {duration(loan.seconds)} rollout had the device {had} of the time ({given}); {loan.late_words}."
        typer.echo(words)
        if html is not None:
            from libra.lend.pages.lending_section import lending_chapter, lending_section
            from libra.report.page import render

            section = lending_section([loan], "the first question")
            facts = {"headline": words, "notices": (), "tiles": (), "chapter": lending_chapter(section)}
            write_text(html, render("lent.html", loan.name, "libra.lend.pages", **facts))
        if timeline is not None:
            with writing(timeline):
                write_loan_trace(loan, timeline)
    except (ValueError, OSError) as error:
        bad_input(error)


async def _serve(lender: LoanOrder, logs: Path, period: float, as_json: bool) -> None:
    import asyncio
    import signal
    from dataclasses import asdict

    from libra.lend.backend.agent import LendingAgent

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with LendingAgent.open(lender, logs, lambda line: typer.echo(f"libra: {line}", err=True)) as agent:

        async def tell() -> None:
            while True:
                await asyncio.sleep(period)
                said = agent.period()
                typer.echo(json.dumps(asdict(said)) if as_json else _line(said))

        agent.period()
        telling = asyncio.create_task(tell())
        try:
            await agent.run(ended)
        finally:
            telling.cancel()


def _line(it: LendingPeriod) -> str:
    step = "not known yet" if it.longest_step is None else f"{1e3 * it.longest_step:.0f} of {1e3 * it.pace:.0f} ms"
    lent = f"lent {percent(it.lent, 0)}, {it.grants} steps, {it.tokens:,} tokens"
    lent = f"nothing lent ({it.why})" if it.why else lent
    late = f", {it.over_bound} over their bound, {it.overstayed} overstayed" if it.over_bound else ""
    return f"{lent}{late}; {it.turns} turns; serving {it.live} live, {it.requests} came, longest step {step}"


def _case(engine: Path, traffic: Path, slo: Slo, longest_grant: float) -> LendingCase:
    from libra.lend.cli.lenders import read_traffic
    from libra.lend.sim.certify import LendingCase
    from libra.sim.engines_file import load_lender

    if not 0 < longest_grant < math.inf:
        raise ValueError(f"--longest-grant is {longest_grant:g}; give more than 0 seconds, and finite")
    spec, model, hardware = load_lender(engine, lambda note: tell_notes([note], err=True))
    return LendingCase(
        spec=spec,
        model=model.name,
        parameters=model.parameters,
        hardware=hardware,
        slo=slo,
        traffic=traffic.name,
        requests=read_traffic(traffic),
        longest_grant=longest_grant,
    )


def _file(output: Path, use: float) -> Path:
    """The file for the certificate of this `use`, such as chat_use_60.json for chat_use_{use}.json."""
    return output.with_name(output.name.replace(_EACH, f"{100 * use:g}"))


def _uses(text: str) -> list[float]:
    try:
        uses = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--use is {text!r}; give shares of tpot between commas, such as 0.6,0.8") from None
    wrong = next((use for use in uses if not 0 < use <= 1), None)
    if wrong is not None:
        raise ValueError(f"--use has {wrong:g}; a share of tpot is above 0 and at most 1")
    return uses


class _Told:
    """Prints a line for each replay, as it ends."""

    def __init__(self, to_stderr: bool) -> None:
        self._stderr = to_stderr or not sys.stdout.isatty()

    def __call__(self, trial: LoadTrial) -> None:
        told = f"load {trial.load:.1f} ({trial.rate:.2f} requests/s), use {trial.use:g}: lent {percent(trial.lent)}"
        typer.echo(f"{told}{'' if trial.refused is None else f'; refused: {trial.refused}'}", err=self._stderr)


def _show(found: tuple[Certificate, ...], chosen: Certificate) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("use", "requests/s", "lent", "longest step", "live", "waiting tokens", ""):
        table.add_column(name, justify="right")
    for it in found:
        table.add_row(
            f"{it.use:g}",
            f"{it.covered:.2f}",
            percent(it.share_at(it.covered)),
            f"{1e3 * it.longest_step:.0f} ms of {1e3 * it.slo.pace(it.use):.0f}",
            f"{it.envelope.live:,}",
            f"{it.envelope.queued:,}",
            "chosen" if it is chosen else "",
        )
    console = Console()
    console.print(
        f"{chosen.model} on {chosen.hardware} can lend {percent(chosen.share_at(chosen.covered))} of its time up to"
        f" {chosen.covered:.2f} requests/s; lending makes no request miss its SLO.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    if chosen.covered < chosen.rate:
        console.print(
            f"The replay at {chosen.rate:.2f} requests/s lasted less than a minute: a longer log covers more.",
            highlight=False,
            soft_wrap=True,
        )


GROUP = "lend", app  # of the `libra` command
