"""`libra lend`. What a deployment that serves can spare for rollouts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input
from libra.cli.output import check_writable, write_text

if TYPE_CHECKING:
    from libra.lend.certificate import Certificate
    from libra.sim.certify import LendingCase, LoadTrial

app = typer.Typer(no_args_is_help=True, help="What a deployment that serves can spare for rollouts.")

_LOADS = tuple(step / 10 for step in range(1, 21))  # times the rate of the traffic


@app.callback()
def lend() -> None:
    """What a deployment that serves can spare for rollouts."""


@app.command()
def check(
    engine: Annotated[
        Path, typer.Argument(metavar="ENGINE", help="YAML file with the serving engine, as for `libra simulate`.")
    ],
    traffic: Annotated[
        Path, typer.Option("--traffic", help="What it serves: requests as .jsonl, or .csv as Azure's traces.")
    ],
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token.")],
    tpot: Annotated[float, typer.Option(help="SLO: seconds a token after the first.")],
    use: Annotated[
        str, typer.Option(help="Shares of tpot that serving may be slowed down to, each tried.")
    ] = "0.6,0.8,0.95",
    longest_grant: Annotated[float, typer.Option(help="Seconds that a rollout step has the device, at most.")] = 0.03,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the certificate of the highest rate to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all certificates as JSON.")] = False,
) -> None:
    """Find how much of a serving engine's time can be lent without costing its users their SLO.

    The traffic is replayed at 0.1, 0.2, ... 2 times its rate, alone and with a borrower that spends every grant to its
    end. A certificate holds up to the largest of these rates at which no request misses the SLO that meets it alone.

    Exit status: 0 done, 2 bad input, 3 nothing can be lent.
    """
    # Imported here: `--help` must not wait for what simulating needs.
    from libra.lend.certificate import best, certificate_json
    from libra.sim.certify import NothingToLendError, certify

    try:
        check_writable(output, reads=(engine, traffic))
        case, uses = _case(engine, traffic, ttft, tpot, longest_grant), _uses(use)
        found = certify(case, uses, _LOADS, _Told(as_json))
    except NothingToLendError as error:
        typer.echo(f"libra: {error}", err=True)
        raise typer.Exit(3) from None
    except (ValueError, OSError) as error:
        bad_input(error)
    chosen = best(found, max(it.rate for it in found))
    if output is not None:
        write_text(output, certificate_json(chosen))
    if as_json:
        typer.echo(json.dumps([json.loads(certificate_json(it)) for it in found], indent=1))
    else:
        _show(found, chosen)


def _case(engine: Path, traffic: Path, ttft: float, tpot: float, longest_grant: float) -> LendingCase:
    from libra.lend.gate import Slo
    from libra.sim.certify import LendingCase
    from libra.sim.engines_file import load_lender
    from libra.sim.workload.request_file import read_requests

    if not 0 < longest_grant < math.inf:
        raise ValueError(f"--longest-grant is {longest_grant:g}; give more than 0 seconds, and finite")
    spec, model, hardware = load_lender(engine, lambda note: typer.echo(f"note: {note}", err=True))
    return LendingCase(
        spec=spec,
        model=model,
        hardware=hardware,
        slo=Slo(ttft, tpot),
        traffic=traffic.name,
        requests=tuple(read_requests(traffic)),
        longest_grant=longest_grant,
    )


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
    """A line for each replay, as it ends."""

    def __init__(self, to_stderr: bool) -> None:
        self._stderr = to_stderr or not sys.stdout.isatty()

    def __call__(self, trial: LoadTrial) -> None:
        told = f"load {trial.load:.1f} ({trial.rate:.2f} requests/s), use {trial.use:g}: lent {trial.lent:.1%}"
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
            f"{it.rate:.2f}",
            f"{it.harvest[-1].share:.1%}",
            f"{1e3 * it.longest_step:.0f} ms of {1e3 * it.slo.pace(it.use):.0f}",
            f"{it.envelope.live:,}",
            f"{it.envelope.queued:,}",
            "chosen" if it is chosen else "",
        )
    console = Console()
    console.print(
        f"{chosen.model} on {chosen.hardware} can lend {chosen.harvest[-1].share:.1%} of its time up to"
        f" {chosen.rate:.2f} requests/s, and no request misses its SLO that meets it alone.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
